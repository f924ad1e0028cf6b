"""Mooncake's transfer engine over TCP: `mooncake_side.py sender` starts its own target."""

import os
import sys

from mooncake.engine import TransferEngine
from protocol import REGION_BYTES, Target, check_when_asked, region, serve


def engine(address):
    started = TransferEngine()
    assert started.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0, "it did not start"
    assert started.register_memory(address, REGION_BYTES) == 0, "memory was not registered"
    return started


def target():
    memory, address = region()
    started = engine(address)
    print(f"READY 127.0.0.1:{started.get_rpc_port()} {address}", flush=True)
    for line in sys.stdin:
        check_when_asked(memory, line)
    os._exit(0)


def sender():
    memory, address = region()
    other = Target()
    host, there = other.hear("READY")
    there = int(there)
    started = engine(address)

    def begin(point, every_call):
        size = point["bytes"]
        calls = [
            ([address + at * size for at in sources], [there + at * size for at in targets], [size] * len(sources))
            for sources, targets in every_call
        ]

        def one(index):
            (source,), (target_,), _ = calls[index]
            assert started.transfer_sync_write(host, source, target_, size) == 0

        def many(index):
            assert started.batch_transfer_sync_write(host, *calls[index]) == 0

        return one if point["pages"] == 1 else many

    print("READY", flush=True)
    serve(memory, other, begin)


if __name__ == "__main__":
    target() if sys.argv[1] == "target" else sender()
