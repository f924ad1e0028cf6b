"""Gives every front door its turn at each point, round by round, and prints medians and ratios as Markdown."""

import argparse
import hashlib
import json
import os
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

TOKENS = 16
KEY = "kv-a-key-of-this-benchmark"
# (how answers come, characters of a prompt, connections)
POINTS = [(how, chars, connections) for how, chars in (("stream", 600), ("whole", 600), ("stream", 12000)) for connections in (1, 16, 64)]
PATIENCE_S = 60
IDLE_WANTED = 0.85


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_for(what, is_there):
    end = time.time() + PATIENCE_S
    while not is_there():
        if time.time() > end:
            raise RuntimeError(f"{what} did not come up within {PATIENCE_S} s")
        time.sleep(0.1)


def listens(port):
    try:
        socket.create_connection(("127.0.0.1", port), 0.3).close()
        return True
    except OSError:
        return False


def answers(port):
    body = {"model": "mock", "max_tokens": TOKENS, "messages": [{"role": "user", "content": "hello"}]}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {KEY}"},
    )
    try:
        return urllib.request.urlopen(request, timeout=2).status == 200
    except (urllib.error.URLError, OSError):
        return False


class Processes:
    """The started processes. They end with this context."""

    def __init__(self, logs):
        self.logs, self.children = logs, []

    def start(self, name, command):
        with open(os.path.join(self.logs, name), "w") as log:
            self.children.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for child in self.children:
            child.kill()
            child.wait()


def start_kvasir(processes, binary, folder, name, servers, keys):
    port = free_port()
    lines = [f'{listen} = "127.0.0.1:{at}"' for listen, at in
             (("listen", port), ("grpc_listen", free_port()), ("monitor_listen", free_port()))]
    if keys:
        path = os.path.join(folder, "keys.toml")
        with open(path, "w") as file:
            file.write('[[tenants]]\nname = "bench"\n')
            file.write(f'keys = [{{ sha256 = "{hashlib.sha256(KEY.encode()).hexdigest()}" }}]\n')
        lines.append(f'api_keys_file = "{path}"')
    for server in servers:
        lines.append(f'[[backends]]\nmodel = "mock"\nurl = "http://127.0.0.1:{server}"')
    path = os.path.join(folder, f"{name}.toml")
    with open(path, "w") as file:
        file.write("\n".join(lines) + "\n")
    processes.start(name, [binary, "conductor", "--config", path])
    return port


def start_router(processes, python, name, servers, policy):
    port = free_port()
    urls = [f"http://127.0.0.1:{server}" for server in servers]
    processes.start(name, [
        python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls,
        "--policy", policy, "--prometheus-port", str(free_port()), "--log-level", "error",
    ])
    return port


def until_idle(patience_s):
    """Whether the machine was idle for a quarter of a second, after waiting for it for a while."""
    end = time.time() + patience_s
    while True:
        before = cpu_times()
        time.sleep(0.25)
        after = cpu_times()
        spent = [b - a for a, b in zip(before, after)]
        if (spent[3] + spent[4]) / max(sum(spent), 1) >= IDLE_WANTED:
            return True
        if time.time() > end:
            return False


def cpu_times():
    with open("/proc/stat") as stat:
        return [int(ticks) for ticks in stat.readline().split()[1:9]]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kvasir", required=True)
    parser.add_argument("--mock", required=True)
    parser.add_argument("--load", required=True)
    parser.add_argument("--router-python", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--sides", default="server,kvasir,kvasir-keys,sglang-router,sglang-router-cache-aware")
    parser.add_argument("--patience-s", type=float, default=20.0, help="how long to wait for an idle machine, each time")
    parser.add_argument("--json", help="a file for all samples")
    options = parser.parse_args()
    wanted = options.sides.split(",")
    with tempfile.TemporaryDirectory() as folder, Processes(folder) as processes:
        servers = [free_port(), free_port()]
        for at, port in enumerate(servers):
            processes.start(f"mock-{at}", [options.mock, str(port), str(TOKENS)])
            wait_for("the server", lambda: listens(port))
        start = {
            "server": lambda name: servers[0],
            "kvasir": lambda name: start_kvasir(processes, options.kvasir, folder, name, servers, False),
            "kvasir-keys": lambda name: start_kvasir(processes, options.kvasir, folder, name, servers, True),
            "sglang-router": lambda name: start_router(processes, options.router_python, name, servers, "round_robin"),
            "sglang-router-cache-aware":
                lambda name: start_router(processes, options.router_python, name, servers, "cache_aware"),
        }
        ports = {name: start[name](name) for name in wanted}
        for name, port in ports.items():
            try:
                wait_for(name, lambda: answers(port))
            except RuntimeError:
                with open(os.path.join(folder, name)) as log:
                    print(log.read()[-2000:])
                raise
        samples, busy = measure(options, ports)
    if options.json:
        with open(options.json, "w") as file:
            json.dump([{"point": point, "side": side, "samples": all_of} for (point, side), all_of in samples.items()], file)
    report(samples, wanted)
    if busy:
        print(f"\n{busy} samples began on a machine that was less than {IDLE_WANTED:.0%} idle.")


def measure(options, ports):
    samples, busy = {}, 0
    for _ in range(options.rounds):
        for point in POINTS:
            how, chars, connections = point
            for side, port in ports.items():
                busy += not until_idle(options.patience_s)
                command = [options.load, port, connections, options.seconds, how, chars, TOKENS, KEY]
                output = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
                samples.setdefault((point, side), []).append(json.loads(output.stdout))
                if output.stderr:
                    print(f"{side}, {point}: {output.stderr.strip()[:400]}")
    return samples, busy


def report(samples, sides):
    for point in POINTS:
        how, chars, connections = point
        print(f"\n#### {how}, prompts of {chars} characters, {connections} connections\n")
        print("| front door | answers/s | p50 us | p99 us | first byte p50 us | p99 us | errors |")
        print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
        median = {}
        for side in sides:
            all_of = samples[(point, side)]
            of = {name: statistics.median(sample[name] for sample in all_of) for name in all_of[0]}
            of["errors"] = sum(sample["errors"] for sample in all_of)
            median[side] = of
            cells = [of[name] for name in ("requests_s", "p50_us", "p99_us", "first_p50_us", "first_p99_us", "errors")]
            print(f"| {side} | " + " | ".join(f"{cell:.0f}" for cell in cells) + " |")
        peers = [median[side]["requests_s"] for side in sides if side.startswith("sglang")]
        if peers and "kvasir" in median:
            print(f"\nkvasir has {median['kvasir']['requests_s'] / max(peers):.2f} times the better peer's answers.")


main()
