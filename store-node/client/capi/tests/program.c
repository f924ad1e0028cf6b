/* A C program that uses the library: it prints one line for each step, ended by "ok" when all is well. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvasir_engine.h"

#define COUNT 4

static void check(int good, const char *what) {
    if (!good) {
        fprintf(stderr, "%s: %s\n", what, kvasir_last_error());
        exit(1);
    }
}

int main(int argc, char **argv) {
    check(argc == 5, "the arguments are the directory and the address of each of two nodes");
    kvasir_open_options nowhere = {.attach_dir = "/nonexistent"};
    kvasir_client *client = NULL;
    check(kvasir_open(&nowhere, &client) == KVASIR_UNREACHABLE, "nobody is there");
    check(strstr(kvasir_last_error(), "/nonexistent") != NULL, "the error names the place");
    check(kvasir_open(NULL, &client) == KVASIR_INVALID, "no options");

    kvasir_open_options options = {
        .attach_dir = argv[1], .tenant = "c", .object_bytes_max = 10000, .polling_us = 50};
    check(kvasir_open(&options, &client) == KVASIR_OK, "open");
    check(kvasir_object_bytes_max(client) >= 10000, "large enough");
    check(kvasir_objects_max(client) >= COUNT, "many enough");

    const char *words[COUNT] = {"one", "two", "three", ""};
    static uint8_t large[10000];
    memset(large, 7, sizeof large);
    kvasir_bytes names[COUNT], objects[COUNT];
    for (int at = 0; at < COUNT; at++) {
        names[at] = (kvasir_bytes){(const uint8_t *)words[at], strlen(words[at])};
        objects[at] = names[at];
    }
    objects[0] = (kvasir_bytes){large, sizeof large};
    kvasir_object_outcome outcomes[COUNT];
    check(kvasir_put(client, COUNT, names, objects, NULL, outcomes) == KVASIR_OK, "put");
    for (int at = 0; at < COUNT; at++) check(outcomes[at] == KVASIR_STORED, "stored");
    check(kvasir_put(client, COUNT, names, objects, NULL, outcomes) == KVASIR_OK, "put again");
    for (int at = 0; at < COUNT; at++) check(outcomes[at] == KVASIR_EXISTS, "exists");

    kvasir_put_options context = {.object_class = KVASIR_CONTEXT, .ttl_ms = 1000};
    check(kvasir_put(client, 1, names, objects, &context, outcomes) == KVASIR_OK, "put context");
    check(outcomes[0] == KVASIR_NOT_PERSISTED, "the node has no SSD");
    check(strstr(kvasir_last_error(), "SSD") != NULL, "and that is said");

    kvasir_object got[COUNT];
    kvasir_batch *batch = NULL;
    for (int verify = 0; verify < 2; verify++) {
        check(kvasir_get(client, COUNT, names, verify, got, &batch) == KVASIR_OK, "get");
        check(got[0].bytes == sizeof large, "its length");
        check(memcmp(got[0].data, large, sizeof large) == 0, "its bytes");
        check(got[2].bytes == 5 && memcmp(got[2].data, "three", 5) == 0, "three");
        check(got[3].data != NULL && got[3].bytes == 0, "an empty object is one");
        for (int at = 0; at < COUNT; at++) check(kvasir_is_current(batch, at), "current");
        check(!kvasir_is_current(batch, COUNT), "there are no more");
        if (verify == 0) kvasir_release(batch);
    }

    size_t removed = 0;
    check(kvasir_remove(client, 2, names, &removed) == KVASIR_OK && removed == 2, "remove");
    kvasir_tier tiers[COUNT];
    check(kvasir_find(client, COUNT, names, tiers) == KVASIR_OK, "find");
    check(tiers[0] == KVASIR_ABSENT && tiers[2] == KVASIR_DRAM, "tiers");
    check(memcmp(got[0].data, large, sizeof large) == 0, "what is held may be read on");
    kvasir_object missed[1];
    kvasir_batch *misses = NULL;
    check(kvasir_get(client, 1, names, 0, missed, &misses) == KVASIR_OK, "get a miss");
    check(missed[0].data == NULL, "a miss");
    kvasir_release(misses);

    check(kvasir_put(NULL, 0, NULL, NULL, NULL, NULL) == KVASIR_INVALID, "no client");
    check(kvasir_get(client, 1, NULL, 0, missed, &misses) == KVASIR_INVALID, "no names");
    context.object_class = (kvasir_object_class)9;
    check(kvasir_put(client, 1, names, objects, &context, outcomes) == KVASIR_INVALID, "no class");

    /* Another node of the same slots, which fetches from the first one. */
    kvasir_open_options elsewhere = options;
    elsewhere.attach_dir = argv[3];
    kvasir_client *other = NULL;
    check(kvasir_open(&elsewhere, &other) == KVASIR_OK, "open the other");
    int here[COUNT];
    check(kvasir_fetch(other, argv[2], COUNT - 1, names, here) == KVASIR_OK, "fetch");
    check(!here[0] && !here[1] && here[2], "what is there comes");
    kvasir_object fetched[COUNT];
    kvasir_batch *beside = NULL;
    check(kvasir_get(other, COUNT, names, 0, fetched, &beside) == KVASIR_OK, "get what came");
    check(fetched[2].bytes == 5 && memcmp(fetched[2].data, "three", 5) == 0, "it is the same");
    check(fetched[3].data == NULL, "nobody asked for the fourth");
    kvasir_release(beside);
    check(kvasir_get_from(other, argv[2], COUNT, names, fetched, &beside) == KVASIR_OK, "get from");
    check(fetched[3].data != NULL && fetched[0].data == NULL, "the fourth came too");
    kvasir_release(beside);
    check(kvasir_fetch(other, NULL, 1, names, here) == KVASIR_INVALID, "no node");
    check(kvasir_get_from(other, "nowhere", 1, names, fetched, &beside) != KVASIR_OK, "no address");
    kvasir_close(other);

    /* An engine's request is checked before it is sent. */
    kvasir_engine *engine = NULL;
    const uint8_t garbage[] = {0xff, 0xff, 0xff};
    check(kvasir_engine_attach(argv[1], garbage, sizeof garbage, &engine) == KVASIR_INVALID,
          "no AttachRequest");
    check(kvasir_engine_attach("/nonexistent", NULL, 0, &engine) == KVASIR_UNREACHABLE, "no node");
    check(kvasir_engine_attach(argv[1], NULL, 0, &engine) == KVASIR_REFUSED, "an empty one");
    kvasir_bytes message;
    check(kvasir_engine_send(NULL, garbage, 1) == KVASIR_INVALID, "no engine");
    check(kvasir_engine_receive(NULL, 0, &message) == KVASIR_INVALID, "no engine");
    check(kvasir_engine_slots(NULL, NULL) == NULL && kvasir_engine_slots_fd(NULL) == -1, "no engine");
    size_t pool_bytes = 1;
    check(kvasir_engine_pool(NULL, &pool_bytes) == NULL && pool_bytes == 0, "no engine");
    check(kvasir_engine_pool_fd(NULL) == -1, "no engine");
    kvasir_engine_wake(NULL);
    kvasir_engine_progress(NULL, 1, 1);
    kvasir_engine_publish_load(NULL, NULL);
    kvasir_engine_detach(NULL);

    kvasir_close(client);
    check(got[2].bytes == 5 && memcmp(got[2].data, "three", 5) == 0, "held beyond the close");
    kvasir_release(batch);
    kvasir_release(NULL);
    kvasir_close(NULL);
    puts("ok");
    return 0;
}
