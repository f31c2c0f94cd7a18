"""Small changes of the agent's state: replacing a record, queueing an event."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.executor.node.agent_state import Record, State, Suspect
from penstock.schemas.api.agents import Assignment, EventKind


def put(state: State, record: Record) -> State:
    """Return the state with this record of its run."""
    return replace(state, runs=dict(state.runs) | {record.assignment.run: record})


def change(state: State, run: str, **changes: Any) -> State:
    """Return the state with changes in the record of ``run``."""
    return put(state, replace(state.runs[run], **changes))


def queue_event(state: State, kind: EventKind, run: str, **data: Any) -> State:
    """Return the state with an event of the present generation of ``run`` in the outbox."""
    return replace(state, outbox=state.outbox.add(kind, run, state.runs[run].generation, data))


def report_failure(state: State, run: str, culprit: Suspect) -> State:
    """Return the state with the failure of a rank in the outbox."""
    code = culprit.code
    return queue_event(
        state,
        "rank_failed",
        run,
        rank=culprit.rank,
        reason=culprit.reason,
        instruction=culprit.instruction,
        signal=-code if code is not None and code < 0 else None,
        exit_code=code if code is not None and code >= 0 else None,
        last_lines=list(culprit.last_lines),
        is_final=culprit.is_final,
    )


def first_rank(assignment: Assignment) -> int:
    """Return the lowest rank of an assignment, which is named where all are meant."""
    return min((one.rank for one in assignment.ranks), default=0)
