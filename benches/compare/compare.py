"""Compares the performance of two revisions on this machine: builds both, runs their benchmarks in turns, and judges.

A figure is worse if its median differs by more than 5 % and by more than the older revision's own spread. The exit status
is 1 if a figure is worse, 2 if one was not compared or a revision does not build, and 3 after an unexpected error.
"""

import argparse
import datetime
import fcntl
import os
import platform
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import builds
import verdict
from figures import GROUPS, RunError, Runner

ROOT = Path(__file__).resolve().parents[2]
SIDES = ("before", "after")
IDLE_WANTED = 0.85
# A figure with a larger spread hides a change that matters.
SPREAD_WANTED = 0.2


def main():
    # Programs that are running are ended, and the temporary folder is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options = parse_arguments()
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve()
    compare_dir = target / "compare"
    compare_dir.mkdir(parents=True, exist_ok=True)
    with open(compare_dir / "lock", "w") as lock:
        # Two comparisons at once would disturb each other.
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            revisions = [builds.resolve(ROOT, name) for name in (options.before, options.after)]
            if options.after is None and revisions[0].tree == revisions[1].tree:
                raise builds.BuildError(f"the working tree equals {options.before}: there is no change to measure")
            programs = list(dict.fromkeys(program for group in options.groups for program in group.programs))
            sides = [builds.build(ROOT, compare_dir, revision, programs) for revision in revisions]
        except builds.BuildError as error:
            print(error, file=sys.stderr)
            return 2
        results = options.results or compare_dir / "results" / "-".join(revision.folder for revision in revisions)
        results.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        values, idle = measure(options, sides, results)
    rows = [
        verdict.compare(
            figure, *(values[side, figure] for side in SIDES), options.rounds, bool(absent(group, sides[0]))
        )
        for group in options.groups
        for figure in group.figures
    ]
    text = report(rows, revisions, options, idle, time.monotonic() - started)
    (results / "table.md").write_text(text)
    print(text, end="")
    print(f"\n{results / 'table.md'} has this table, {results / 'values.tsv'} the value of each round.", file=sys.stderr)
    return verdict.exit_status(rows, options.allow_new)


def parse_arguments():
    names = [group.name for group in GROUPS]
    parser = argparse.ArgumentParser(prog="benches/compare/run", description=__doc__)
    parser.add_argument("before", metavar="BEFORE", help="the older revision")
    parser.add_argument("after", metavar="AFTER", nargs="?", help="the newer one; the working tree by default")
    parser.add_argument("--rounds", type=int, default=verdict.ROUNDS_MIN, help="%(default)s by default; fewer give no verdict")
    parser.add_argument("--only", metavar="GROUP,...", help=f"of {','.join(names)}; all of them by default")
    parser.add_argument("--allow-new", action="store_true", help="accept figures that the older revision has no program for")
    parser.add_argument("--results", type=Path, metavar="DIR", help="the folder for the table and the values of each round")
    parser.add_argument(
        "--patience", type=float, default=20, metavar="SECONDS", help="how long to wait for an idle machine, each time"
    )
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else names
    unknown = [name for name in wanted if name not in names]
    if unknown:
        parser.error(f"unknown group {', '.join(unknown)}; the groups are {', '.join(names)}")
    if options.rounds < 1:
        parser.error("--rounds is 1 or more")
    options.groups = [group for group in GROUPS if group.name in wanted]
    return options


def measure(options, sides, results):
    """The values of each side and figure, round by round, and the share of runs that began on an idle machine."""
    values = {(side, figure): [] for side in SIDES for group in options.groups for figure in group.figures}
    idle = []
    with open(results / "values.tsv", "w") as file:
        print("round", "revision", "figure", "unit", "value", sep="\t", file=file, flush=True)
        for round_ in range(1, options.rounds + 1):
            for group in options.groups:
                turns = list(zip(SIDES, sides))
                # The first of two runs finds a colder machine, so the revisions change places in each round.
                for side, build in turns if round_ % 2 else reversed(turns):
                    idle.append(wait_until_idle(options.patience) >= IDLE_WANTED)
                    print(f"round {round_} of {options.rounds}: {group.name}, {side}", file=sys.stderr, flush=True)
                    for figure, value in run(group, build).items():
                        values[side, figure].append(value)
                        print(round_, side, figure.name, figure.unit, value, sep="\t", file=file, flush=True)
    return values, sum(idle) / len(idle)


def absent(group, build):
    """The names of the group's programs that the revision lacks."""
    return [program.name for program in group.programs if program not in build.executables]


def run(group, build):
    """The values of a group's figures. A program that the revision lacks or that fails gives none, and is reported."""
    if lacks := absent(group, build):
        print(f"{build.revision.label} has no {', '.join(lacks)}", file=sys.stderr)
        return {}
    with tempfile.TemporaryDirectory(prefix="kvasir-compare-", ignore_cleanup_errors=True) as temporary:
        try:
            values = group.measure(Runner(build, temporary))
        # A program that dies while it is asked, or an answer of another form.
        except (RunError, OSError, ValueError, KeyError) as error:
            print(f"{build.revision.label}: {group.name}: {error!r}", file=sys.stderr)
            return {}
    return {figure: value for figure, value in values.items() if value is not None}


def wait_until_idle(patience_s):
    """The share of the machine that was idle for the last quarter of a second, after some patience."""
    deadline = time.monotonic() + patience_s
    while True:
        before = processor_ticks()
        time.sleep(0.25)
        spent = [b - a for a, b in zip(before, processor_ticks())]
        idle = (spent[3] + spent[4]) / max(1, sum(spent))
        if idle >= IDLE_WANTED or time.monotonic() > deadline:
            return idle


def processor_ticks():
    with open("/proc/stat") as stat:
        return [int(ticks) for ticks in stat.readline().split()[1:9]]


def processor():
    with open("/proc/cpuinfo") as about:
        names = [line.partition(":")[2].strip() for line in about if line.startswith("model name")]
    return names[0] if names else platform.machine()


def report(rows, revisions, options, idle, seconds):
    before, after = (revision.label for revision in revisions)
    return (
        f"Before: {before}. After: {after}. Median of {options.rounds}, {datetime.date.today()}.\n"
        f"{os.cpu_count()} processors ({processor()}), Linux {platform.release()}; {seconds / 60:.0f} minutes; "
        f"{idle:.0%} of the runs began on a machine that was {IDLE_WANTED:.0%} idle.\n\n"
        f"{verdict.table(rows)}\n{noise(rows)}"
    )


def noise(rows):
    """A sentence about figures whose spread is so large that the comparison says little about them."""
    noisy = sum(row.spread is not None and row.spread > SPREAD_WANTED for row in rows)
    if not noisy:
        return ""
    return f"\n{noisy} of {len(rows)} figures have a spread above {SPREAD_WANTED:.0%}: a smaller change of them stays unseen.\n"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception:
        # Python itself would end with 1, which means that a figure is worse.
        traceback.print_exc()
        sys.exit(3)
