"""A cluster of the built binary for the tests of this folder, and clients for it.

The binary is target/debug/kvasir, or what `--kvasir` names.
"""

import json
import pathlib
import subprocess
import tempfile
import time

import httpx
import openai
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
READY_WITHIN_S = 60


def pytest_addoption(parser):
    parser.addoption("--kvasir", default=str(ROOT / "target" / "debug" / "kvasir"))


class Cluster:
    """A running `kvasir up` in a run folder of its own."""

    def __init__(self, binary, run_dir, *flags):
        self.run_dir = run_dir
        self.output = open(run_dir / "up.out", "wb")
        self.up = subprocess.Popen(
            [binary, "up", "--port", "0", "--run-dir", str(run_dir), "--dram-bytes", "64MiB", *flags],
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )
        self.url = self._wait_until_ready()["url"]

    def state(self):
        return json.loads((self.run_dir / "state.json").read_text())

    def said(self):
        return (self.run_dir / "up.out").read_text(errors="replace")

    def _wait_until_ready(self):
        deadline = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline:
            if self.up.poll() is not None:
                raise AssertionError(f"`up` ended:\n{self.said()}")
            if (self.run_dir / "state.json").exists() and self.state()["ready"]:
                return self.state()
            time.sleep(0.05)
        self.end()
        raise AssertionError(f"`up` is not ready:\n{self.said()}")

    def end(self):
        self.up.terminate()
        try:
            self.up.wait(20)
        except subprocess.TimeoutExpired:
            self.up.kill()
            self.up.wait()
        self.output.close()


@pytest.fixture(scope="session")
def cluster(request):
    """One prefill and one decode engine. Its folder's path is short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="kvasir-py-") as folder:
        binary = request.config.getoption("--kvasir")
        running = Cluster(binary, pathlib.Path(folder), "--ssd-bytes", "64MiB")
        yield running
        running.end()


@pytest.fixture(scope="session")
def client(cluster):
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def http(cluster):
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def cases():
    """The expected tokens of the bundled model, computed by the transformers library."""
    path = ROOT / "tests" / "data" / "deepseek_v2" / "plain" / "expected.json"
    return json.loads(path.read_text())["cases"]
