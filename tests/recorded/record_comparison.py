"""Two records, compared field by field under the rules of a phase of the work.

``moves``: identical. ``merges``: what ``CHANGES.md`` names may differ, in one direction: no plan takes longer, no bound
is smaller, nothing is lost that was proven; everything else is identical. ``words``: text for people and exit codes may
differ, and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from penstock.schemas.coverage import REQUEST_SCOPE, SCHEDULE_SCOPE

Phase = Literal["moves", "merges", "words"]
Record = Mapping[str, Any]

CHANGES = Path(__file__).with_name("CHANGES.md")
MOST_NAMED = 10
"""Answers that may be named, of sixty."""
WORDS = frozenset(
    [
        "why",
        "sentence",
        "remedy",
        "detail",
        "title",
        "help",
        "cites",
        "description",
        "model",
        "assumptions",
        "exit_code",
    ]
)
"""Fields for people, and the exit codes of errors; names of planners, schedules and methods are not among them."""
TIMES = frozenset({"time_per_global_batch_ns", "iteration_ns"})
MISSING = "<missing>"
UNPROVEN = ("none_found", "time_limit")


@dataclass(frozen=True)
class Changes:
    """The phase, and the names of answers and exchanges that may differ in ``merges``."""

    phase: Phase
    named: frozenset[str]

    @classmethod
    def read(cls, text: str) -> Changes:
        """Read ``CHANGES.md``: a line ``Phase: merges``, and a line ``- `name`: reason`` for each change."""
        phases = re.findall(r"^Phase: (\w+)$", text, re.MULTILINE)
        if len(phases) != 1 or phases[0] not in get_args(Phase):
            raise ValueError(f"CHANGES.md has one line `Phase: {'|'.join(get_args(Phase))}`, not {phases}")
        return cls(phases[0], frozenset(re.findall(r"^- `([^`]+)`: \S", text, re.MULTILINE)))


class Difference(NamedTuple):
    """A leaf that differs, or that one side lacks."""

    path: tuple[str, ...]
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{'/'.join(self.path)}: {str(self.old)[:120]} -> {str(self.new)[:120]}"


def differences(old: Any, new: Any, path: tuple[str, ...] = ()) -> Iterator[Difference]:
    """Yield all leaves in which two JSON values differ; lists of other lengths differ as a whole.

    A field with None counts as absent, as in canonical JSON: a new optional field is no difference.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) is None and new.get(key) is None:
                continue
            yield from differences(old.get(key, MISSING), new.get(key, MISSING), (*path, key))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from differences(a, b, (*path, str(number)))
    elif old != new or type(old) is not type(new):
        yield Difference(path, old, new)


def faults(changes: Changes, old: Mapping[str, Record], new: Mapping[str, Record]) -> list[str]:
    """Return the differences that the phase does not allow, in sentences; ``new`` may lack some of the old names."""
    sentences = [f"{name}: not in the record" for name in sorted(new.keys() - old.keys())]
    for name in sorted(new.keys() & old.keys()):
        sentences += [f"{name}: {each}" for each in _faults_of(changes, name, old[name], new[name])]
    return sentences


def _faults_of(changes: Changes, name: str, old: Record, new: Record) -> Iterator[str]:
    if changes.phase == "merges" and name in changes.named:
        yield from worse(old, new)
        return
    for each in differences(old, new):
        if changes.phase != "words" or not WORDS.intersection(each.path):
            yield str(each)


def worse(old: Record, new: Record) -> Iterator[str]:
    """Yield how an answer or an exchange became worse; the status of an exchange is a number."""
    if isinstance(_status(old), int) and _status(old) != _status(new):
        yield f"status {_status(old)} -> {_status(new)}"
    if old.get("request_hash") != new.get("request_hash"):
        yield "the request is another one"
    for each in differences(old, new):
        if each.path[-1:] and each.path[-1] in TIMES and _is_more(each.new, each.old):
            yield f"takes longer: {each}"
    if (old.get("plan") is None) < (new.get("plan") is None):
        yield "there is no plan any more"
    if _status(old) == "optimal" != _status(new) or (_status(old) == "infeasible" and _status(new) in UNPROVEN):
        yield f"was {_status(old)}, which is not proven any more"
    yield from _smaller_bounds(old, new)


def _is_more(new: Any, old: Any) -> bool:
    return isinstance(new, int) and isinstance(old, int) and new > old


def _status(record: Record) -> Any:
    return record.get("status")


def _smaller_bounds(old: Record, new: Record) -> Iterator[str]:
    """Yield smaller bounds on every plan of the request, and on the same class of plans or the same plan."""
    same = old.get("plan") == new.get("plan")
    before, after = old.get("certificates", ()), new.get("certificates", ())
    for one in before:
        alike = [each["bound_ns"] for each in after if _covers_the_same(one, each, same)]
        if (one["scope"] == REQUEST_SCOPE or same) and not alike:
            yield f"no bound on {one['scope']} any more"
        elif alike and max(alike) < one["bound_ns"]:
            yield f"the bound on {one['scope']} is smaller: {one['bound_ns']} -> {max(alike)}"


def _covers_the_same(one: Record, other: Record, same_plan: bool) -> bool:
    """Return whether two bounds compare: on every plan always, on a schedule only for the same plan."""
    if one["scope"] != other["scope"]:
        return False
    if one["scope"] == REQUEST_SCOPE:
        return True
    return one["covers"] == other["covers"] and (same_plan or one["scope"] != SCHEDULE_SCOPE)
