"""Gives every side its turn at each point, round by round, and prints medians and ratios as Markdown."""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
KIB = 1 << 10
# (bytes of a page, pages of a call, calls of a sample)
POINTS = [
    (4 * KIB, 1, 1500),
    (64 * KIB, 1, 1000),
    (1024 * KIB, 1, 200),
    (16384 * KIB, 1, 14),
    (65536 * KIB, 1, 4),
    (32 * KIB, 1024, 8),
]
IDLE_WANTED = 0.85
IDLE_PATIENCE_S = 20


class Side:
    def __init__(self, name, command, environment=None):
        self.name = name
        env = {**os.environ, "GLOG_minloglevel": "2", "MC_LOG_LEVEL": "ERROR", "NIXL_LOG_LEVEL": "ERROR",
               "UCX_LOG_LEVEL": "error", **(environment or {})}
        # A group of its own, so that it can be stopped together with its target.
        self.child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env,
            process_group=0,
        )
        self.hear("READY")
        self.pause()

    def pause(self):
        """Stops the side, because a side that polls for its turn would take a core from the measured side."""
        os.killpg(self.child.pid, signal.SIGSTOP)

    def go_on(self):
        os.killpg(self.child.pid, signal.SIGCONT)

    def hear(self, word):
        for line in self.child.stdout:
            if line.startswith(word):
                return line[len(word) :].strip()
        raise RuntimeError(f"{self.name} has ended")

    def measure(self, point):
        self.go_on()
        self.child.stdin.write(json.dumps(point) + "\n")
        self.child.stdin.flush()
        answer = json.loads(self.hear("POINT"))
        self.pause()
        return answer


def sides(binary, mooncake, nixl, wanted):
    every = {
        "memcpy": lambda: Side("memcpy", [binary, "memcpy"]),
        "plain-tcp": lambda: Side("plain-tcp", [binary, "plain-tcp"]),
        "kvasir-tcp": lambda: Side("kvasir-tcp", [binary, "tcp"]),
        "kvasir-shm": lambda: Side("kvasir-shm", [binary, "shm"]),
        "mooncake-tcp": lambda: Side("mooncake-tcp", [mooncake, f"{HERE}/mooncake_side.py", "sender"]),
        "nixl": lambda: Side("nixl", [nixl, f"{HERE}/nixl_side.py", "sender"]),
        "nixl-tcp": lambda: Side("nixl-tcp", [nixl, f"{HERE}/nixl_side.py", "sender"], {"UCX_TLS": "tcp"}),
    }
    names = wanted.split(",") if wanted else list(every)
    unknown = [name for name in names if name not in every]
    if unknown:
        sys.exit(f"unknown sides {', '.join(unknown)}: there are {', '.join(every)}")
    return [every[name]() for name in names]


def busy_and_all():
    with open("/proc/stat") as stat:
        ticks = list(map(int, stat.readline().split()[1:9]))
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def wait_until_quiet():
    """The share of the machine that was idle before the sample, after some patience."""
    deadline = time.monotonic() + IDLE_PATIENCE_S
    while True:
        busy, all_ = busy_and_all()
        time.sleep(0.3)
        busy_now, all_now = busy_and_all()
        idle = 1 - (busy_now - busy) / max(1, all_now - all_)
        if idle >= IDLE_WANTED or time.monotonic() > deadline:
            return idle


def quantile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--mooncake-python", required=True)
    parser.add_argument("--nixl-python", required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sides", help="as in kvasir-tcp,mooncake-tcp; all of them by default")
    parser.add_argument("--json", help="where to write every sample")
    arguments = parser.parse_args()
    running = sides(arguments.binary, arguments.mooncake_python, arguments.nixl_python, arguments.sides)
    samples, idles, wrong = [], [], 0
    for bytes_, pages, calls in POINTS:
        of_point = {side.name: [] for side in running}
        for round_ in range(arguments.rounds + 1):
            for side in running:
                idles.append(wait_until_quiet())
                point = {"bytes": bytes_, "pages": pages, "calls": calls, "seed": 1 + round_ * 1000 + len(samples)}
                answer = side.measure(point)
                if "error" in answer:
                    print(f"{side.name}, {bytes_} bytes: {answer['error']}", file=sys.stderr)
                    continue
                wrong += answer["wrong_pages"]
                # The first round warms connections and caches.
                if round_ > 0:
                    of_point[side.name].append(answer)
        what = f"{pages:,} x {bytes_ // KIB} KiB" if pages > 1 else f"{bytes_ // KIB:,} KiB"
        print(f"\n### {what}\n\n| side | GB/s | p50 us | p99 us |\n| --- | --- | --- | --- |")
        for name, answers in of_point.items():
            if not answers:
                print(f"| {name} | - | - | - |")
                continue
            rate = statistics.median(bytes_ * pages * calls / one["seconds"] / 1e9 for one in answers)
            p50 = statistics.median(quantile(one["latencies_us"], 0.5) for one in answers)
            p99 = statistics.median(quantile(one["latencies_us"], 0.99) for one in answers)
            print(f"| {name} | {rate:.3f} | {p50:.1f} | {p99:.1f} |", flush=True)
            samples.append({"point": what, "side": name, "GBps": rate, "p50_us": p50, "p99_us": p99})
    quiet = sum(idle >= IDLE_WANTED for idle in idles) / max(1, len(idles))
    print(f"\n{quiet:.0%} of the samples began on a machine that was {IDLE_WANTED:.0%} idle; wrong pages: {wrong}")
    if arguments.json:
        with open(arguments.json, "w") as out:
            json.dump(samples, out, indent=1)
    for side in running:
        side.go_on()
        side.child.stdin.write('{"quit": true}\n')
        side.child.stdin.close()
        side.child.wait(timeout=30)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
