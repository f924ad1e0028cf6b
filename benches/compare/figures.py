"""The figures that are compared, the programs that measure them, and the parsers of the programs' output.

A group is one entry of `--only`: the figures of one measurement, which starts its programs with a fixed configuration.
Both revisions run their own programs. So the arguments and the output of these programs must stay as they are, or the
parsers here must understand the older and the newer form.
"""

import contextlib
import json
import math
import os
import re
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from builds import Program
from verdict import Figure

KVASIR = Program("kvasir", "bin", "kvasir")
PLACE = Program("kvasir-placement", "bench", "place")
PUSH_OVERLAP = Program("kvasir", "bench", "push_overlap")
FRONT_DOOR = Program("kvasir", "bench", "front_door")
STORE_SIDE = Program("kvasir-client", "example", "store_side")
ROUND_TRIP = Program("kvasir-route", "example", "round_trip")

KIB, MIB = 1 << 10, 1 << 20
PROGRAM_TIMEOUT_S = 300
END_TIMEOUT_S = 15

# Streams, tokens a second of each stream, and seconds of the front door's benchmark.
FRONT_DOOR_LOAD = ["250", "20", "6"]
PUSH_TOKENS = [512, 1024]
ROUTED_ROWS = [1, 16]
ROUTED_CACHED_ROWS = 64
STORE_ARENA_BYTES = 1 << 30
# One more sample warms connections and caches, and is not counted.
STORE_SAMPLES = 5


class RunError(Exception):
    """A program that failed, or output that the parser does not understand."""


@dataclass(frozen=True)
class Group:
    """Figures that are measured together. `measure` takes the executables by program and gives the figures' values."""

    name: str
    programs: list
    figures: list
    measure: Callable


# ---- processes


class Running:
    """A program in a process group of its own, which ends with this value. It is ended after a time limit."""

    def __init__(self, command, cwd, temporary, timeout_s=PROGRAM_TIMEOUT_S):
        self.command = [str(part) for part in command]
        self.errors = tempfile.TemporaryFile("w+", dir=temporary)
        self.child = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            cwd=cwd,
            env={**os.environ, "TMPDIR": temporary},
            start_new_session=True,
        )
        self.timer = threading.Timer(timeout_s, self.signal, [signal.SIGKILL])
        self.timer.daemon = True
        self.timer.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.timer.cancel()
        with contextlib.suppress(OSError):
            self.child.stdin.close()
        # A cluster that the program has started ends its own processes on SIGTERM.
        for number in (signal.SIGTERM, signal.SIGKILL):
            self.signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(END_TIMEOUT_S)
            if self.wait_for_group():
                break
        self.child.stdout.close()
        self.errors.close()

    def signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, number)

    def wait_for_group(self):
        """Whether the whole process group has ended in time."""
        deadline = time.monotonic() + END_TIMEOUT_S
        while is_group_alive(self.child.pid):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def failure(self, problem):
        self.errors.seek(0)
        tail = self.errors.read()[-2000:].strip()
        return RunError(f"{os.path.basename(self.command[0])}: {problem}\n{tail}".strip())

    def hear(self, word):
        """The rest of the next line that begins with this word."""
        for line in self.child.stdout:
            if line.startswith(word):
                return line[len(word) :].strip()
        raise self.failure(f"it ended before it printed {word}")

    def ask(self, point):
        self.child.stdin.write(json.dumps(point) + "\n")
        self.child.stdin.flush()
        answer = json.loads(self.hear("POINT"))
        if "error" in answer or answer["wrong"] or answer["failed"]:
            shown = {name: value for name, value in answer.items() if name != "latencies_us"}
            raise self.failure(f"{point} gave {shown}")
        return answer


def is_group_alive(group):
    """Whether a process of the group runs. One that has ended and was not waited for does not count."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group_there = stat.read_text().rpartition(")")[2].split()[:3]
            if int(group_there) == group and state != "Z":
                return True
    return False


class Runner:
    """Starts the programs of one revision in a temporary folder."""

    def __init__(self, build, temporary):
        self.build, self.temporary = build, temporary

    def start(self, program, *arguments):
        command = [self.build.executables[program], *arguments]
        return Running(command, self.build.tree, self.temporary)

    def output(self, program, *arguments):
        """The whole output of a program that succeeds."""
        with self.start(program, *arguments) as running:
            output = running.child.stdout.read()
            if running.child.wait() != 0:
                raise running.failure(f"it ended with status {running.child.returncode}")
            return output


# ---- tables


def cells(line):
    """The cells of a line of a Markdown table, or nothing."""
    line = line.strip()
    return [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []


def row(output, names, at_least):
    """The numbers of the first table row with one of these names and at least this number of cells."""
    for line in output.splitlines():
        first, *rest = cells(line) or [""]
        if first in names and len(rest) >= at_least:
            return [parsed(cell) for cell in rest]
    raise RunError(f"the output has no row {' or '.join(names)} with {at_least} numbers:\n{output[-2000:]}")


def parsed(cell):
    """The finite number in a cell, or None."""
    try:
        value = float(cell.replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


# ---- groups

PLACED = Figure("placement, p50", "us", "lower")
REFUSED = Figure("placement refused for lack of room, p50", "us", "lower")
MATCHED = Figure("prefix match and placement, p50", "us", "lower")


def parse_place(output):
    return {
        PLACED: row(output, ["placed"], 2)[0],
        REFUSED: row(output, ["refused: no room"], 2)[0],
        # Older revisions call the policy `kvasir`.
        MATCHED: row(output, ["least-cost", "kvasir"], 4)[2],
    }


def measure_placement(runner):
    return parse_place(runner.output(PLACE))


@dataclass(frozen=True)
class Point:
    """The calls of one client of a store node, as `benches/peers/store/protocol.py` defines them."""

    what: str
    bytes: int
    batch: int
    calls: int


GET = Figure("same-host get of 128 KiB, p50", "us", "lower")
GET_LARGE = Figure("same-host get of 4 MiB, p50", "us", "lower")
GET_FAR = Figure("remote get of 128 KiB, p50", "us", "lower")
GET_FAR_LARGE = Figure("remote get of 1 MiB, p50", "us", "lower")
GET_FAR_BATCH = Figure("remote gets in batches, 32 x 128 KiB", "GB/s", "higher")
PUT = Figure("puts in batches, 32 x 128 KiB", "GB/s", "higher")
PUT_LARGE = Figure("puts in batches, 8 x 4 MiB", "GB/s", "higher")

STORE_POINTS = {
    GET: Point("get", 128 * KIB, 1, 5000),
    GET_LARGE: Point("get", 4 * MIB, 1, 500),
    GET_FAR: Point("get_far", 128 * KIB, 1, 1000),
    GET_FAR_LARGE: Point("get_far", 1 * MIB, 1, 192),
    GET_FAR_BATCH: Point("get_far", 128 * KIB, 32, 48),
    PUT: Point("put", 128 * KIB, 32, 128),
    PUT_LARGE: Point("put", 4 * MIB, 8, 16),
}


def summarize(figure, point, latencies_us):
    """The value of a figure, from the latencies of all calls. A rate is that of the median call."""
    p50_us = statistics.median(latencies_us)
    return p50_us if figure.unit == "us" else point.batch * point.bytes / p50_us / 1e3


def measure_store(figures):
    """Two store nodes, of which the far one is reached over TCP, and one client on the near node's host."""

    def measure(runner):
        values = {}
        for size in sorted({STORE_POINTS[figure].bytes for figure in figures}):
            folder = tempfile.mkdtemp(dir=runner.temporary)
            with contextlib.ExitStack() as stack:

                def start(*arguments):
                    return stack.enter_context(runner.start(STORE_SIDE, *arguments))

                nodes = [start("node", name, folder, STORE_ARENA_BYTES) for name in ("near", "far")]
                _, address = (node.hear("READY") for node in nodes)
                client = start("client", 0, size, f"{folder}/near", f"{folder}/far", address)
                client.hear("READY")
                for at, figure in enumerate(figures):
                    point = STORE_POINTS[figure]
                    if point.bytes == size:
                        seeds = range(1000 * at, 1000 * at + STORE_SAMPLES + 1)
                        asked = {"what": point.what, "bytes": size, "batch": point.batch, "calls": point.calls}
                        samples = [client.ask({**asked, "clients": 1, "seed": seed}) for seed in seeds]
                        latencies_us = [us for sample in samples[1:] for us in sample["latencies_us"]]
                        values[figure] = summarize(figure, point, latencies_us)
        return values

    return measure


PUSH_LEFT = {
    tokens: Figure(f"from the end of a prefill of {tokens:,} tokens to its last byte", "ms", "lower")
    for tokens in PUSH_TOKENS
}
PREFILL = {tokens: Figure(f"prefill of {tokens:,} tokens with a concurrent push", "ms", "lower") for tokens in PUSH_TOKENS}


def parse_push_overlap(line):
    """The values in one line of the table."""
    first, *rest = cells(line) or [""]
    tokens = parsed(first)
    if tokens not in PUSH_LEFT or len(rest) < 2:
        return {}
    return {PREFILL[tokens]: parsed(rest[0]), PUSH_LEFT[tokens]: parsed(rest[1])}


def measure_push_overlap(runner):
    """The first rows of the benchmark's first table. Then the benchmark, which takes no arguments, is ended."""
    values = {}
    with runner.start(PUSH_OVERLAP) as running:
        for line in running.child.stdout:
            values |= parse_push_overlap(line)
            if len(values) == 2 * len(PUSH_TOKENS):
                return values
        raise running.failure("it ended before it printed all rows")


TOKEN = Figure("a token behind the front door, p50", "us", "lower")
REQUEST = Figure("a request behind the front door, p50", "us", "lower")
CONDUCTOR = Figure("processor time of the conductor for a token", "us", "lower")


def parse_front_door(output):
    found = re.search(r"([\d.]+) us a token", output)
    if not found:
        raise RunError(f"the output does not say the processor time for a token:\n{output[-2000:]}")
    return {
        TOKEN: row(output, ["token, behind the front door"], 4)[1],
        REQUEST: row(output, ["request, behind the front door"], 4)[1],
        CONDUCTOR: float(found.group(1)),
    }


def measure_front_door(runner):
    return parse_front_door(runner.output(FRONT_DOOR, *FRONT_DOOR_LOAD))


ROUND = {
    rows: Figure(f"routed round trip without attention, query rows: {rows}, p50", "us", "lower") for rows in ROUTED_ROWS
}
ATTENDED = {
    rows: Figure(f"routed round trip over {ROUTED_CACHED_ROWS} cached rows, query rows: {rows}, p50", "us", "lower")
    for rows in ROUTED_ROWS
}


def parse_round_trip(rows, output):
    values = {}
    for figure, name in ((ROUND[rows], "without attention"), (ATTENDED[rows], f"over {ROUTED_CACHED_ROWS} rows")):
        found = re.search(rf"^{name}: p50 ([\d.]+) us", output, re.MULTILINE)
        if not found:
            raise RunError(f"the output has no line `{name}`:\n{output[-2000:]}")
        values[figure] = float(found.group(1))
    return values


def measure_routed(runner):
    values = {}
    for rows in ROUTED_ROWS:
        values |= parse_round_trip(rows, runner.output(ROUND_TRIP, rows, ROUTED_CACHED_ROWS))
    return values


GETS, REMOTE_GETS, PUTS = [GET, GET_LARGE], [GET_FAR, GET_FAR_LARGE, GET_FAR_BATCH], [PUT, PUT_LARGE]
GROUPS = [
    Group("placement", [PLACE], [PLACED, REFUSED, MATCHED], measure_placement),
    Group("get", [STORE_SIDE], GETS, measure_store(GETS)),
    Group("remote-get", [STORE_SIDE], REMOTE_GETS, measure_store(REMOTE_GETS)),
    Group("put", [STORE_SIDE], PUTS, measure_store(PUTS)),
    Group("push-overlap", [KVASIR, PUSH_OVERLAP], [*PUSH_LEFT.values(), *PREFILL.values()], measure_push_overlap),
    Group("front-door", [KVASIR, FRONT_DOOR], [TOKEN, REQUEST, CONDUCTOR], measure_front_door),
    Group("routed", [ROUND_TRIP], [*ROUND.values(), *ATTENDED.values()], measure_routed),
]
