"""Events to be sent to the service: numbered when created, kept until acknowledged, progress combined.

The service may be away for hours while ranks train. Single events (prepared, failed, done, a trace) are kept as they
are. The steps of a rank are combined into one event while an earlier event of the same rank is being sent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from penstock.schemas.api.agents import AgentEvent, EventKind

GATHERED = 500
"""The most steps in one event."""


class RankKey(NamedTuple):
    """A rank of one generation of a run."""

    run: str
    generation: int
    rank: int


@dataclass(frozen=True, slots=True)
class Outbox:
    """The events to send. ``events``: numbered, not acknowledged. ``waiting``: steps of each rank, not yet numbered."""

    events: tuple[AgentEvent, ...] = ()
    waiting: Mapping[RankKey, dict[str, Any]] = field(default_factory=dict)
    next_sequence: int = 1

    def add(self, kind: EventKind, run: str, generation: int, data: Mapping[str, Any]) -> Outbox:
        """Return the outbox with one more event, after progress that must be read before it."""
        box = self
        if kind in ("rank_done", "rank_failed", "stopped"):
            only = data["rank"] if kind == "rank_done" else None
            for key in [key for key in self.waiting if key.run == run and only in (None, key.rank)]:
                box = box._number_progress(key)
        return box._append(kind, run, generation, data)

    def add_step(self, key: RankKey, step: int, loss: float | str | None, time_ns: int | None) -> Outbox:
        """Return the outbox with one more step of a rank."""
        box, before = self, self.waiting.get(key)
        if before is not None and (step != before["step"] + len(before["losses"]) or len(before["losses"]) >= GATHERED):
            box, before = self._number_progress(key), None
        gathered = before or {"rank": key.rank, "step": step, "losses": (), "times_ns": ()}
        data = gathered | {"losses": (*gathered["losses"], loss), "times_ns": (*gathered["times_ns"], time_ns)}
        return replace(box, waiting=dict(box.waiting) | {key: data})

    def acknowledge(self, sequence: int) -> Outbox:
        """Return the outbox without the events up to ``sequence``."""
        return replace(self, events=tuple(event for event in self.events if event.sequence > sequence))

    def take(self, max_bytes: int) -> tuple[Outbox, tuple[AgentEvent, ...]]:
        """Return the events to send now, oldest first, of about ``max_bytes``, at least one if there is any."""
        box, sent = self, {_key(event) for event in self.events if event.kind == "progress"}
        for key in [key for key in self.waiting if key not in sent]:
            box = box._number_progress(key)
        chosen: list[AgentEvent] = []
        size = 0
        for event in box.events:
            size += len(json.dumps(event.data))
            if chosen and size > max_bytes:
                break
            chosen.append(event)
        return box, tuple(chosen)

    def __bool__(self) -> bool:
        return bool(self.events or self.waiting)

    def _number_progress(self, key: RankKey) -> Outbox:
        rest = {other: data for other, data in self.waiting.items() if other != key}
        return replace(self, waiting=rest)._append("progress", key.run, key.generation, self.waiting[key])

    def _append(self, kind: EventKind, run: str, generation: int, data: Mapping[str, Any]) -> Outbox:
        event = AgentEvent(sequence=self.next_sequence, kind=kind, run=run, generation=generation, data=dict(data))
        return replace(self, events=(*self.events, event), next_sequence=self.next_sequence + 1)


def _key(event: AgentEvent) -> RankKey:
    return RankKey(event.run, event.generation, event.data["rank"])
