"""The verdicts and the parsers of `benches/compare`, which compares the performance of two revisions."""

import os
import subprocess
import sys

import pytest

from conftest import ROOT

sys.path.insert(0, str(ROOT / "benches" / "compare"))

import builds
import compare
import figures
import verdict
from verdict import BETTER, MISSING, NEW, NONE, SAME, WORSE, Figure

LATENCY = Figure("latency", "us", "lower")
RATE = Figure("rate", "GB/s", "higher")
# The median is 100 and the spread 4 %.
QUIET = [100.0, 98.0, 102.0, 99.0, 101.0]
# The median is 100 and the spread 20 %.
NOISY = [100.0, 90.0, 110.0, 95.0, 105.0]


def judged(figure, before, after, rounds=5):
    return verdict.compare(figure, before, after, rounds).verdict


def times(factor, values=QUIET):
    return [value * factor for value in values]


@pytest.mark.parametrize("factor", [1.0, 1.04, 0.96])
@pytest.mark.parametrize("figure", [LATENCY, RATE])
def test_a_difference_within_five_percent_is_the_same(figure, factor):
    assert judged(figure, QUIET, times(factor)) == SAME


@pytest.mark.parametrize("factor", [1.15, 0.85])
@pytest.mark.parametrize("figure", [LATENCY, RATE])
def test_a_difference_within_the_spread_of_the_old_revision_is_the_same(figure, factor):
    assert judged(figure, NOISY, times(factor)) == SAME


def test_the_spread_of_the_new_revision_does_not_excuse_it():
    assert judged(LATENCY, QUIET, times(1.15, NOISY)) == WORSE


@pytest.mark.parametrize("before", [QUIET, NOISY])
@pytest.mark.parametrize(
    ("figure", "factor", "wanted"),
    [(LATENCY, 1.25, WORSE), (LATENCY, 0.75, BETTER), (RATE, 1.25, BETTER), (RATE, 0.75, WORSE)],
)
def test_a_larger_difference_is_worse_or_better_by_the_figure_s_direction(before, figure, factor, wanted):
    assert judged(figure, before, times(factor)) == wanted


def test_a_difference_just_beyond_both_limits_is_worse():
    assert judged(LATENCY, [100.0] * 5, [105.0] * 5) == SAME
    assert judged(LATENCY, [100.0] * 5, [105.1] * 5) == WORSE
    assert judged(LATENCY, NOISY, [120.0] * 5) == SAME
    assert judged(LATENCY, NOISY, [120.1] * 5) == WORSE


def test_medians_decide_and_not_single_rounds():
    assert judged(LATENCY, QUIET, [100.0, 100.0, 100.0, 900.0, 900.0]) == SAME
    row = verdict.compare(LATENCY, QUIET, times(1.5), 5)
    assert (row.before, row.after) == (100.0, 150.0)
    assert row.difference == pytest.approx(0.5)
    assert row.spread == pytest.approx(0.04)


def test_a_figure_without_all_of_its_rounds_is_missing_and_never_dropped():
    assert judged(LATENCY, QUIET, []) == MISSING
    assert judged(LATENCY, QUIET, QUIET[:4]) == MISSING
    assert judged(LATENCY, QUIET[:4], QUIET) == MISSING
    assert judged(LATENCY, [], []) == MISSING
    assert judged(LATENCY, [0.0] * 5, QUIET) == MISSING
    assert judged(LATENCY, [], QUIET) == MISSING, "the old program failed"
    assert verdict.compare(LATENCY, [], QUIET, 5, is_new=True).verdict == NEW
    assert verdict.compare(LATENCY, [], QUIET[:4], 5, is_new=True).verdict == MISSING


def test_fewer_than_five_rounds_give_no_verdict():
    assert judged(LATENCY, QUIET[:4], times(2, QUIET[:4]), rounds=4) == NONE


def test_the_exit_status_tells_worse_from_not_compared():
    def status(*verdicts, **options):
        rows = [verdict.Row(LATENCY, 1.0, 1.0, 0.0, 0.0, one) for one in verdicts]
        return verdict.exit_status(rows, **options)

    assert status(SAME, BETTER) == 0
    assert status(SAME, WORSE) == 1
    assert status(WORSE, MISSING) == 2
    assert status(SAME, NONE) == 2
    assert status(SAME, NEW) == 2, "a renamed program looks like a new one"
    assert status(SAME, NEW, allow_new=True) == 0
    assert status(WORSE, NEW, allow_new=True) == 1


def test_an_unexpected_error_is_not_taken_for_a_worse_figure(tmp_path):
    # A folder for the builds cannot be made below a file.
    (tmp_path / "file").touch()
    done = subprocess.run(
        [ROOT / "benches" / "compare" / "run", "HEAD"],
        env={**os.environ, "CARGO_TARGET_DIR": str(tmp_path / "file")},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, "NotADirectoryError" in done.stderr) == (3, True)


def test_the_kvasir_of_users_is_built_last_and_without_examples():
    programs = [figures.KVASIR, figures.STORE_SIDE, figures.FRONT_DOOR]
    assert builds.steps(programs) == [
        ("bench", [figures.FRONT_DOOR]),
        ("release", [figures.STORE_SIDE]),
        ("release", [figures.KVASIR]),
    ]
    assert builds.steps([figures.KVASIR]) == [("release", [figures.KVASIR])]


def test_the_report_says_how_many_figures_are_too_noisy_to_judge():
    noisy = [100.0, 80.0, 120.0, 90.0, 110.0]
    assert compare.noise([verdict.compare(LATENCY, QUIET, QUIET, 5)]) == ""
    rows = [verdict.compare(LATENCY, values, values, 5) for values in (QUIET, noisy)]
    assert "1 of 2 figures have a spread above 20%" in compare.noise(rows)


def test_the_table_has_a_row_for_every_figure():
    rows = [
        verdict.compare(LATENCY, QUIET, times(1.5), 5),
        verdict.compare(RATE, [], [12_345.6] * 5, 5, is_new=True),
        verdict.compare(RATE, QUIET, [], 5),
    ]
    assert verdict.table(rows).splitlines()[2:] == [
        "| latency | us | lower | 100 | 150 | +50.0 % | 4.0 % | worse |",
        "| rate | GB/s | higher | - | 12,346 | - | - | new |",
        "| rate | GB/s | higher | 100 | - | - | 4.0 % | missing |",
    ]


PLACE = """\
| decision | p50 us | p99 us |
| --- | ---: | ---: |
| placed | 9.61 | 10.90 |
| refused: no room | 11.62 | 13.01 |

| policy | match p50 us | p99 | match and placement p50 us | p99 |
| --- | ---: | ---: | ---: | ---: |
| global | 0.80 | 2.50 | 6.70 | 9.00 |
| kvasir | 0.81 | 2.51 | 7.32 | 10.10 |
| kvasir, all do both | 0.85 | 2.70 | 14.71 | 19.30 |
"""

FRONT_DOOR = """\
250 streams, 20 tokens/s each, 6 s

| | number | p50 us | p90 us | p99 us |
| --- | ---: | ---: | ---: | ---: |
| token, the server alone | 30000 | 90 | 186 | 303 |
| token, behind the front door | 30000 | 186 | 430 | 885 |
| token, added | | 96 | 244 | 582 |
| request, the server alone | 300 | 70 | 90 | 120 |
| request, behind the front door | 300 | 1140 | 1390 | 1783 |
| request, added | | 1070 | 1300 | 1663 |

5000 tokens/s; the conductor used 17 % of a core, 32.8 us a token
"""

ROUND_TRIP = """\
16 query rows of 576 values in bf16
without attention: p50 10.9 us, p90 11.5 us, p99 15.0 us
over 64 rows: p50 33.0 us, p90 34.1 us, p99 40.2 us
"""


def test_the_output_of_each_benchmark_is_understood():
    assert list(figures.parse_place(PLACE).values()) == [9.61, 11.62, 7.32]
    assert list(figures.parse_front_door(FRONT_DOOR).values()) == [186.0, 1140.0, 32.8]
    assert list(figures.parse_round_trip(16, ROUND_TRIP).values()) == [10.9, 33.0]
    line = "| 1024 | 71.0 | 0.50 | 1.31 | 0.65 | 0.997 |"
    assert list(figures.parse_push_overlap(line).values()) == [71.0, 0.5]
    for other in ("", "### shm, nothing beside", "| tokens | prefill ms | left ms |", "| --- | --- | --- |"):
        assert figures.parse_push_overlap(other) == {}


def test_output_that_is_not_understood_is_an_error():
    for parse in (figures.parse_place, figures.parse_front_door, lambda output: figures.parse_round_trip(1, output)):
        with pytest.raises(figures.RunError):
            parse("| something | else |\n")


def test_a_rate_is_that_of_the_median_call():
    point = figures.STORE_POINTS[figures.PUT]
    assert figures.summarize(figures.PUT, point, [1.0, 1000.0, 2000.0]) == pytest.approx(32 * 0.131072)
    assert figures.summarize(figures.GET, figures.STORE_POINTS[figures.GET], [1.0, 2.0, 9.0]) == 2.0


def test_every_figure_belongs_to_one_group_and_has_a_name_of_its_own():
    named = [figure.name for group in figures.GROUPS for figure in group.figures]
    assert len(named) == len(set(named))
    assert {figure for group in figures.GROUPS for figure in group.figures} >= set(figures.STORE_POINTS)


def test_a_program_that_a_revision_lacks_gives_no_figure_and_is_named(capsys):
    build = builds.Build(builds.Revision("abc", "abc", "def"), ROOT, {})
    group = figures.GROUPS[0]
    assert compare.run(group, build) == {}
    assert "abc has no place" in capsys.readouterr().err
    assert compare.absent(group, build) == ["place"]


@pytest.mark.parametrize("failure", [figures.RunError("x"), BrokenPipeError(), KeyError("wrong"), ValueError("no JSON")])
def test_a_program_that_fails_gives_no_figure_and_is_named(capsys, failure):
    def measure(_):
        raise failure

    build = builds.Build(builds.Revision("abc", "abc", "def"), ROOT, {})
    assert compare.run(figures.Group("place", [], [LATENCY], measure), build) == {}
    assert "abc: place" in capsys.readouterr().err


def test_a_value_that_is_no_number_is_left_out():
    build = builds.Build(builds.Revision("abc", "abc", "def"), ROOT, {})
    group = figures.Group("place", [], [LATENCY], lambda _: {LATENCY: figures.parsed("nan"), RATE: figures.parsed("1,000")})
    assert compare.run(group, build) == {RATE: 1000.0}


def test_a_working_tree_is_resolved_with_its_untracked_files_and_its_index_does_not_change(tmp_path):
    def git(*arguments):
        names = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *names, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "--quiet")
    (tmp_path / "kept").write_text("1")
    (tmp_path / ".gitignore").write_text("ignored\n")
    git("add", "--all")
    git("commit", "--quiet", "--message", "first")
    head = git("rev-parse", "HEAD").strip()
    clean = builds.resolve(tmp_path, None)
    assert (clean.label, clean) == (head[:12], builds.resolve(tmp_path, "HEAD"))

    (tmp_path / "kept").write_text("2")
    (tmp_path / "new").write_text("3")
    (tmp_path / "ignored").write_text("4")
    status = git("status", "--porcelain")
    dirty = builds.resolve(tmp_path, None)
    assert dirty.folder == "working-tree"
    assert git("status", "--porcelain") == status
    folder = tmp_path / "ignored-too"
    tree = builds.check_out(tmp_path, folder, dirty.tree)
    assert sorted(path.name for path in tree.iterdir()) == [".gitignore", "kept", "new"]

    untouched = (tree / "new").stat().st_mtime_ns
    (tree / "kept").write_text("damaged")
    tree = builds.check_out(tmp_path, folder, dirty.tree)
    assert (tree / "kept").read_text() == "2"
    assert (tree / "new").stat().st_mtime_ns == untouched
    tree = builds.check_out(tmp_path, folder, clean.tree)
    assert (tree / "kept").read_text() == "1"
    assert not (tree / "new").exists()

    with pytest.raises(builds.BuildError):
        builds.resolve(tmp_path, "no-such-revision")
