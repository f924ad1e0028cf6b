"""The Python package `kvasir_client` against a store node of the built binary."""

import gc
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "store-node" / "client" / "python"))

import kvasir_client  # noqa: E402
from kvasir_client import ObjectClass, Client, Outcome, Tier  # noqa: E402

READY_WITHIN_S = 60
OBJECT_BYTES = 100_000


@pytest.fixture(scope="module")
def library(request):
    """Built with the binary, or by the tests of the library."""
    target = pathlib.Path(request.config.getoption("--kvasir")).parent
    name = "libkvasir_client_c.so"
    built = [path for path in (target / name, target / "deps" / name) if path.exists()]
    assert built, f"{name} is not in {target}: `cargo build -p kvasir-client-c` makes it"
    return str(max(built, key=lambda path: path.stat().st_mtime))


def start(binary, folder):
    """A store node with an SSD, and its `attach_dir`."""
    attach_dir = folder / "node"
    config = folder / "store-node.toml"
    config.write_text(f"""
        listen = "127.0.0.1:0"
        transfer_listen = "127.0.0.1:0"
        attach_dir = "{attach_dir}"
        dram_bytes = {16 << 20}
        drain_timeout_ms = 500
        [ssd]
        dir = "{folder / 'ssd'}"
        capacity_bytes = {64 << 20}
        segment_bytes = {4 << 20}
    """)
    with open(folder / "node.log", "wb") as log:
        return attach_dir, subprocess.Popen(
            [binary, "store-node", "--config", str(config)],
            stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
        )


def opened(node, folder, library, **options):
    """A client, as soon as the node is there."""
    attach_dir, process = node
    deadline = time.monotonic() + READY_WITHIN_S
    while True:
        try:
            return Client(attach_dir, library=library, object_bytes_max=OBJECT_BYTES, **options)
        except kvasir_client.Unreachable:
            said = (folder / "node.log").read_text(errors="replace")
            assert process.poll() is None and time.monotonic() < deadline, said
            time.sleep(0.05)


@pytest.fixture
def node(request, library):
    with tempfile.TemporaryDirectory(prefix="kvasir-obj-") as name:
        folder = pathlib.Path(name)
        running = start(request.config.getoption("--kvasir"), folder)
        yield lambda **options: opened(running, folder, library, **options)
        running[1].kill()
        running[1].wait()


@pytest.fixture
def client(node):
    with node(tenant="tests") as client:
        yield client


def test_what_was_put_is_viewed_in_the_nodes_memory(client):
    large = bytes(range(256)) * (OBJECT_BYTES // 256)
    objects = {"text": b"some bytes", b"bytes": bytearray(large), "view": memoryview(large), "none": b""}
    assert client.put(objects) == [Outcome.STORED] * 4
    assert client.put(objects.items()) == [Outcome.EXISTS] * 4
    for verify in (False, True):
        text, whole, view, none, absent = client.get([*objects, "absent"], verify=verify)
        assert (text, whole, view, none, absent) == (b"some bytes", large, large, b"", None)
        assert isinstance(whole, memoryview) and whole.readonly
    assert client.exists([*objects, "absent"]) == [True] * 4 + [False]
    assert client.remove(["text", "absent"]) == 1
    assert client.find(["text", "view"]) == [Tier.ABSENT, Tier.DRAM]
    assert text == b"some bytes", "what is held may be read on"


def test_a_view_keeps_its_object_while_everything_else_makes_room(client):
    first = bytes([1]) * OBJECT_BYTES
    client.put({"first": first})
    (held,) = client.get(["first"])
    filler = bytes([2]) * OBJECT_BYTES
    for at in range(400):
        assert client.put({f"filler {at}": filler}) == [Outcome.STORED]
    assert held == first
    part = held[10:20]
    del held
    gc.collect()
    assert part == first[10:20], "a part of a view holds it as well"


def test_context_objects_are_durable_and_rise_from_the_ssd(client):
    objects = {f"kept {at}": bytes([at]) * OBJECT_BYTES for at in range(8)}
    deadline = time.monotonic() + READY_WITHIN_S
    # The SSD is opened beside the node.
    while Outcome.NOT_PERSISTED in client.put(objects, object_class=ObjectClass.CONTEXT, ttl_ms=600_000):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    filler = bytes([200]) * OBJECT_BYTES
    for at in range(400):
        client.put({f"filler {at}": filler})
    assert Tier.ABSENT not in client.find(objects)
    assert [bytes(view) for view in client.get(objects, verify=True)] == list(objects.values())


def test_what_is_not_kept_says_why(client):
    def keep(at):
        return client.put({f"kept {at}": bytes(OBJECT_BYTES)}, object_class=ObjectClass.CONTEXT, ttl_ms=600_000)

    deadline = time.monotonic() + READY_WITHIN_S
    while (outcomes := keep(0)) not in ([Outcome.STORED], [Outcome.EXISTS]):
        assert outcomes == [Outcome.NOT_PERSISTED] and outcomes.reason and time.monotonic() < deadline
        time.sleep(0.05)
    assert outcomes.reason == ""
    for at in range(1, 1000):
        if (outcomes := keep(at)) != [Outcome.STORED]:
            break
    assert outcomes == [Outcome.NOT_PERSISTED]
    assert "the tenant's quota" in outcomes.reason or "no space" in outcomes.reason, outcomes.reason
    assert client.exists([f"kept {at}"]) == [True], "it is there as a normal object"


def test_tenants_do_not_see_each_other(node, client):
    client.put({"secret": b"mine"})
    with node(tenant="others") as other:
        assert other.get(["secret"]) == [None]
        assert other.exists(["secret"]) == [False]
        other.put({"secret": b"theirs"})
    assert client.get(["secret"]) == [b"mine"]


def test_errors_say_what_is_wrong(client, library):
    with pytest.raises(kvasir_client.Invalid, match="a slot holds"):
        client.put({"huge": bytes(2 * OBJECT_BYTES)})
    with pytest.raises(kvasir_client.Invalid, match="objects exceed the maximum"):
        client.get([b"many"] * (client.objects_max + 1))
    with pytest.raises(kvasir_client.Unreachable, match="/nonexistent"):
        Client("/nonexistent", library=library)
    with pytest.raises(TypeError):
        client.put({"number": 7})
    with pytest.raises(BufferError):
        client.put({"gaps": memoryview(bytes(10))[::2]})
    client.close()
    with pytest.raises(kvasir_client.Invalid, match="closed"):
        client.exists(["anything"])


def test_threads_share_a_client(client):
    failed = []

    def work(thread):
        for at in range(50):
            name, contents = f"{thread}/{at}", bytes([thread, at]) * 500
            client.put({name: contents})
            if client.get([name]) != [contents]:
                failed.append(name)

    threads = [threading.Thread(target=work, args=[thread]) for thread in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert failed == []


def test_a_node_that_is_gone_is_an_error_and_views_may_be_read_on(request, library):
    with tempfile.TemporaryDirectory(prefix="kvasir-obj-") as name:
        folder = pathlib.Path(name)
        running = start(request.config.getoption("--kvasir"), folder)
        with opened(running, folder, library) as client:
            client.put({"a": b"bytes"})
            (held,) = client.get(["a"])
            running[1].kill()
            running[1].wait()
            with pytest.raises(kvasir_client.Lost):
                while True:
                    client.exists(["a"])
            assert held == b"bytes"


def test_what_cannot_be_given_back_while_the_node_hangs_is_given_back_later(request, library):
    with tempfile.TemporaryDirectory(prefix="kvasir-obj-") as name:
        folder = pathlib.Path(name)
        running = start(request.config.getoption("--kvasir"), folder)
        with opened(running, folder, library) as client:
            address = re.search(r"address.{0,9}?=.{0,9}?(127[.0-9]+:[0-9]+)", (folder / "node.log").read_text())[1]

            def has_pins(wanted):
                """Waits, because the metrics of the node lag behind its state."""
                deadline, pins = time.monotonic() + READY_WITHIN_S, None
                while pins != wanted:
                    assert time.monotonic() < deadline, pins
                    page = urllib.request.urlopen(f"http://{address}/metrics", timeout=60).read().decode()
                    pins = float(re.search(r"^kvasir_store_pins (.*)$", page, re.MULTILINE)[1])
                    time.sleep(0.05)

            client.put({"a": b"bytes"})
            held = client.get(["a"])
            has_pins(1)
            many = [b"%d" % at for at in range(client.objects_max)]
            refused = threading.Event()

            def ask():
                while not refused.is_set():
                    try:
                        client.exists(many)
                    except kvasir_client.NoCapacity:
                        refused.set()

            running[1].send_signal(signal.SIGSTOP)
            # Each leaves a request in the ring and waits, until the ring is full.
            askers = []
            while not refused.wait(0.01):
                assert len(askers) < 2_000
                askers.append(threading.Thread(target=ask))
                askers[-1].start()
            del held
            gc.collect()
            running[1].send_signal(signal.SIGCONT)
            [asker.join() for asker in askers]
            assert client.exists(["a"]) == [True]
            has_pins(0)
        running[1].kill()
        running[1].wait()
