/*
 * Objects in the memory of a store node on the same host, for C.
 *
 * A function that can fail returns a kvasir_status. After any status except KVASIR_OK,
 * kvasir_last_error() returns a message with the cause and the remedy. All functions may be called
 * from any thread, and many threads may use one client at once. After a fork the child process must
 * open a client of its own.
 *
 * Link with -lkvasir_client_c.
 */
#ifndef KVASIR_H
#define KVASIR_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    KVASIR_OK = 0,
    /* No node answers: try again later. */
    KVASIR_UNREACHABLE = 1,
    /* The node refused the request, and will refuse it again until a setting changes. */
    KVASIR_REFUSED = 2,
    /* The node is gone or has disconnected this client: open a new client. */
    KVASIR_LOST = 3,
    /* No space: release objects, or try again later. */
    KVASIR_NO_CAPACITY = 4,
    /* The node is draining: use another one. */
    KVASIR_DRAINING = 5,
    /* An argument is invalid. */
    KVASIR_INVALID = 6,
    /* The node has another version, or there is a bug. */
    KVASIR_PROTOCOL = 7
} kvasir_status;

typedef enum {
    KVASIR_STORED = 0,
    /* The object was present and is unchanged. */
    KVASIR_EXISTS = 1,
    /* The object is absent: the lease expired, or it was present and has been evicted. Put it again. */
    KVASIR_OBJECT_LOST = 2,
    /* The object is present as a normal object, but is not persisted. kvasir_last_error() returns the cause. */
    KVASIR_NOT_PERSISTED = 3,
    /* The key belongs to a block of another namespace. */
    KVASIR_OBJECT_REFUSED = 4
} kvasir_object_outcome;

typedef enum {
    /* Kept until it is evicted. */
    KVASIR_NORMAL = 0,
    /* In DRAM until it is removed, or until the client that put it closes or ends. */
    KVASIR_EPHEMERAL = 1,
    /* On the SSD for the tenant until its time to live ends. */
    KVASIR_CONTEXT = 2
} kvasir_object_class;

typedef enum {
    KVASIR_ABSENT = 0,
    KVASIR_DRAM = 1,
    KVASIR_SSD = 2
} kvasir_tier;

/* `data` may be NULL if `bytes` is 0. */
typedef struct {
    const uint8_t *data;
    size_t bytes;
} kvasir_bytes;

typedef struct {
    /* The node's attach_dir. */
    const char *attach_dir;
    /* NULL for none. Tenant and name space together form the namespace. The quota of context objects belongs to the tenant. */
    const char *tenant;
    const char *name_space;
    /* Size of the largest object of this client; 0 accepts the node's slot size. */
    uint64_t object_bytes_max;
    /* Time that a call polls for its answer before it sleeps. */
    uint64_t polling_us;
} kvasir_open_options;

typedef struct {
    kvasir_object_class object_class;
    /* Time to live of context objects. */
    uint64_t ttl_ms;
} kvasir_put_options;

/* An object in the node's memory. `data` is NULL if it is absent. */
typedef struct {
    const uint8_t *data;
    size_t bytes;
    /* Offset from the start of the node's slot memory. */
    uint64_t offset_bytes;
    uint32_t generation;
} kvasir_object;

typedef struct kvasir_client kvasir_client;
/* The pins of one get. */
typedef struct kvasir_batch kvasir_batch;

/* The message of the last failed call of this thread. Valid until the next call of this thread. */
const char *kvasir_last_error(void);

kvasir_status kvasir_open(const kvasir_open_options *options, kvasir_client **client);

/* Closes the client. Objects of a get stay valid until their batch is released. NULL is ignored. */
void kvasir_close(kvasir_client *client);

/* Size of the largest object that a slot of this node holds. */
size_t kvasir_object_bytes_max(const kvasir_client *client);

/* The largest number of objects in one put, get or remove. */
size_t kvasir_objects_max(const kvasir_client *client);

/*
 * Puts `count` objects under their names. `options` may be NULL (normal objects). `outcomes` must have
 * room for `count` entries and is written only with KVASIR_OK.
 */
kvasir_status kvasir_put(const kvasir_client *client, size_t count, const kvasir_bytes *names,
                         const kvasir_bytes *objects, const kvasir_put_options *options,
                         kvasir_object_outcome *outcomes);

/*
 * Gets `count` objects. `objects` must have room for `count` entries, which point into the node's memory
 * until the batch is released. If `verify` is not 0, each object's checksum is verified; an object with a
 * wrong checksum is a miss.
 */
kvasir_status kvasir_get(const kvasir_client *client, size_t count, const kvasir_bytes *names,
                         int verify, kvasir_object *objects, kvasir_batch **batch);

/*
 * As kvasir_get, after absent objects were fetched from another node. `node` is its gRPC address, as in
 * "10.0.0.7:7401". An object that neither node holds stays NULL.
 */
kvasir_status kvasir_get_from(const kvasir_client *client, const char *node, size_t count,
                              const kvasir_bytes *names, kvasir_object *objects, kvasir_batch **batch);

/*
 * Fetches `count` objects from another node to this one. `present` must have room for `count` entries: 1
 * for each object that is present now, 0 for an object that neither node holds or that found no space.
 * KVASIR_REFUSED: the slots of the two nodes differ.
 */
kvasir_status kvasir_fetch(const kvasir_client *client, const char *node, size_t count,
                           const kvasir_bytes *names, int *present);

/* Releases the pins of a batch. Its objects must not be read afterwards. NULL is ignored. */
void kvasir_release(kvasir_batch *batch);

/* 1 if the slot still holds object `position` of the batch, else 0. */
int kvasir_is_current(const kvasir_batch *batch, size_t position);

/* Finds the fastest tier of `count` objects. `tiers` must have room for `count` entries. */
kvasir_status kvasir_find(const kvasir_client *client, size_t count, const kvasir_bytes *names,
                          kvasir_tier *tiers);

/* Removes objects durably: no restart of the node brings one back. `removed`, if it is not NULL, receives the number
   of objects that were present. KVASIR_NO_CAPACITY: the removal cannot be written at present; try again later. */
kvasir_status kvasir_remove(const kvasir_client *client, size_t count, const kvasir_bytes *names,
                            size_t *removed);

#ifdef __cplusplus
}
#endif

#endif
