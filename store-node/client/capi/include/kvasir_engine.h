/*
 * The attach of an inference engine to the store node of its host, for C.
 *
 * What engine and node say to each other is encoded with Protocol Buffers: the messages AttachRequest,
 * EngineToNode and NodeToEngine of proto/kvasir/v1/attach.proto, whose comments say what each means.
 * The conductor calls the engine over gRPC (proto/kvasir/v1/engine.proto), at the address that its
 * AttachRequest names.
 *
 * Several engines may attach to a node, each by its own name (`engines_max` of store-node.toml). All
 * functions may be called from any thread; calls of kvasir_engine_send wait for each other, and so do
 * calls of kvasir_engine_receive. Neither makes a system call while the node is awake. A process that
 * forks attaches anew.
 *
 * Link with -lkvasir_client_c.
 */
#ifndef KVASIR_ENGINE_H
#define KVASIR_ENGINE_H

#include "kvasir.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvasir_engine kvasir_engine;

/* What the engine is doing, for admission. */
typedef struct {
    /* Sequences. */
    uint32_t running;
    uint32_t waiting;
    uint64_t waiting_prompt_tokens;
    /* Since the engine attached. */
    uint64_t computed_prompt_tokens;
} kvasir_load;

/*
 * Attaches, with an encoded AttachRequest; its `pid` is filled in. KVASIR_UNREACHABLE: the node is not
 * there, has as many engines as it takes, or has one of this name; try again later.
 */
kvasir_status kvasir_engine_attach(const char *attach_dir, const uint8_t *request, size_t request_bytes,
                                   kvasir_engine **engine);

/*
 * Says goodbye and unmaps the slots and the pool: they must not be touched any more, and no other call may be
 * under way. NULL is ignored.
 */
void kvasir_engine_detach(kvasir_engine *engine);

/*
 * The node's slots, mapped for reading and writing, and in `bytes`, where that is not NULL, how many
 * bytes they are. Slot i begins at i * slot_bytes of the layout. Only slots that were bound or granted
 * may be touched, and only bytes of pages that are not cached may be written.
 */
uint8_t *kvasir_engine_slots(const kvasir_engine *engine, size_t *bytes);

/*
 * The descriptor of that memory, to map it once more or to register it with a device. It stays the
 * engine's: duplicate it to keep it. -1 for NULL.
 */
int kvasir_engine_slots_fd(const kvasir_engine *engine);

/*
 * The engine's own pages, where its AttachRequest asks for a pool in memory of the host: mapped for
 * reading and writing, and in `bytes`, where that is not NULL, how many bytes they are. NULL and 0 where
 * there is none. Where page i lies was said in the request. Pages that are held (HoldPages) or being
 * filled (FillPages) must not be written until PagesDropped or PagesFilled has come. A prompt may be
 * computed there (StepPlan names the pages as `pool_pages`): layers that kvasir_engine_progress has named
 * must not be written until PagesDropped has come, and slots of these pages not at all.
 */
uint8_t *kvasir_engine_pool(const kvasir_engine *engine, size_t *bytes);

/* The descriptor of that memory, as kvasir_engine_slots_fd; -1 where there is none. */
int kvasir_engine_pool_fd(const kvasir_engine *engine);

uint32_t kvasir_engine_slots_total(const kvasir_engine *engine);

/* 0 once the node is gone or has detached this engine. Slots must then not be written. */
int kvasir_engine_is_connected(const kvasir_engine *engine);

/* Sends an encoded EngineToNode. KVASIR_NO_SPACE: the node has taken nothing for 50 ms. */
kvasir_status kvasir_engine_send(const kvasir_engine *engine, const uint8_t *message,
                                 size_t message_bytes);

/*
 * Takes the next encoded NodeToEngine, and waits for one until the time is over or somebody calls
 * kvasir_engine_wake; it may return earlier. No bytes: there was none. `message` points to memory of
 * the engine that is valid until the next call of this function.
 */
kvasir_status kvasir_engine_receive(const kvasir_engine *engine, uint64_t timeout_us,
                                    kvasir_bytes *message);

/* Ends the waiting of kvasir_engine_receive in another thread. */
void kvasir_engine_wake(const kvasir_engine *engine);

/*
 * Says that layers [0, layers_done) of a step are written, into slots or into the pool as its StepPlan
 * says: whatever this thread has written before is visible to the node, which may send it from now on.
 * What a GPU writes must be complete, not only enqueued.
 */
void kvasir_engine_progress(const kvasir_engine *engine, uint32_t step, uint16_t layers_done);

/* Cheap: call it as often as it changes. */
void kvasir_engine_publish_load(const kvasir_engine *engine, const kvasir_load *load);

#ifdef __cplusplus
}
#endif

#endif
