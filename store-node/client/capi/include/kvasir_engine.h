/*
 * Attaches an inference engine to the store node of its host, for C.
 *
 * Engine and node exchange Protocol Buffers messages: AttachRequest, EngineToNode and NodeToEngine of
 * proto/kvasir/v1/attach.proto, which documents them. The conductor calls the engine over gRPC
 * (proto/kvasir/v1/engine.proto) at the address in the AttachRequest.
 *
 * Several engines may attach to a node, each with its own name (`engines_max` of store-node.toml). All
 * functions may be called from any thread. Concurrent calls of kvasir_engine_send wait for each other, and
 * so do calls of kvasir_engine_receive. Neither makes a system call while the node is awake. After a fork
 * the child process must attach an engine of its own.
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

/* The load of the engine, for admission. */
typedef struct {
    uint32_t running_requests;
    uint32_t waiting_requests;
    uint64_t waiting_prompt_tokens;
    /* Since the engine started. The number never falls while the engine is attached. */
    uint64_t computed_prompt_tokens;
} kvasir_engine_load;

/*
 * Attaches with an encoded AttachRequest, in which this function sets `pid`. KVASIR_UNREACHABLE: the node does
 * not answer, has its maximum of engines, or has an engine of this name; try again later.
 */
kvasir_status kvasir_engine_attach(const char *attach_dir, const uint8_t *request, size_t request_bytes,
                                   kvasir_engine **engine);

/*
 * Detaches the engine and unmaps the slots and the pool, which must not be accessed afterwards. No other call may
 * be in progress. NULL is ignored.
 */
void kvasir_engine_detach(kvasir_engine *engine);

/*
 * The node's slots, mapped for reading and writing. `bytes`, if it is not NULL, receives their size. Slot i
 * starts at i * slot_bytes of the layout. The engine may only access slots that were bound or granted, and
 * may only write pages that are not cached.
 */
uint8_t *kvasir_engine_slots(const kvasir_engine *engine, size_t *bytes);

/*
 * The descriptor of that memory, to map it again or to register it with a device. The engine owns it:
 * duplicate it to keep it. -1 for NULL.
 */
int kvasir_engine_slots_fd(const kvasir_engine *engine);

/*
 * The engine's own pages if its AttachRequest contains a pool in host memory, mapped for reading and
 * writing. `bytes`, if it is not NULL, receives their size. NULL and 0 without such a pool. The request
 * describes the location of each page. Pages that are held (HoldPages) or being filled (FillPages) must
 * not be written before PagesDropped or PagesFilled. A prompt may be computed in the pool (StepPlan names
 * the pages as `pool_pages`): layers that kvasir_engine_progress has announced must not be written before
 * PagesDropped, and the slots of these pages must not be written at all.
 */
uint8_t *kvasir_engine_pool(const kvasir_engine *engine, size_t *bytes);

/* The descriptor of that memory, as with kvasir_engine_slots_fd; -1 without a pool in host memory. */
int kvasir_engine_pool_fd(const kvasir_engine *engine);

uint32_t kvasir_engine_slots_total(const kvasir_engine *engine);

/* 0 after the node is gone or has detached this engine. The slots must not be written then. */
int kvasir_engine_is_connected(const kvasir_engine *engine);

/* Sends an encoded EngineToNode. KVASIR_NO_CAPACITY: the node has read no message for 50 ms. */
kvasir_status kvasir_engine_send(const kvasir_engine *engine, const uint8_t *message,
                                 size_t message_bytes);

/*
 * Returns the next encoded NodeToEngine. Waits for one until the timeout or until a thread calls
 * kvasir_engine_wake; it may return earlier. An empty message means that there was none. `message` points
 * to memory that is valid until the next call of this function.
 */
kvasir_status kvasir_engine_receive(const kvasir_engine *engine, uint64_t timeout_us,
                                    kvasir_bytes *message);

/* Wakes a kvasir_engine_receive that waits in another thread. */
void kvasir_engine_wake(const kvasir_engine *engine);

/*
 * Announces that layers [0, layers_done) of a step are written, to the slots or to the pool, as in its
 * StepPlan. The earlier writes of this thread are visible to the node, which may send them from now on.
 * Data that a GPU wrote must be complete, not only enqueued.
 */
void kvasir_engine_progress(const kvasir_engine *engine, uint32_t step, uint16_t layers_done);

/* Publishes the load. It is cheap: call it at every change. */
void kvasir_engine_publish_load(const kvasir_engine *engine, const kvasir_engine_load *load);

#ifdef __cplusplus
}
#endif

#endif
