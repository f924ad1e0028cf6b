"""The official `openai` package for Node, where there is Node and the package was installed."""

import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# `.ci/run` installs the package here, from the lock file in tests/e2e/node.
INSTALLED = ROOT / "target" / "e2e-node"
MODEL = "tiny-deepseek-v2"
# The package needs it.
NODE_MAJOR_MIN = 20


def test_the_node_package_drives_a_cluster(cluster):
    node = shutil.which("node")
    if node is None or not (INSTALLED / "node_modules" / "openai").is_dir():
        pytest.skip("the Node client needs node, and `npm ci` in target/e2e-node as .ci/run does it")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=60).stdout
    if int(version.strip().lstrip("v").partition(".")[0] or 0) < NODE_MAJOR_MIN:
        pytest.skip(f"the Node client needs node {NODE_MAJOR_MIN} or later, not {version.strip()}")
    script = INSTALLED / "openai.mjs"
    shutil.copy(ROOT / "tests" / "e2e" / "node" / "openai.mjs", script)
    ran = subprocess.run(
        [node, str(script), f"{cluster.url}/v1", MODEL], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0 and ran.stdout == "ok\n", ran.stdout + ran.stderr
