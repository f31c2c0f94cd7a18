"""Coverage: the class of plans that a proven bound holds for, as predicates on the features of a plan.

A class is a set of allowed values for each feature. Every feature has a neutral value, and a class that does not name a
feature allows its neutral value only: a feature that is added later makes no bound false that was proven before.
A single plan is the class of the plans with its own features, so that "the bound covers the plan", "one bound covers
more than another" and "the bound covers everything that a request allows" are one comparison, ``<=``.
The sentences that people read about bounds are made here and nowhere else. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Final, Literal

Values = frozenset[str]
Ranges = tuple[tuple[int, int], ...]
"""Disjoint ranges of whole numbers in rising order, both ends included."""

Scope = Literal["schedule of this allocation", "some plans of this request", "all plans of this request"]

SCHEDULE_SCOPE: Final = "schedule of this allocation"
CLASS_SCOPE: Final = "some plans of this request"
REQUEST_SCOPE: Final = "all plans of this request"

EVEN: Final = "equally many samples on"
"""Beginning of the words about a GPU group that has several meshes, in the name of its degrees."""

OVER_ALL: Final = "over all GPUs alike"
"""End of the name of a choice that shards one stage over all GPUs, with equally many samples on each mesh."""

DOMAINS: Final[dict[str, tuple[str, ...]]] = {
    "pipelines": ("one", "several"),
    "devices": ("one_stage", "several_stages"),
    "dispatch": ("rows", "round_robin"),
    "backward": ("whole", "split"),
    "recompute": ("none", "stage", "segments"),
    "recompute_modules": ("none", "some"),
    "recompute_runs": ("in_backward", "apart"),
    "codecs": ("none", "fp16s"),
    "update_rule": ("synchronous", "weight_stashing", "double_buffered", "double_grouped", "elastic_averaging"),
    "all_reduce": ("overlapped", "after_backward"),
    "replica_order": ("cluster", "other"),
    "memory": ("fits", "exceeds"),
    "pins": ("kept", "broken"),
}
"""The values of each closed feature, the neutral one first."""


def _every(feature: str) -> Values:
    return frozenset(DOMAINS[feature])


@dataclass(frozen=True, slots=True)
class Covers:
    """A class of plans: the values that each feature may take.

    ``pipelines``: one, or several that share a step. ``devices``: whether each holds one stage or may hold several.
    ``dispatch``: replicas share micro-batches by rows or take whole ones in turn. ``backward``: whole, or split into
    input and weight gradients. ``recompute``: what stages recompute: nothing, the whole stage, or parts of it (a plan
    may show several of these values). ``recompute_modules``: whether any of them recomputes single modules of its
    layers. ``recompute_runs``: inside the backward or as an operation apart. ``all_reduce``:
    overlapped with the last backward, or after it. ``replica_order``: replicas in the cluster's order of devices.
    ``memory``: the plan fits into memory or exceeds it. ``pins``: it keeps the request's pins, or breaks one.
    ``trainer``: the target whose limits the plan keeps. ``degrees``: the degrees of parallelism, and what replicas
    share out, where the request makes them a choice. ``order``: names of schedules. ``micro_batches``: the number
    of micro-batches of a step.

    In ``trainer``, ``degrees``, ``order`` and ``micro_batches``, whose values cannot be listed, None means any value.
    """

    pipelines: Values = frozenset({"one"})
    devices: Values = frozenset({"one_stage"})
    dispatch: Values = frozenset({"rows"})
    backward: Values = frozenset({"whole"})
    recompute: Values = frozenset({"none"})
    recompute_modules: Values = frozenset({"none"})
    recompute_runs: Values = frozenset({"in_backward"})
    codecs: Values = frozenset({"none"})
    update_rule: Values = frozenset({"synchronous"})
    all_reduce: Values = frozenset({"overlapped"})
    replica_order: Values = frozenset({"cluster"})
    memory: Values = frozenset({"fits"})
    pins: Values = frozenset({"kept"})
    trainer: Values | None = frozenset({"none"})
    degrees: Values | None = frozenset({"1"})
    order: Values | None = frozenset({"early-backward"})
    micro_batches: Ranges | None = ((1, 1),)

    def __post_init__(self) -> None:
        for name, domain in DOMAINS.items():
            unknown = getattr(self, name) - frozenset(domain)
            if unknown:
                raise ValueError(f"{name} has no value {sorted(unknown)[0]!r}; it has {', '.join(domain)}")

    def __le__(self, other: Covers) -> bool:
        """Return whether every plan of this class is also in the other class."""
        closed = all(getattr(self, name) <= getattr(other, name) for name in DOMAINS)
        return (
            closed
            and _within(self.trainer, other.trainer)
            and _within(self.degrees, other.degrees)
            and _within(self.order, other.order)
            and _numbers_within(self.micro_batches, other.micro_batches)
        )


FEATURES: Final = tuple(field.name for field in fields(Covers))
NEUTRAL: Final = Covers()
"""The class that names no feature."""
EVERY_PLAN: Final = Covers(**{name: _every(name) for name in DOMAINS}, trainer=None, order=None, micro_batches=None)
"""The class of all plans at degrees of 1 that have no features but the ones listed here."""


def every(*features: str) -> dict[str, Values]:
    """Return all values of some closed features, as keyword arguments of ``Covers``."""
    return {name: _every(name) for name in features}


def ranges_of(numbers: Iterable[int]) -> Ranges:
    """Return numbers as disjoint ranges."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = ranges[-1][0], number
        else:
            ranges.append((number, number))
    return tuple(ranges)


def _within(inner: Values | None, outer: Values | None) -> bool:
    return outer is None or (inner is not None and inner <= outer)


def _numbers_within(inner: Ranges | None, outer: Ranges | None) -> bool:
    if outer is None or inner is None:
        return outer is None
    return all(any(low <= first and last <= high for low, high in outer) for first, last in inner)


# ---- in words --------------------------------------------------------------------------------------------------------

_PHRASES: Final[dict[str, dict[frozenset[str], str]]] = {
    "devices": {frozenset({"one_stage"}): "one stage per device"},
    "dispatch": {frozenset({"rows"}): "replicas by rows"},
    "backward": {frozenset({"whole"}): "whole backwards", frozenset({"split"}): "split backwards"},
    "recompute": {
        frozenset({"none"}): "no recomputation",
        frozenset({"stage"}): "every stage recomputing",
        frozenset({"none", "stage"}): "each stage recomputing whole or not at all",
    },
    "recompute_modules": {frozenset({"some"}): "recomputation of modules"},
    "recompute_runs": {
        frozenset({"in_backward"}): "recomputation inside the backwards",
        frozenset({"apart"}): "recomputation apart from the backwards",
    },
    "codecs": {frozenset({"none"}): "nothing encoded", frozenset({"fp16s"}): "encoded tensors"},
    "all_reduce": {
        frozenset({"overlapped"}): "overlapped all-reduce",
        frozenset({"after_backward"}): "all-reduce after the last backward",
    },
    "replica_order": {frozenset({"cluster"}): "replicas in the order of the cluster"},
}


def describe(covers: Covers) -> str:
    """Return the class as a phrase that follows "plan": ``of one pipeline, whole backwards, synchronous updates``.

    Empty for the class of every plan. The phrase names every feature that is restricted, with three exceptions:
    ``memory`` and ``pins``, since plans of a request fit and keep them, the place of recomputation where nothing is
    recomputed, and modules where no module is recomputed by itself, since recomputation then means whole layers.
    """
    parts = []
    if covers.degrees is not None and covers.degrees != NEUTRAL.degrees:
        parts.append(f"at {_listed(covers.degrees)}")
    if covers.pipelines != _every("pipelines"):
        parts.append("of one pipeline" if covers.pipelines == {"one"} else "of several pipelines")
    if covers.trainer is not None and covers.trainer != {"none"}:
        parts.append(f"within the limits of {_listed(covers.trainer)}")
    for name, phrases in _PHRASES.items():
        values = getattr(covers, name)
        nothing_again = name == "recompute_runs" and covers.recompute == covers.recompute_modules == {"none"}
        no_modules = name == "recompute_modules" and values == {"none"}
        if values != _every(name) and not nothing_again and not no_modules:
            parts.append(phrases.get(values) or f"{name.replace('_', ' ')} {_listed(values)}")
    if covers.update_rule != _every("update_rule"):
        parts.append(f"{_listed(covers.update_rule)} updates")
    if covers.order is not None:
        parts.append(f"in the order {_listed(covers.order)}")
    if covers.micro_batches is not None:
        numbers = [str(a) if a == b else f"{a}–{b}" for a, b in covers.micro_batches]
        parts.append(f"{', '.join(numbers)} micro-batch{'' if covers.micro_batches == ((1, 1),) else 'es'}")
    return ", ".join(parts)


def _listed(values: Iterable[str]) -> str:
    return " or ".join(sorted(value.replace("_", " ") for value in values))


def model_of(scope: Scope, covers: Covers) -> str:
    """Return which plans a bound covers, in the words of certificates.

    Stored ones are refused where these words change.
    """
    if scope == REQUEST_SCOPE:
        return f"every plan of this request{_evenly(covers)}"
    if scope == SCHEDULE_SCOPE:
        return ", ".join(("this allocation, any order of its operations", *_operations(covers)))
    return f"plans {describe(covers)}"


def claim(scope: Scope, covers: Covers) -> str:
    """Return the subject of the sentence about a bound; ``takes less than`` and the time follow it.

    It is ``No plan of this request`` where the bound covers every plan that the request allows, with equally many
    samples on all meshes of a GPU group. For any other bound it names the plans that the bound covers.
    """
    if scope == REQUEST_SCOPE:
        return f"No plan of this request{_evenly(covers)}"
    if scope == SCHEDULE_SCOPE:
        kinds = ", ".join(_operations(covers))
        return f"No order of this allocation's operations{f' ({kinds})' if kinds else ''}"
    return f"No plan {describe(covers)}"


def _evenly(covers: Covers) -> str:
    """Return the phrase for what a bound on all plans assumes about some of them."""
    words = {EVEN: f" with {EVEN} all meshes of a cell", OVER_ALL: f" that shards gradients {OVER_ALL} or not at all"}
    return "".join(words[limit] for limit in limits_of(covers))


def limits_of(covers: Covers) -> list[str]:
    """Return which of ``EVEN`` and ``OVER_ALL`` holds for some of the plans that a bound covers."""
    return [limit for limit in (EVEN, OVER_ALL) if any(limit in each for each in covers.degrees or ())]


def _operations(covers: Covers) -> list[str]:
    """Return the kinds of operations of an allocation's orders, other than forwards and whole backwards."""
    phrases = []
    if covers.update_rule <= PERIODIC:
        phrases.append("as many micro-batches in flight, without a flush")
    if covers.backward == {"split"}:
        phrases.append("split backwards")
    if covers.recompute_runs == {"apart"}:
        phrases.append("recomputation apart from the backwards")
    return phrases


PERIODIC: Final = frozenset({"weight_stashing", "double_buffered", "double_grouped"})
"""Update rules without a flush."""
