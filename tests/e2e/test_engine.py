"""An inference engine written in Python, attached to a store node of the built binary. The node caches its
blocks, and a later transaction finds them and reads them in place. The test is the conductor."""

import hashlib
import pathlib
import secrets
import subprocess
import sys
import time

import grpc
import pytest
from grpc_tools import protoc

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "store-node" / "client" / "python"))

import kvasir_client  # noqa: E402
from kvasir_client import Client  # noqa: E402
from kvasir_client.engine import Engine  # noqa: E402
from test_objects import library  # noqa: E402, F401

PATIENCE_S = 60
BLOCK_TOKENS, LAYERS, ROW_BYTES = 16, 3, 64
LAYER_BYTES = BLOCK_TOKENS * ROW_BYTES
SLOT_BYTES = LAYERS * LAYER_BYTES


@pytest.fixture(scope="module")
def pb(tmp_path_factory):
    """The messages and services, as any user would generate them."""
    made = tmp_path_factory.mktemp("protos")
    files = [str(path.relative_to(ROOT / "proto")) for path in (ROOT / "proto" / "kvasir" / "v1").glob("*.proto")]
    ended = protoc.main(["protoc", f"-I{ROOT / 'proto'}", f"--python_out={made}", f"--grpc_python_out={made}", *files])
    assert ended == 0
    sys.path.insert(0, str(made))
    from kvasir.v1 import attach_pb2, common_pb2, node_pb2, node_pb2_grpc

    class All:
        attach, common, node, stub = attach_pb2, common_pb2, node_pb2, node_pb2_grpc.StoreNodeStub

    return All


@pytest.fixture
def node(request, tmp_path):
    # All of 127.0.0.0/8 is loopback: no other process uses the port of a random address.
    address = f"127.{1 + secrets.randbelow(127)}.{secrets.randbelow(256)}.{secrets.randbelow(256)}:7000"
    config = tmp_path / "store-node.toml"
    config.write_text(f"""
        listen = "{address}"
        transfer_listen = "127.0.0.1:0"
        attach_dir = "{tmp_path / 'node'}"
        dram_bytes = {1 << 20}
        tail_bytes = {1 << 20}
        drain_timeout_ms = 500
    """)
    with open(tmp_path / "node.log", "wb") as log:
        process = subprocess.Popen(
            [request.config.getoption("--kvasir"), "store-node", "--config", str(config)],
            stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
        )
    yield tmp_path / "node", address
    process.kill()
    process.wait()


def until(what, look):
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = look()
        if found is not None:
            return found
        assert time.monotonic() < deadline, f"not in time: {what}"


def attach(pb, attach_dir, library, pool=None):  # noqa: F811
    layers = [
        pb.common.LayerLayout(runs=[pb.common.Run(offset_bytes=at * LAYER_BYTES, length_bytes=LAYER_BYTES)])
        for at in range(LAYERS)
    ]
    request = pb.attach.AttachRequest(
        instance_id="python",
        role=pb.common.ROLE_BOTH,
        model=pb.common.ModelDescription(
            name="model", fingerprint=hashlib.sha256(b"model").digest(), kv_dtype="bf16", vocab_size=1000,
            context_tokens=4096,
        ),
        layout=pb.common.SlotLayout(block_tokens=BLOCK_TOKENS, slot_bytes=SLOT_BYTES, layers=layers),
        engine_address="127.0.0.1:1",
        running_requests_max=4,
        pool=pool,
    )

    def attached():
        try:
            return Engine(attach_dir, request, library=library)
        except kvasir_client.Unreachable:
            time.sleep(0.05)

    return until("an attach", attached)


def heard(pb, engine, kind):
    """The next message, which is to be of this kind."""
    def next_one():
        said = engine.receive(timeout_s=0.1)
        return said and pb.attach.NodeToEngine.FromString(said)

    message = until(kind, next_one)
    assert message.WhichOneof("message") == kind, message
    return getattr(message, kind)


def layer(slots, slot, at):
    start = slot * SLOT_BYTES + at * LAYER_BYTES
    return slots[start:start + LAYER_BYTES]


def rows(page, at):
    return bytes([1 + page * LAYERS + at]) * LAYER_BYTES


def test_an_engine_in_python_computes_a_prompt_once(pb, node, library):  # noqa: F811
    attach_dir, address = node
    with attach(pb, attach_dir, library) as engine, grpc.insecure_channel(address) as channel:
        assert engine.is_connected and engine.slots_total > 4
        assert len(engine.slots) >= engine.slots_total * SLOT_BYTES
        conductor = pb.stub(channel)
        description = conductor.Describe(pb.node.DescribeRequest(), timeout=PATIENCE_S)
        assert description.instances[0].description.model.name == "model"
        engine.publish_load(running_requests=1, waiting_prompt_tokens=7)

        namespace = hashlib.sha256(b"namespace").digest()[:16]
        keys = b"".join(hashlib.sha256(bytes([at])).digest()[:16] for at in range(3))
        prompt_tokens = 3 * BLOCK_TOKENS + 5

        def allocate(serial):
            tx = pb.common.TxId(conductor_incarnation=1, serial=serial)
            reply = conductor.TxAllocate(
                pb.node.TxAllocateRequest(
                    tx=tx, side=pb.common.SIDE_PREFILL, namespace=namespace, keys=keys,
                    prompt_tokens=prompt_tokens, lease_ms=30_000,
                ),
                timeout=PATIENCE_S,
            )
            engine.send(pb.attach.EngineToNode(bind=pb.attach.Bind(tx=tx, side=pb.common.SIDE_PREFILL)))
            bound = heard(pb, engine, "bound")
            assert (bound.tx, bound.status) == (tx, pb.attach.BIND_STATUS_OK)
            return tx, reply, bound

        tx, reply, bound = allocate(1)
        assert (reply.cached_blocks, bound.cached_tokens, len(bound.slots)) == (0, 0, 4)
        pages = pb.attach.StepPages(tx=tx, side=pb.common.SIDE_PREFILL, first_page=0, page_count=4)
        engine.send(pb.attach.EngineToNode(plan=pb.attach.StepPlan(step=1, pages=[pages])))
        for at in range(LAYERS):
            for page, slot in enumerate(bound.slots):
                layer(engine.slots, slot, at)[:] = rows(page, at)
            engine.progress(1, at + 1)
        engine.send(pb.attach.EngineToNode(release=pb.attach.Release(tx=tx, side=pb.common.SIDE_PREFILL)))

        def cached():
            # The next transaction finds committed blocks.
            listed = conductor.ListBlocks(pb.node.ListBlocksRequest(), timeout=PATIENCE_S)
            return listed if len(listed.blocks) == 3 else None

        until("three blocks", cached)
        tx, reply, bound = allocate(2)
        assert (reply.cached_blocks, bound.cached_tokens) == (3, 3 * BLOCK_TOKENS)
        for page, slot in enumerate(bound.slots[:3]):
            for at in range(LAYERS):
                assert layer(engine.slots, slot, at) == rows(page, at)
        engine.send(pb.attach.EngineToNode(release=pb.attach.Release(tx=tx, side=pb.common.SIDE_PREFILL)).SerializeToString())

        # Blocks that no conductor has planned.
        engine.send(pb.attach.EngineToNode(get=pb.attach.GetBlocks(handle=9, keys=keys)))
        got = heard(pb, engine, "got")
        assert got.handle == 9 and list(got.slots) == list(bound.slots[:3])
        engine.send(pb.attach.EngineToNode(unpin=pb.attach.UnpinBlocks(handle=9)))
        engine.wake()

    with pytest.raises(kvasir_client.Invalid, match="detached"):
        engine.send(b"")
    again = attach(pb, attach_dir, library)
    assert again.is_connected, "another one may attach when it has left"
    again.detach()


def test_an_engine_in_python_has_pages_of_its_own(pb, node, library):  # noqa: F811
    attach_dir, address = node
    pages = 8

    def runs(at):
        return [pb.attach.PoolRun(base_bytes=at * pages * LAYER_BYTES, stride_bytes=LAYER_BYTES, length_bytes=LAYER_BYTES)]

    pool = pb.attach.PoolDescription(
        host=pb.attach.HostPool(bytes=pages * SLOT_BYTES), pages=pages,
        layers=[pb.attach.PoolLayer(runs=runs(at)) for at in range(LAYERS)],
    )

    def page(engine, number, at):
        start = (at * pages + number) * LAYER_BYTES
        return engine.pool[start:start + LAYER_BYTES]

    with attach(pb, attach_dir, library, pool) as engine, grpc.insecure_channel(address) as channel:
        assert len(engine.pool) == pages * SLOT_BYTES and engine.pool_fd >= 0
        keys = b"".join(hashlib.sha256(bytes([at])).digest()[:16] for at in range(3))
        for number in range(3):
            for at in range(LAYERS):
                page(engine, 2 + number, at)[:] = rows(number, at)
        namespace = hashlib.sha256(b"namespace").digest()[:16]
        hold = pb.attach.HoldPages(namespace=namespace, keys=keys, pages=[2, 3, 4])
        engine.send(pb.attach.EngineToNode(hold_pages=hold))
        conductor = pb.stub(channel)

        def cached():
            listed = conductor.ListBlocks(pb.node.ListBlocksRequest(), timeout=PATIENCE_S)
            return listed if len(listed.blocks) == 3 else None

        until("three blocks in slots", cached)
        engine.send(pb.attach.EngineToNode(drop_pages=pb.attach.DropPages(handle=5, pages=[2, 3, 4])))
        assert heard(pb, engine, "pages_dropped").handle == 5
        # The last two come back, to other pages.
        engine.send(pb.attach.EngineToNode(fill_pages=pb.attach.FillPages(handle=6, keys=keys, pages=[7, 0])))
        filled = heard(pb, engine, "pages_filled")
        assert (filled.handle, filled.blocks) == (6, 2)
        for number, at_page in ((1, 7), (2, 0)):
            for at in range(LAYERS):
                assert page(engine, at_page, at) == rows(number, at)
    with attach(pb, attach_dir, library) as engine:
        assert engine.pool is None and engine.pool_fd == -1


def test_an_engine_in_python_computes_a_prompt_in_pages_of_its_own(pb, node, library):  # noqa: F811
    attach_dir, address = node
    pages = 8

    def runs(at):
        return [pb.attach.PoolRun(base_bytes=at * pages * LAYER_BYTES, stride_bytes=LAYER_BYTES, length_bytes=LAYER_BYTES)]

    pool = pb.attach.PoolDescription(
        host=pb.attach.HostPool(bytes=pages * SLOT_BYTES), pages=pages,
        layers=[pb.attach.PoolLayer(runs=runs(at)) for at in range(LAYERS)],
    )

    def page(engine, number, at):
        start = (at * pages + number) * LAYER_BYTES
        return engine.pool[start:start + LAYER_BYTES]

    with attach(pb, attach_dir, library, pool) as engine, grpc.insecure_channel(address) as channel:
        conductor = pb.stub(channel)
        keys = b"".join(hashlib.sha256(bytes([at])).digest()[:16] for at in range(3))
        tx = pb.common.TxId(conductor_incarnation=1, serial=1)
        side = pb.common.SIDE_PREFILL
        allocate = pb.node.TxAllocateRequest(
            tx=tx, side=side, namespace=hashlib.sha256(b"namespace").digest()[:16], keys=keys,
            prompt_tokens=3 * BLOCK_TOKENS + 5, lease_ms=30_000,
        )
        conductor.TxAllocate(allocate, timeout=PATIENCE_S)
        engine.send(pb.attach.EngineToNode(bind=pb.attach.Bind(tx=tx, side=side)))
        slots = list(heard(pb, engine, "bound").slots)
        # Two chunks; the pages of a prompt may be anywhere in the pool.
        for step, first, places in ((1, 0, [5, 2]), (2, 2, [7, 0])):
            planned = pb.attach.StepPages(tx=tx, side=side, first_page=first, page_count=2, pool_pages=places)
            engine.send(pb.attach.EngineToNode(plan=pb.attach.StepPlan(step=step, pages=[planned])))
            for at in range(LAYERS):
                for number, place in enumerate(places, first):
                    page(engine, place, at)[:] = rows(number, at)
                engine.progress(step, at + 1)
        # It asks for its pages at once, and uses them for something else when it has them.
        engine.send(pb.attach.EngineToNode(drop_pages=pb.attach.DropPages(handle=5, pages=[5, 2, 7, 0])))
        engine.send(pb.attach.EngineToNode(release=pb.attach.Release(tx=tx, side=side)))
        assert heard(pb, engine, "pages_dropped").handle == 5
        for number in range(pages):
            for at in range(LAYERS):
                page(engine, number, at)[:] = bytes(LAYER_BYTES)

        def cached():
            listed = conductor.ListBlocks(pb.node.ListBlocksRequest(), timeout=PATIENCE_S)
            return listed if len(listed.blocks) == 3 else None

        until("three blocks", cached)
        engine.send(pb.attach.EngineToNode(get=pb.attach.GetBlocks(handle=9, keys=keys)))
        got = heard(pb, engine, "got")
        assert list(got.slots) == slots[:3]
        for number, slot in enumerate(got.slots):
            for at in range(LAYERS):
                assert layer(engine.slots, slot, at) == rows(number, at)
        assert engine.is_connected


def test_what_an_engine_says_is_checked_before_it_is_sent(pb, node, library):  # noqa: F811
    attach_dir, _ = node
    with pytest.raises(kvasir_client.Unreachable, match="nowhere"):
        Engine(attach_dir / "nowhere", b"", library=library)
    with attach(pb, attach_dir, library) as engine:
        with pytest.raises(kvasir_client.Invalid, match="EngineToNode"):
            engine.send(b"\xff\xff")
        with pytest.raises(kvasir_client.Invalid, match="without a message"):
            engine.send(pb.attach.EngineToNode())
        assert engine.receive() is None
        assert engine.is_connected
        with pytest.raises(kvasir_client.Invalid, match="AttachRequest"):
            Engine(attach_dir, b"\xff\xff", library=library)


def test_objects_are_fetched_from_another_node(request, node, library, tmp_path):  # noqa: F811
    attach_dir, address = node
    config = (tmp_path / "store-node.toml").read_text()
    other_dir = tmp_path / "other"
    other_config = tmp_path / "other.toml"
    other_config.write_text(config.replace(str(attach_dir), str(other_dir)).replace(address, "127.0.0.1:0"))
    with open(tmp_path / "other.log", "wb") as log:
        process = subprocess.Popen(
            [request.config.getoption("--kvasir"), "store-node", "--config", str(other_config)],
            stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
        )

    def opened(folder):
        def look():
            try:
                return Client(folder, tenant="tests", object_bytes_max=5000, library=library)
            except kvasir_client.Unreachable:
                time.sleep(0.05)

        return until(f"{folder}", look)

    try:
        with opened(attach_dir) as first, opened(other_dir) as second:
            large = bytes(range(250)) * 20
            first.put({"large": large, "small": b"few"})
            assert second.fetch(["large", "absent"], address) == [True, False]
            assert second.exists(["large", "small"]) == [True, False]
            assert second.get(["large", "small", "absent"], node=address) == [large, b"few", None]
            with pytest.raises(kvasir_client.Error):
                second.fetch(["other"], "127.0.0.1:1")
            with pytest.raises(kvasir_client.Invalid):
                second.get(["large"], verify=True, node=address)
    finally:
        process.kill()
        process.wait()
