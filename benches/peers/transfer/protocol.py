"""The protocol between `compare.py` and every side: one JSON object per line.

In:  {"bytes": of one page, "pages": of one call, "calls": N, "seed": S}, or {"quit": true}
Out: {"seconds": of all calls, "latencies_us": [...], "wrong_pages": N}, or {"error": "..."}
"""

import ctypes
import json
import mmap
import os
import random
import subprocess
import sys
import time

REGION_BYTES = 256 << 20


def region():
    """Memory with its address, touched, so that no page fault is measured."""
    memory = mmap.mmap(-1, REGION_BYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.memset(address, 0, REGION_BYTES)
    return memory, address


def fill(memory, seed):
    """Fresh bytes for each sample: a block of random ones, at another offset in each MiB."""
    block = random.Random(seed).randbytes(1 << 20)
    for start in range(0, REGION_BYTES, 1 << 20):
        turn = (start >> 20) * 4099 & 0xFFFFF
        memory[start : start + (1 << 20)] = block[turn:] + block[:turn]


def places(point):
    """For each call the pages of both sides, by index."""
    slots = REGION_BYTES // point["bytes"]
    calls, pages = point["calls"], point["pages"]
    if pages == 1:
        return [([call % slots], [call % slots]) for call in range(calls)]
    draw = random.Random(point["seed"])
    return [(draw.sample(range(slots), pages), draw.sample(range(slots), pages)) for _ in range(calls)]


def wrong_pages(memory, point):
    """The number of pages at the target that differ from those of the sender. Later calls overwrite earlier ones."""
    landed = {}
    for sources, targets in places(point):
        landed.update(zip(targets, sources))
    expected = bytearray(REGION_BYTES)
    fill(expected, point["seed"])
    size, seen, wanted = point["bytes"], memoryview(memory), memoryview(expected)
    return sum(
        seen[to * size : (to + 1) * size] != wanted[from_ * size : (from_ + 1) * size]
        for to, from_ in landed.items()
    )


class Target:
    """The other process of a side: the same script, which checks the received pages."""

    def __init__(self, *arguments):
        command = [sys.executable, *sys.argv[:1], "target", *arguments]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def hear(self, word):
        for line in self.child.stdout:
            if line.startswith(word + " "):
                return line.split()[1:]
        raise RuntimeError("the target has ended")

    def wrong_pages(self, point):
        self.child.stdin.write(json.dumps(point) + "\n")
        self.child.stdin.flush()
        return int(self.hear("WRONG")[0])


def check_when_asked(memory, line):
    print("WRONG", wrong_pages(memory, json.loads(line)), flush=True)


def serve(memory, target, begin):
    """Measures points until it is told to quit. `begin(point, places)` does the untimed preparation and
    returns a function that makes the call with a given index."""
    for line in sys.stdin:
        point = json.loads(line)
        if "quit" in point:
            break
        try:
            fill(memory, point["seed"])
            every_call = places(point)
            call = begin(point, every_call)
            latencies = []
            began = time.perf_counter()
            for index in range(point["calls"]):
                start = time.perf_counter()
                call(index)
                latencies.append((time.perf_counter() - start) * 1e6)
            seconds = time.perf_counter() - began
            wrong = target.wrong_pages(point)
            answer = {"seconds": seconds, "latencies_us": latencies, "wrong_pages": wrong}
        except Exception as error:  # a peer's failure is a result, not the end of the comparison
            answer = {"error": repr(error)[:300]}
        print("POINT " + json.dumps(answer), flush=True)
    target.child.kill()
    os._exit(0)
