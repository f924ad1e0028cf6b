/*
 * Objects in the memory of a store node on the same host, for C.
 *
 * Every function that can fail answers with a kvasir_status; after anything but KVASIR_OK,
 * kvasir_last_error() says in words what was wrong and what to do. All functions may be called
 * from any thread; one client may be used by many threads at once. A process that forks opens anew.
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
    /* Nobody answers there (yet): try again later. */
    KVASIR_UNREACHABLE = 1,
    /* The node said no, and will say so again until something is set otherwise. */
    KVASIR_REFUSED = 2,
    /* The node is gone or has expelled this client: open anew. */
    KVASIR_LOST = 3,
    /* No room: release objects, or try again later. */
    KVASIR_NO_SPACE = 4,
    /* The node is draining: use another one. */
    KVASIR_DRAINING = 5,
    /* An argument cannot be right. */
    KVASIR_INVALID = 6,
    /* A node of another version, or a bug. */
    KVASIR_PROTOCOL = 7
} kvasir_status;

typedef enum {
    KVASIR_STORED = 0,
    /* It was there before, and stays as it is. */
    KVASIR_EXISTS = 1,
    /* It is not there: the lease was over, or it had been there and made room. Put it again. */
    KVASIR_OBJECT_LOST = 2,
    /* It is there as a normal object, but is not kept. kvasir_last_error() says why. */
    KVASIR_NOT_KEPT = 3,
    /* Its key is that of a block of another namespace. */
    KVASIR_OBJECT_REFUSED = 4
} kvasir_outcome;

typedef enum {
    /* As long as there is room. */
    KVASIR_NORMAL = 0,
    /* In memory until it is removed, or the client that put it closes or dies. */
    KVASIR_EPHEMERAL = 1,
    /* On the SSD for the tenant, until its time to live is over. */
    KVASIR_CONTEXT = 2
} kvasir_class;

typedef enum {
    KVASIR_ABSENT = 0,
    KVASIR_DRAM = 1,
    KVASIR_SSD = 2
} kvasir_tier;

/* Zero bytes may be NULL. */
typedef struct {
    const uint8_t *data;
    size_t bytes;
} kvasir_bytes;

typedef struct {
    /* The node's attach_dir. */
    const char *attach_dir;
    /* NULL for none. Both together make the namespace; the tenant owns the quota of context objects. */
    const char *tenant;
    const char *name_space;
    /* The longest object that will be put; 0 takes the node's slots as they are. */
    uint64_t object_bytes_max;
    /* How long a call looks for its answer before it sleeps. */
    uint64_t polling_us;
} kvasir_open_options;

typedef struct {
    kvasir_class object_class;
    /* Of context objects. */
    uint64_t ttl_ms;
} kvasir_put_options;

/* An object in the node's memory. `data` is NULL where it was not there. */
typedef struct {
    const uint8_t *data;
    size_t bytes;
    /* From the start of the node's slot memory. */
    uint64_t offset_bytes;
    uint32_t generation;
} kvasir_object;

typedef struct kvasir_client kvasir_client;
/* The pins of one get. */
typedef struct kvasir_batch kvasir_batch;

/* What was wrong with the last call of this thread that failed. Valid until its next call. */
const char *kvasir_last_error(void);

kvasir_status kvasir_open(const kvasir_open_options *options, kvasir_client **client);

/* Objects that were got stay until their batch is released. NULL is ignored. */
void kvasir_close(kvasir_client *client);

/* The longest object that a slot of this node holds. */
size_t kvasir_object_bytes_max(const kvasir_client *client);

/* The most objects of one put, get or remove. */
size_t kvasir_objects_max(const kvasir_client *client);

/*
 * Puts `count` objects under their names; `options` may be NULL (normal objects). `outcomes` has
 * room for `count`, and is written only with KVASIR_OK.
 */
kvasir_status kvasir_put(const kvasir_client *client, size_t count, const kvasir_bytes *names,
                         const kvasir_bytes *objects, const kvasir_put_options *options,
                         kvasir_outcome *outcomes);

/*
 * Gets `count` objects: `objects` has room for them, and points into the node's memory until the
 * batch is released. With `verify` not 0 each object's checksum is computed, and one that has
 * another is a miss.
 */
kvasir_status kvasir_get(const kvasir_client *client, size_t count, const kvasir_bytes *names,
                         int verify, kvasir_object *objects, kvasir_batch **batch);

/*
 * As kvasir_get, after what this node lacks was fetched from another one, whose gRPC address is
 * `node`, as in "10.0.0.7:7401". What neither has stays NULL.
 */
kvasir_status kvasir_get_from(const kvasir_client *client, const char *node, size_t count,
                              const kvasir_bytes *names, kvasir_object *objects, kvasir_batch **batch);

/*
 * Brings `count` objects to this node from that one; `here` has room for them: 1 for each that is
 * here now, 0 for one that neither has, or that found no room. KVASIR_REFUSED: the slots of the two
 * are not alike.
 */
kvasir_status kvasir_fetch(const kvasir_client *client, const char *node, size_t count,
                           const kvasir_bytes *names, int *here);

/* What the batch had pinned must not be read any more. NULL is ignored. */
void kvasir_release(kvasir_batch *batch);

/* Whether object `position` of the batch is still what its slot holds: 1, or 0. */
int kvasir_is_current(const kvasir_batch *batch, size_t position);

/* Where `count` objects can be had fastest: `tiers` has room for them. */
kvasir_status kvasir_find(const kvasir_client *client, size_t count, const kvasir_bytes *names,
                          kvasir_tier *tiers);

/* Forgets objects, so that no restart of the node brings one back; `removed`, where it is not NULL, is how many were
   there. KVASIR_NO_SPACE where that cannot be written now: try again later. */
kvasir_status kvasir_remove(const kvasir_client *client, size_t count, const kvasir_bytes *names,
                            size_t *removed);

#ifdef __cplusplus
}
#endif

#endif
