"""NIXL with its UCX backend: `nixl_side.py sender` starts its own target. UCX_TLS=tcp keeps it from
shared memory."""

import base64
import os
import select
import sys

from nixl._api import nixl_agent, nixl_agent_config
from protocol import REGION_BYTES, Target, check_when_asked, region, serve

# UCX's TCP makes progress at the target only during calls into its agent.
POLL_S = 0.0005


def agent(name, address):
    started = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    started.register_memory([(address, REGION_BYTES, 0, "")], "DRAM")
    return started


def target():
    memory, address = region()
    started = agent("target", address)
    print("READY", address, base64.b64encode(started.get_agent_metadata()).decode(), flush=True)
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], POLL_S)
        started.get_new_notifs()
        if readable:
            line = sys.stdin.readline()
            if not line:
                os._exit(0)
            check_when_asked(memory, line)


def sender():
    memory, address = region()
    other = Target()
    there, metadata = other.hear("READY")
    there = int(there)
    started = agent("sender", address)
    name = started.add_remote_agent(base64.b64decode(metadata))
    name = name.decode() if isinstance(name, bytes) else name

    def begin(point, every_call):
        size = point["bytes"]

        def prepared(sources, targets):
            local = started.get_xfer_descs([(address + at * size, size, 0) for at in sources], "DRAM")
            remote = started.get_xfer_descs([(there + at * size, size, 0) for at in targets], "DRAM")
            return started.initialize_xfer("WRITE", local, remote, name)

        handles = [prepared(*places) for places in every_call]

        def call(index):
            state = started.transfer(handles[index])
            while state == "PROC":
                state = started.check_xfer_state(handles[index])
            assert state == "DONE", state

        return call

    print("READY", flush=True)
    serve(memory, other, begin)


if __name__ == "__main__":
    target() if sys.argv[1] == "target" else sender()
