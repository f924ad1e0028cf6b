"""The monitoring page in a real browser, and the commands `top` and `explain`."""

import itertools
import json
import shutil
import subprocess
import threading

import httpx
import pytest

MODEL = "tiny-deepseek-v2"
BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")


@pytest.fixture(scope="module")
def asked(cluster):
    """The id of a request that has been answered, twice the same so that the second finds a cache."""
    prompt = list(range(5, 5 + 200))
    for request_id in ("watched-1", "watched-2"):
        answer = httpx.post(
            f"{cluster.url}/v1/completions",
            json={"model": MODEL, "prompt": prompt, "max_tokens": 3},
            headers={"x-request-id": request_id},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
    return "watched-2"


@pytest.fixture
def run(cluster, request):
    binary = request.config.getoption("--kvasir")
    watch = cluster.state()["monitor"]

    def run(*words):
        line = [binary, *words, "--conductor", watch]
        return subprocess.run(line, capture_output=True, text=True, timeout=60)

    return run


@pytest.fixture(scope="module")
def refused(cluster):
    """The id of a refused request: no engine meets its objective while it computes others. Alone the request would
    be in time, also on a slow machine."""
    url = f"{cluster.url}/v1/completions"
    over = threading.Event()

    def keep_busy(seed):
        for at in itertools.count():
            if over.is_set():
                return
            # Nothing of it is cached.
            prompt = [seed, 5 + at % 200, 5 + at // 200] + list(range(5, 3005))
            httpx.post(url, json={"model": MODEL, "prompt": prompt, "max_tokens": 1}, timeout=60)

    busy = [threading.Thread(target=keep_busy, args=(seed,)) for seed in (5, 6)]
    for thread in busy:
        thread.start()
    try:
        for at in range(500):
            answer = httpx.post(
                url,
                json={"model": MODEL, "prompt": list(range(9, 500)), "max_tokens": 1},
                headers={"x-request-id": f"refused-{at}", "x-llm-d-slo-ttft-ms": "5"},
                timeout=60,
            )
            if answer.status_code == 429:
                return f"refused-{at}"
    finally:
        over.set()
        for thread in busy:
            thread.join()
    raise AssertionError("nothing was refused")


def shown_in_browser(cluster, request_id):
    """The page, and of it the explanation, when its script has run."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("the page needs a browser: chromium-headless-shell")
    line = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000"]
    url = f"{cluster.state()['monitor']}/#{request_id}"
    ran = subprocess.run([*line, "--dump-dom", url], capture_output=True, text=True, timeout=120)
    page = ran.stdout
    assert 'data-ready="yes"' in page, page + ran.stderr
    return page, page.partition('<pre id="one"')[2].partition("</pre>")[0]


def test_the_page_shows_nodes_engines_and_decisions_in_a_browser(cluster, asked):
    page, explained = shown_in_browser(cluster, asked)
    for shown in ("prefill-1-node", "decode-1-node", "serving", "watched-1", "watched-2"):
        assert f">{shown}<" in page, f"{shown} is not in {page}"
    assert "split prefill-1 -&gt; decode-1" in explained, page
    assert "blocks are reused, cached at prefill-1-node" in explained, page


def test_explain_says_why_a_request_went_where_it_went(run, asked):
    ran = run("explain", asked)
    assert ran.returncode == 0, ran.stderr
    assert "split prefill-1 -> decode-1" in ran.stdout
    assert "blocks are reused, cached at prefill-1-node" in ran.stdout
    assert "outcome: ok after" in ran.stdout
    listed = run("explain", "--json", "--last", "2")
    decisions = json.loads(listed.stdout)["decisions"]
    assert [one["request_id"] for one in decisions] == ["watched-2", "watched-1"]
    assert "watched-1" in run("explain").stdout


def test_top_shows_nodes_and_engines(run, asked):
    ran = run("top", "--once")
    assert ran.returncode == 0, ran.stderr
    for shown in ("prefill-1-node", "decode-1", "serving", asked):
        assert shown in ran.stdout
    state = json.loads(run("top", "--once", "--json").stdout)
    assert [node["connected"] for node in state["cluster"]["nodes"]] == [True, True]


def test_what_is_wrong_is_said(cluster, run, request):
    unknown = run("explain", "nobody-asked-this")
    assert unknown.returncode == 1 and "no decision for the request" in unknown.stderr
    binary = request.config.getoption("--kvasir")
    line = [binary, "top", "--once", "--conductor", cluster.url]
    wrong = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 1 and "not to the address of its HTTP API" in wrong.stderr, wrong.stderr


def test_a_refusal_shows_each_candidate_in_a_browser_and_in_the_terminal(cluster, run, refused):
    _, explained = shown_in_browser(cluster, refused)
    terminal = run("explain", refused).stdout
    for text in (explained, terminal):
        assert "prefill prefill-1@prefill-1-node: cached" in text, text
        assert "us: misses the TTFT objective" in text, text
        assert "us: no prefill instance in time" in text, text
        assert "refused: no instance can meet the TTFT objective" in text, text
    found = json.loads(run("explain", "--json", refused).stdout)["decisions"][-1]
    (prefill,) = found["refusal"]["prefill_candidates"]
    assert prefill["instance"] == "prefill-1" and prefill["verdict"] == "misses_ttft"
    assert prefill["ttft_us"] > 1000
