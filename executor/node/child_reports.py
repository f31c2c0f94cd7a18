"""The agent's reaction to messages and exits of its children (part of the state machine of `state`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from penstock.executor.node.agent_state import ASKED_TO_END, Phase, Record, State, Suspect
from penstock.executor.node.assignments import start_if_prepared, stopped
from penstock.executor.node.changes import change, first_rank, queue_event, report_failure
from penstock.executor.node.outbox import RankKey
from penstock.executor.node.stimuli import STORE, Action, ChildMessage, Exited, SetTimer, Stop
from penstock.executor.program.mark import where
from penstock.schemas.api.agents import Checkpointed, Climbed, Evaluated, RankDone, StepReported, Traced, Warned
from penstock.schemas.document import faults_of
from penstock.schemas.errors import ModelMismatch, NonfiniteLoss
from penstock.schemas.quantities import spell

EXIT_GRACE_NS = 3_000_000_000
"""The time that a rank has to exit after an error: its exit code and last lines are reported with the error."""
PEER_LOST_GRACE_NS = 700_000_000
"""The delay of the report of a rank that lost a peer: the peer's error is reported instead if it arrives."""
PEER_ELSEWHERE_GRACE_NS = 2 * EXIT_GRACE_NS
"""The same delay where the peer may be another agent's, whose report within `EXIT_GRACE_NS` then comes first."""
_FINAL = (NonfiniteLoss.__name__, ModelMismatch.__name__)
"""Errors of ranks that would occur again after the same steps."""


def on_message(state: State, report: ChildMessage, actions: list[Action]) -> State:
    """Handle a message of a child of the present generation."""
    record = state.current(report.run, report.generation)
    if record is None or report.process not in record.alive or record.phase is Phase.STOPPED:
        return state
    kind, message = report.message.get("kind"), report.message
    if record.phase is Phase.STOPPING and kind != "checkpoint":
        return state
    match report.process.kind, kind:
        case "check", "refused" if record.phase is Phase.CHECKING:
            return _refuse(state, report.run, str(message.get("reason")), actions)
        case "check", "ready" if record.phase is Phase.CHECKING:
            state = queue_event(
                change(state, report.run, phase=Phase.PREPARED, is_checked=True), "prepared", report.run
            )
            return start_if_prepared(state, report.run, actions)
        case "store", "ready" if record.store_address is None and record.phase in (Phase.CHECKING, Phase.PREPARED):
            address = str(message["address"])
            state = queue_event(
                change(state, report.run, store_address=address), "store_ready", report.run, address=address
            )
            return start_if_prepared(state, report.run, actions)
        case "rank", _ if record.phase in (Phase.RUNNING, Phase.STOPPING):
            return _on_rank_message(state, record, report.run, report.process.rank, message, actions)
        case _:
            return state


def _on_rank_message(
    state: State, record: Record, run: str, rank: int, message: Mapping[str, Any], actions: list[Action]
) -> State:
    try:
        return _take_rank_message(state, record, run, rank, message, actions)
    except ValidationError as error:
        fault = faults_of(error.errors())[0]
        reason = f"rank {rank} reported a {message['kind']!r} that is not valid: {fault.pointer}: {fault.detail}"
        state = change(state, run, suspects=(Suspect(rank, reason, None), *record.suspects))
        return blame(state, run, actions)


def _take_rank_message(
    state: State, record: Record, run: str, rank: int, message: Mapping[str, Any], actions: list[Action]
) -> State:
    match message.get("kind"):
        case "ready":
            state = change(state, run, ready=record.ready | {rank})
            ranks = sorted(one.rank for one in record.assignment.ranks)
            if rank not in record.ready and set(ranks) == state.runs[run].ready:
                state = queue_event(state, "started", run, ranks=ranks)
            return state
        case "step":
            reported = StepReported.model_validate({**message, "loss": _spelled(message.get("loss"))})
            if reported.step == 0 and reported.time_ns is not None:
                state = change(state, run, first_times_ns=dict(record.first_times_ns) | {rank: reported.time_ns})
            key = RankKey(run, record.generation, rank)
            return replace(state, outbox=state.outbox.add_step(key, reported.step, reported.loss, reported.time_ns))
        case "trace":
            trace = Traced.model_validate(message)
            return queue_event(state, "trace", run, **trace.model_dump(mode="json"))
        case "checkpoint" | "resumed" as kind:
            return queue_event(state, kind, run, **Checkpointed.model_validate(message).model_dump())
        case "evaluation":
            evaluated = Evaluated.model_validate({**message, "loss": _spelled(message.get("loss"))})
            return queue_event(state, "evaluation", run, **evaluated.model_dump())
        case "rung":
            return queue_event(state, "rung", run, **Climbed.model_validate(message).model_dump())
        case "warning":
            return queue_event(state, "warning", run, **Warned.model_validate({**message, "rank": rank}).model_dump())
        case "done" if rank not in record.done:
            done = _rank_done(record, rank, message)
            state = change(state, run, done=record.done | {rank})
            return queue_event(state, "rank_done", run, **done.model_dump(mode="json"))
        case "left" if rank not in record.done:
            reason = f"rank {rank} ended after {message.get('step')} steps: a rank of the run {ASKED_TO_END}"
            return change(state, run, suspects=(*record.suspects, Suspect(rank, reason, None)))
        case "failed" if rank not in record.done:
            at = where(message.get("step"), message.get("index"), message.get("instruction"))
            lines = tuple(map(str, message.get("traceback") or ()))
            is_final = message.get("error") in _FINAL
            suspect = Suspect(rank, str(message.get("reason")), at, last_lines=lines, is_final=is_final)
            delay_ns = EXIT_GRACE_NS if suspect.is_root_cause else _peer_lost_grace_ns(record)
            actions.append(SetTimer(run, record.generation, delay_ns))
            return change(state, run, suspects=(*record.suspects, suspect))
        case _:
            return state


def _rank_done(record: Record, rank: int, message: Mapping[str, Any]) -> RankDone:
    """Build the final report of a rank. It omits warm-up times; the service needs the times of all steps, or none."""
    times, warmup = message.get("step_times_ns"), message.get("warmup_steps", 0)
    if warmup == 1 and rank in record.first_times_ns:
        times = [record.first_times_ns[rank], *(times or ())]
    elif warmup:
        times = None
    losses = tuple(map(_spelled, message.get("losses") or ()))
    return RankDone.model_validate({**message, "rank": rank, "step_times_ns": times, "losses": losses})


def _spelled(loss: float | None) -> float | str | None:
    return None if loss is None else spell(loss)


def on_exit(state: State, gone: Exited, actions: list[Action]) -> State:
    """Handle the exit of a child of the present generation."""
    record = state.current(gone.run, gone.generation)
    if record is None or gone.process not in record.alive:
        return state
    state = change(state, gone.run, alive=record.alive - {gone.process})
    left = state.runs[gone.run].alive
    match record.phase:
        case Phase.STOPPING:
            if left == {STORE}:
                actions.append(Stop(gone.run, gone.generation))
            return state if left else stopped(state, gone.run, actions)
        case Phase.CHECKING | Phase.PREPARED if gone.process == STORE:
            return _refuse(state, gone.run, f"the store ended: {gone.how}", actions)
        case Phase.CHECKING:
            return _refuse(state, gone.run, f"the model could not be checked: {gone.how}", actions)
        case Phase.RUNNING if gone.process == STORE:
            lost = Suspect(first_rank(record.assignment), f"the store ended: {gone.how}", None, gone.code)
            return blame(change(state, gone.run, suspects=(lost, *record.suspects)), gone.run, actions)
        case Phase.RUNNING if gone.process.kind == "rank":
            return _on_rank_exit(state, gone, actions)
        case _:
            return state


def _on_rank_exit(state: State, gone: Exited, actions: list[Action]) -> State:
    record = state.runs[gone.run]
    rank = gone.process.rank
    if rank in record.done:
        over = record.done == {one.rank for one in record.assignment.ranks}
        over = over and not any(process.kind == "rank" for process in record.alive)
        return change(state, gone.run, phase=Phase.DONE) if over else state
    existing = next((one for one in record.suspects if one.rank == rank), None)
    if existing is None:
        reason = f"rank {rank} ended before it was done: {gone.how}"
        suspect = Suspect(rank, reason, gone.instruction, gone.code, gone.last_lines)
    else:
        suspect = existing._replace(code=gone.code, last_lines=existing.last_lines or gone.last_lines)
    others = tuple(one for one in record.suspects if one.rank != rank)
    state = change(state, gone.run, suspects=(*others, suspect))
    if suspect.is_root_cause:
        return blame(state, gone.run, actions)
    actions.append(SetTimer(gone.run, record.generation, _peer_lost_grace_ns(record)))
    return state


def _peer_lost_grace_ns(record: Record) -> int:
    """Return how long the report of a lost peer is delayed; the first report ends the run."""
    has_all_ranks = len(record.assignment.ranks) == record.assignment.world_size
    return PEER_LOST_GRACE_NS if has_all_ranks else PEER_ELSEWHERE_GRACE_NS


def _refuse(state: State, run: str, reason: str, actions: list[Action]) -> State:
    record = state.runs[run]
    state = queue_event(change(state, run, phase=Phase.REFUSED), "refused", run, reason=reason)
    if record.alive:
        actions.append(Stop(run, record.generation))
    return state


def blame(state: State, run: str, actions: list[Action]) -> State:
    """Report the rank that failed first: one that failed by itself, otherwise the first that lost a peer."""
    record = state.runs[run]
    if record.phase is not Phase.RUNNING or not record.suspects:
        return state
    culprit = next((one for one in record.suspects if one.is_root_cause), record.suspects[0])
    state = report_failure(change(state, run, phase=Phase.FAILED), run, culprit)
    if record.alive:
        actions.append(Stop(run, record.generation))
    return state
