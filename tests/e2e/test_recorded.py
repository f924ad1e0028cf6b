"""Decisions of a cluster under load are taken again elsewhere, and come out as they were."""

import itertools
import json
import subprocess
import tempfile
import threading
from pathlib import Path

import httpx
import pytest

from conftest import Cluster

MODEL = "tiny-deepseek-v2"


@pytest.fixture(scope="module")
def recording(request):
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        binary = request.config.getoption("--kvasir")
        flags = ["--prefill", "2", "--decode", "2", "--decision-inputs-bytes-max", "16MiB"]
        cluster = Cluster(binary, Path(folder), *flags)
        yield cluster
        cluster.end()


@pytest.fixture(scope="module")
def decisions(recording):
    """The decisions for 120 requests. The conductor refuses some of them."""
    serial = itertools.count()

    def ask(seed):
        for at in range(20):
            # Some begin alike, and some are in a hurry.
            prompt = [5 + (seed * at) % 7] + list(range(5, 5 + 90 * (1 + at % 9)))
            hurry = {"x-llm-d-slo-ttft-ms": "1"} if at % 3 == 0 else {}
            httpx.post(
                f"{recording.url}/v1/completions",
                json={"model": MODEL, "prompt": prompt, "max_tokens": 4 + at % 5},
                headers={"x-request-id": f"recorded-{next(serial)}", **hurry},
                timeout=60,
            )

    clients = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    watch = recording.state()["monitor"]
    listed = httpx.get(f"{watch}/decisions", params={"last": 1000}).json()["decisions"]
    kinds = {"refused" if one.get("refused") else "placed" for one in listed}
    assert kinds == {"refused", "placed"}, "the load is of both kinds"
    ids = {one["request_id"] for one in listed}
    assert len(ids) == 120
    answers = [httpx.get(f"{watch}/decisions/{one}/inputs") for one in ids]
    assert all(answer.status_code == 200 for answer in answers), answers
    return [one for answer in answers for one in answer.json()["decisions"]]


@pytest.fixture
def replay(request, tmp_path):
    binary = request.config.getoption("--kvasir")

    def replay(decisions):
        file = tmp_path / "decisions.json"
        file.write_text(json.dumps({"decisions": decisions}))
        line = [binary, "replay", "--decision", str(file)]
        return subprocess.run(line, capture_output=True, text=True, timeout=60)

    return replay


def test_decisions_under_load_are_taken_again_as_they_were(decisions, replay):
    busy = [one for one in decisions if any(i["prefills"]["first"] for i in one["inputs"]["instances"])]
    assert len(busy) > 20, "most were taken while others ran"
    ran = replay(decisions)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("fields equal the recorded ones") == len(decisions) >= 120


def test_what_was_changed_is_found(decisions, replay):
    placed = next(one for one in decisions if "prefill" in one["decision"])
    changed = json.loads(json.dumps(placed))
    changed["inputs"]["request"]["prompt_tokens"] += 64
    ran = replay([placed, changed])
    assert ran.returncode == 1
    assert "decision 1: all" in ran.stdout
    assert "decision 2: prompt_blocks: recorded" in ran.stdout, ran.stdout
    assert "1 of the decisions differ from the recorded ones" in ran.stderr

    changed["format_version"] = 99
    ran = replay([changed])
    assert ran.returncode == 1 and "format 99" in ran.stderr, ran.stderr


def test_no_token_and_no_request_is_in_it(decisions):
    text = json.dumps(decisions)
    assert "recorded-" not in text
    request = {"prompt_tokens", "max_tokens", "ttft_objective_us", "tbt_objective_us", "exclude"}
    request |= {"tie_seed", "now_us", "may_route", "has_fixed_length", "instance", "prefix"}
    assert all(set(one["inputs"]["request"]) == request for one in decisions)


def test_a_request_whose_inputs_are_not_kept_says_so(recording):
    answer = httpx.get(f"{recording.state()['monitor']}/decisions/nobody/inputs")
    assert answer.status_code == 404 and "decision_inputs_bytes_max" in answer.json()["error"]
