"""The Python and C examples of `docs/integrate`, run as written. Only addresses, paths and sizes of the node differ."""

import os
import pathlib
import re
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.request

import pytest
from test_engine import pb  # noqa: F401
from test_objects import library  # noqa: F401

ROOT = pathlib.Path(__file__).resolve().parents[2]
CLIENT = ROOT / "store-node" / "client"
READY_WITHIN_S = 60


def example(page, language):
    """The only example of a page in this language."""
    text = (ROOT / "docs" / "integrate" / page).read_text()
    found = re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(found) == 1, f"{page} has {len(found)} examples in {language}"
    return found[0]


def node_config(page):
    """The configuration that the page writes to `node.toml`."""
    text = (ROOT / "docs" / "integrate" / page).read_text()
    return re.search(r"cat > node\.toml <<'END'\n(.*?)^END", text, re.DOTALL | re.MULTILINE)[1]


class Node:
    """A store node with the configuration of a page, in a directory of its own."""

    def __init__(self, binary, page, folder):
        config = node_config(page)
        # All of 127.0.0.0/8 is loopback: no other process uses the port of a random address.
        self.address = ".".join(["127", *(str(secrets.randbelow(254) + 1) for _ in range(3))]) + ":7401"
        self.documented_dir = re.search(r'attach_dir = "(.*?)"', config)[1]
        self.attach_dir = str(folder / "node")
        config = config.replace(self.documented_dir + '"', self.attach_dir + '"').replace("127.0.0.1:7401", self.address)
        config = re.sub(r'^dir = ".*"', f'dir = "{folder / "ssd"}"', config, flags=re.MULTILINE)
        # The transfer port of the default configuration may be in use.
        (folder / "node.toml").write_text(f'transfer_listen = "127.0.0.1:0"\n{config}')
        self.log = folder / "node.log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [binary, "store-node", "--config", str(folder / "node.toml")],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )
        self.wait_until_ready()

    def wait_until_ready(self):
        deadline = time.monotonic() + READY_WITHIN_S
        while True:
            try:
                with urllib.request.urlopen(f"http://{self.address}/readyz", timeout=5) as ready:
                    # A context needs the SSD.
                    if b"opening" not in ready.read():
                        return
            except OSError:
                pass
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text(errors="replace")
            time.sleep(0.05)

    def adapt(self, program):
        """The program of the page, with the address and the directory of this node."""
        assert self.documented_dir in program, "the program and the configuration name the same directory"
        return program.replace(self.documented_dir, self.attach_dir).replace("127.0.0.1:7401", self.address)

    def stop(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start_node(request):
    with tempfile.TemporaryDirectory(prefix="kvasir-doc-") as name:
        nodes = []

        def start(page):
            nodes.append(Node(request.config.getoption("--kvasir"), page, pathlib.Path(name)))
            return nodes[-1]

        yield start
        for node in nodes:
            node.stop()


def run(command, **environment):
    ended = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout.splitlines()


def test_python_objects_example(start_node, library):  # noqa: F811
    program = start_node("objects.md").adapt(example("objects.md", "python"))
    path = {"PYTHONPATH": str(CLIENT / "python"), "LD_LIBRARY_PATH": str(pathlib.Path(library).parent)}
    stored, got, found, removed = run([sys.executable, "-c", program], **path)
    assert stored == "['STORED', 'STORED']"
    assert got == "b'some bytes' None"
    assert found == "[<Tier.DRAM: 1>, <Tier.DRAM: 1>, <Tier.ABSENT: 0>]"
    assert removed == "3"


def test_c_objects_example(start_node, library, tmp_path):  # noqa: F811
    program = start_node("objects.md").adapt(example("objects.md", "c"))
    (tmp_path / "objects.c").write_text(program)
    folder = pathlib.Path(library).parent
    run([
        "cc", "-o", str(tmp_path / "objects"), str(tmp_path / "objects.c"), "-I", str(CLIENT / "capi" / "include"),
        "-L", str(folder), "-lkvasir_client_c", f"-Wl,-rpath,{folder}",
    ])
    assert run([str(tmp_path / "objects")]) == ["some bytes", "more", "removed 2"]


def test_python_engine_example(start_node, library, pb):  # noqa: F811
    program = start_node("engines.md").adapt(example("engines.md", "python"))
    generated = pathlib.Path(pb.common.__file__).parents[2]
    path = {"PYTHONPATH": f"{CLIENT / 'python'}:{generated}", "LD_LIBRARY_PATH": str(pathlib.Path(library).parent)}
    assert run([sys.executable, "-c", program], **path) == ["0 tokens were cached, 4 pages computed"]
    again = program.replace("serial=1", "serial=2")
    assert run([sys.executable, "-c", again], **path) == ["48 tokens were cached, 1 pages computed"]
