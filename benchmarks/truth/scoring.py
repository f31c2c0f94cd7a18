"""Scores of predictions: signed error, share inside the stated error, order inside groups, regret beside simple rules.

The regret of a choice is the measured time of the layout that it picks in a group, over the best one's, less 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from math import nan
from statistics import fmean, median, quantiles
from typing import Any, NamedTuple

from truth.predicting import Predicted
from truth.rows import PublishedLayout, PublishedStep, grouped

APART = 0.05
"""Pairs of a group that differ by less in measured time have no order."""

RULES: dict[str, Callable[[PublishedLayout], Any]] = {
    "least tensor degree, fewest stages, largest micro-batch": lambda one: (
        one.tensor * one.context, one.pipeline, -one.micro_batch
    ),
    "largest micro-batch, least tensor degree, fewest stages": lambda one: (
        -one.micro_batch, one.tensor * one.context, one.pipeline
    ),
    "fewest stages, least tensor degree, largest micro-batch": lambda one: (
        one.pipeline, one.tensor * one.context, -one.micro_batch
    ),
    "smallest micro-batch, least tensor degree, fewest stages": lambda one: (
        one.micro_batch, one.tensor * one.context, one.pipeline
    ),
}  # fmt: skip
"""Rules of thumb that pick a layout: the one with the least rank."""


class Regrets(NamedTuple):
    """The regrets of a way to choose over groups: their number, mean and 95th percentile."""

    groups: int
    mean: float
    high: float

    @classmethod
    def of(cls, each: Sequence[float]) -> Regrets:
        """Return the figures of the regrets of groups; of one group, its regret alone."""
        high = quantiles(each, n=20, method="inclusive")[-1] if len(each) > 1 else each[0]
        return cls(len(each), fmean(each), high)


class Scores(NamedTuple):
    """Figures of predictions that belong together; errors are of the timed rows, and nan without any."""

    rows: int
    timed: int
    signed: float
    size: float
    worst: float
    inside: int
    stated: float
    pairs: int
    right: int
    lacking: int
    """Rows that are said not to fit, though they ran."""


def scored(rows: Sequence[Predicted]) -> Scores:
    """Return the scores of some predictions; ``signed`` and ``size`` are medians."""
    timed = [row for row in rows if row.row.is_timed]
    errors = [row.error for row in timed] or [nan]
    right = [_is_right(one, other) for one, other in _pairs(rows)]
    return Scores(
        len(rows),
        len(timed),
        median(errors),
        median(map(abs, errors)),
        max(errors, key=abs),
        sum(row.is_inside for row in timed),
        median(row.expected_error for row in rows),
        len(right),
        sum(right),
        sum(row.missing_bytes > 0 for row in rows),
    )


def _pairs(rows: Iterable[Predicted]) -> Iterable[tuple[Predicted, Predicted]]:
    """Yield the pairs of rows of a group whose measured times are apart."""
    for group in grouped(rows, lambda row: row.row.group).values():
        for one, other in combinations(group, 2):
            if max(one.row.seconds, other.row.seconds) > (1 + APART) * min(one.row.seconds, other.row.seconds):
                yield one, other


def _is_right(one: Predicted, other: Predicted) -> bool:
    return (one.seconds < other.seconds) == (one.row.seconds < other.row.seconds)


def regrets(rows: Iterable[Predicted]) -> tuple[Regrets, dict[str, Regrets]] | None:
    """Return the regrets of the predictions' choice and of each rule; None where no group has two layouts."""
    groups = grouped(rows, lambda row: row.row.group).values()
    several = [group for group in groups if len({row.row.layout for row in group}) > 1]
    if not several:
        return None

    def of(rank: Callable[[Predicted], Any]) -> Regrets:
        return Regrets.of([regret_of([row.row for row in group], min(group, key=rank).row.layout) for group in several])

    return of(lambda row: row.seconds), {
        name: of(lambda row, rule=rule: rule(row.row.layout))
        for name, rule in RULES.items()  # type: ignore[misc]
    }


def regret_of(group: Sequence[PublishedStep], layout: PublishedLayout) -> float:
    """Return the regret of choosing a layout in a group of measured rows. Raises KeyError for one that none has."""
    seconds = {row.layout: row.seconds for row in group}
    return seconds[layout] / min(seconds.values()) - 1
