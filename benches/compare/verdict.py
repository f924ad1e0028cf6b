"""Decides for each figure whether the newer revision is worse, and prints the table."""

import statistics
from dataclasses import dataclass

# A smaller difference of the medians is never worse or better.
TOLERANCE = 0.05

SAME, BETTER, WORSE = "same", "better", "worse"
# The older revision has no program that measures the figure.
NEW = "new"
# Fewer rounds than a verdict needs.
NONE = "-"
ROUNDS_MIN = 5
# A revision lacks the figure in some round, or the newer one lacks it altogether.
MISSING = "missing"


@dataclass(frozen=True)
class Figure:
    """One measured number: its name, its unit, and whether a lower or a higher one is better."""

    name: str
    unit: str
    better: str


@dataclass(frozen=True)
class Row:
    """One figure of both revisions. A number is None where there is no value to compute it from."""

    figure: Figure
    before: float | None
    after: float | None
    # (after - before) / before.
    difference: float | None
    # (largest - smallest) / median of the older revision's rounds.
    spread: float | None
    verdict: str


def compare(figure, before, after, rounds, is_new=False):
    """The row of a figure, from the values of each revision's rounds. `is_new`: the older revision has no program for it."""
    old, new = (statistics.median(values) if values else None for values in (before, after))
    spread = (max(before) - min(before)) / old if old else None
    difference = (new - old) / old if old and new is not None else None
    if is_new and len(after) == rounds:
        verdict = NEW
    elif len(before) < rounds or len(after) < rounds or difference is None:
        verdict = MISSING
    elif rounds < ROUNDS_MIN:
        verdict = NONE
    elif abs(difference) <= max(TOLERANCE, spread):
        verdict = SAME
    else:
        verdict = BETTER if (difference < 0) == (figure.better == "lower") else WORSE
    return Row(figure, old, new, difference, spread, verdict)


def exit_status(rows, allow_new=False):
    """0 if no figure is worse, 1 if one is, 2 if one was not compared."""
    verdicts = {row.verdict for row in rows}
    if verdicts & {MISSING, NONE} or NEW in verdicts and not allow_new:
        return 2
    return 1 if WORSE in verdicts else 0


def table(rows):
    """The rows as Markdown."""
    lines = [
        "| figure | unit | better | before | after | difference | spread of before | verdict |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        figure = row.figure
        cells = [figure.name, figure.unit, figure.better, number(row.before), number(row.after)]
        cells += [percent(row.difference, "+.1%"), percent(row.spread, ".1%"), row.verdict]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def number(value):
    return "-" if value is None else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def percent(value, form):
    return "-" if value is None else format(value, form).replace("%", " %")
