"""Mooncake Store over TCP: `mooncake_side.py storage MASTER BYTES` only provides memory.
`mooncake_side.py client NUMBER MASTER BYTES` measures, and provides BYTES of memory for objects of other clients."""

import ctypes
import mmap
import os
import struct
import sys
import time

from mooncake.store import MooncakeDistributedStore, ReplicateConfig
from protocol import serve

BUFFER_BYTES = 256 << 20
STAMP_BYTES = 16


def store(master, segment_bytes):
    opened = MooncakeDistributedStore()
    result = opened.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, 64 << 20, "tcp", "", master)
    assert result == 0, f"it did not start: {result}"
    return opened


class Client:
    def __init__(self, number, master, segment_bytes):
        self.number = number
        self.store = store(master, segment_bytes)
        self.memory = mmap.mmap(-1, BUFFER_BYTES)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        block = os.urandom(1 << 20)
        for start in range(0, BUFFER_BYTES, 1 << 20):
            self.memory[start : start + (1 << 20)] = block
        assert self.store.register_buffer(self.address, BUFFER_BYTES) == 0, "memory was not registered"
        self.config = ReplicateConfig()
        if segment_bytes:  # what this host's clients put stays on this host
            self.config.preferred_segment = self.store.get_hostname()

    def keys(self, point, call):
        first = call * point["batch"]
        return [f"{point['seed']}-{self.number}-{first + at}" for at in range(point["batch"])]

    @staticmethod
    def stamp(key):
        return struct.pack("<Q", hash(key) & 0xFFFFFFFFFFFFFFFF) * 2

    def offsets(self, point):
        return [at * point["bytes"] for at in range(point["batch"])]

    def put(self, point, keys):
        """Answers how long it took, and how many were not put."""
        size, offsets = point["bytes"], self.offsets(point)
        for offset, key in zip(offsets, keys):
            stamp = self.stamp(key)
            self.memory[offset : offset + STAMP_BYTES] = stamp
            self.memory[offset + size - STAMP_BYTES : offset + size] = stamp
        addresses, sizes = [self.address + offset for offset in offsets], [size] * len(keys)
        start = time.perf_counter()
        if len(keys) == 1:
            results = [self.store.put_from(keys[0], addresses[0], size, self.config)]
        else:
            results = self.store.batch_put_from(keys, addresses, sizes, self.config)
        return time.perf_counter() - start, sum(result != 0 for result in results)

    def get(self, point, keys):
        size, offsets = point["bytes"], self.offsets(point)
        for offset in offsets:  # so that an object that does not come is not taken for the last one
            self.memory[offset : offset + STAMP_BYTES] = bytes(STAMP_BYTES)
        addresses, sizes = [self.address + offset for offset in offsets], [size] * len(keys)
        start = time.perf_counter()
        if len(keys) == 1:
            results = [self.store.get_into(keys[0], addresses[0], size)]
        else:
            results = self.store.batch_get_into(keys, addresses, sizes)
        took = time.perf_counter() - start
        wrong = 0
        for offset, key, result in zip(offsets, keys, results):
            stamp = self.stamp(key)
            head = self.memory[offset : offset + STAMP_BYTES]
            tail = self.memory[offset + size - STAMP_BYTES : offset + size]
            wrong += result == size and (head != stamp or tail != stamp)
        return took, wrong, sum(result != size for result in results)

    def measure(self, point):
        what, calls = point["what"], range(point["calls"])
        latencies, wrong, failed = [], 0, 0
        if what == "clear":
            # Also removes objects that were recently read.
            self.store.remove_all(True)
        elif what == "put":
            for call in calls:
                took, lost = self.put(point, self.keys(point, call))
                latencies.append(took)
                failed += lost
        elif what in ("get_copy", "get_far"):
            # Gets of local objects repeat a few objects. Gets of remote objects read each object once.
            puts = range(min(32, len(calls))) if what == "get_copy" else calls
            failed += sum(self.put(point, self.keys(point, call))[1] for call in puts)
            for call in calls:
                took, mistaken, lost = self.get(point, self.keys(point, call % len(puts)))
                latencies.append(took)
                wrong += mistaken
                failed += lost
        elif what == "exists":
            keys = self.keys(point, 0)
            failed += sum(self.put({**point, "batch": 1}, [key])[1] for key in keys[::2])
            for _ in calls:
                start = time.perf_counter()
                found = self.store.batch_is_exist(keys)
                latencies.append(time.perf_counter() - start)
                wrong += sum((result == 1) != (at % 2 == 0) for at, result in enumerate(found))
        else:
            raise ValueError(f"{what} is not measured of Mooncake Store")
        return {"seconds": sum(latencies), "latencies_us": [s * 1e6 for s in latencies], "wrong": wrong, "failed": failed}


def main():
    role, *arguments = sys.argv[1:]
    if role == "storage":
        kept = store(arguments[0], int(arguments[1]))
        print("READY", flush=True)
        sys.stdin.read()
        kept.close()
    else:
        client = Client(int(arguments[0]), arguments[1], int(arguments[2]))
        serve(client.measure)
    os._exit(0)


if __name__ == "__main__":
    main()
