"""The agent's state machine: a stimulus in, the new state and the actions out; no input or output of its own.

A run on this agent goes ``checking → prepared → running → done``, or leaves that line for ``refused``, ``failed`` or
``stopping → stopped``. Each generation of a run is a record of its own in time: a higher generation waits as successor
until no process of the lower one is left, so two generations never hold a device together.

What the service is told, and the data of each event, stands in `schemas.agents`; of the ranks that fail, the first one
that failed by itself is told, once per generation.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, assert_never

import rfc8785
from pydantic import ValidationError

from penstock.executor.agent_state import (
    ImpossibleStateError,
    Offer,
    Phase,
    Record,
    State,
    Suspect,
    broken_invariants,
    where,
)
from penstock.executor.outbox import EventKind, RankKey
from penstock.executor.stimuli import (
    CHECK,
    STORE,
    Action,
    Drain,
    Exited,
    GraceOver,
    Process,
    Said,
    SetTimer,
    Start,
    Stimulus,
    Stop,
    Synced,
)
from penstock.schemas.agents import Assignment, Progress, RankDone, SyncReply, Traced
from penstock.schemas.document import faults_of

STORY_LENGTH = 60
PEER_LOST_GRACE_NS = 700_000_000
EXIT_GRACE_NS = 3_000_000_000


def digest_of(programs: Iterable[Mapping[str, Any]]) -> str:
    """SHA-256 (hex) of the canonical JSON of a list of programs, in the order of the ranks."""
    return hashlib.sha256(rfc8785.dumps(list(programs))).hexdigest()


def step(state: State, stimulus: Stimulus) -> tuple[State, list[Action]]:
    """What the stimulus makes of the state, and what is to be done, in this order.

    Raises ImpossibleStateError, with the story, when the result breaks an invariant.
    """
    told = state
    if not (isinstance(stimulus, Said) and stimulus.message.get("kind") == "step"):
        told = replace(state, story=(*state.story[1 - STORY_LENGTH :], str(stimulus)))
    actions: list[Action] = []
    match stimulus:
        case Synced(reply):
            told = _on_reply(told, reply, actions)
        case Said():
            told = _on_message(told, stimulus, actions)
        case Exited():
            told = _on_exit(told, stimulus, actions)
        case GraceOver(run, generation):
            if told.current(run, generation) is not None:
                told = _blame(told, run, actions)
        case Drain(reason):
            told = _on_drain(told, reason, actions)
        case _:
            assert_never(stimulus)
    faults = broken_invariants(told, actions)
    if faults:
        raise ImpossibleStateError("; ".join(faults), told.story)
    return told, actions


# The service's wishes


def _on_reply(state: State, reply: SyncReply, actions: list[Action]) -> State:
    state = replace(
        state,
        state_version=reply.state_version,
        outbox=state.outbox.acknowledge(reply.ack),
    )
    wanted = {assignment.run: assignment for assignment in reply.assignments}
    for run in [run for run in state.runs if run not in wanted]:
        state = _set(state, run, listed=False, successor=None)
        state = _stop(state, run, actions)
        state = _forget_if_over(state, run)
    for run, assignment in wanted.items():
        state = _reconcile(state, run, assignment, actions)
    return state


def _reconcile(state: State, run: str, wanted: Assignment, actions: list[Action]) -> State:
    record = state.runs.get(run)
    if record is None:
        return _begin(state, wanted, actions)
    if wanted.generation < record.generation:
        return state
    state = _set(state, run, listed=True)
    if wanted.generation > record.generation:
        if record.phase is Phase.STOPPED:
            return _begin(state, wanted, actions)
        state = _stop(state, run, actions)
        if state.runs[run].phase is Phase.STOPPED:
            return _begin(state, wanted, actions)
        return _set(state, run, successor=wanted)
    if wanted.phase == "stop":
        return _stop(state, run, actions)
    if wanted.phase == "start" and record.phase in (Phase.CHECKING, Phase.PREPARED):
        state = _set(state, run, assignment=wanted)
        return _start_if_prepared(state, run, actions)
    return state


def _begin(state: State, wanted: Assignment, actions: list[Action]) -> State:
    run = wanted.run
    if state.draining is not None and wanted.phase != "stop":
        state = _put(state, Record(wanted, Phase.REFUSED))
        return _tell(state, "refused", run, reason=f"agent {state.offer.agent!r} is leaving: {state.draining}")
    match wanted.phase:
        case "stop":
            return _tell(_put(state, Record(wanted, Phase.STOPPED)), "stopped", run)
        case "start":
            state = _put(state, Record(wanted, Phase.FAILED))
            lost = f"agent {state.offer.agent!r} was restarted and has lost generation {wanted.generation}"
            return _tell_failure(state, run, Suspect(_first_rank(wanted), lost, None))
        case "prepare":
            reason = _why_refused(state.offer, wanted)
            if reason is not None:
                return _tell(_put(state, Record(wanted, Phase.REFUSED)), "refused", run, reason=reason)
            alive = {CHECK}
            reference = state.offer.reference(wanted.model)
            arguments = {"model": reference, "layers": list(wanted.layers)}
            actions.append(Start(run, wanted.generation, CHECK, arguments))
            if wanted.hosts_store:
                alive.add(STORE)
                actions.append(Start(run, wanted.generation, STORE))
            return _put(state, Record(wanted, Phase.CHECKING, alive=frozenset(alive)))


def _why_refused(offer: Offer, wanted: Assignment) -> str | None:
    missing = sorted({rank.device for rank in wanted.ranks} - offer.devices)
    if missing:
        has = ", ".join(sorted(offer.devices))
        return f"agent {offer.agent!r} has no device {', '.join(map(repr, missing))}; it has {has}"
    if offer.reference(wanted.model) is None:
        has = ", ".join(map(repr, sorted(offer.models))) or "none"
        return (
            f"agent {offer.agent!r} has no model {wanted.model!r} in its configuration; it has {has}. "
            f"Add it under [models] in the agent's settings"
        )
    digest = digest_of(rank.program for rank in wanted.ranks)
    if digest != wanted.digest:
        return f"the programs do not match their digest: announced {wanted.digest}, received {digest}"
    return None


def _start_if_prepared(state: State, run: str, actions: list[Action]) -> State:
    record = state.runs[run]
    wanted = record.assignment
    address = wanted.store_address or record.store_address
    if record.phase is not Phase.PREPARED or wanted.phase != "start" or address is None:
        return state
    started = set()
    for rank in wanted.ranks:
        process = Process("rank", rank.rank)
        started.add(process)
        arguments = {
            "rank": rank.rank,
            "world_size": wanted.world_size,
            "store": address,
            "prefix": f"{run}/{wanted.generation}",
            "program": rank.program,
            "device": rank.device,
            "job": state.offer.reference(wanted.model),
            "steps": wanted.steps,
            "seed": wanted.seed,
            "check": wanted.check,
            "trace_steps": wanted.trace_steps,
            "layers": list(wanted.layers),
        }
        actions.append(Start(run, wanted.generation, process, arguments))
    return _set(state, run, phase=Phase.RUNNING, alive=record.alive | started)


def _stop(state: State, run: str, actions: list[Action]) -> State:
    """Bring the run to an end for the service's sake; ``stopped`` is told once nothing is left."""
    record = state.runs[run]
    if record.phase in (Phase.STOPPING, Phase.STOPPED):
        return state
    state = _set(state, run, phase=Phase.STOPPING)
    if record.alive:
        actions.append(Stop(run, record.generation))
        return state
    return _stopped(state, run, actions)


def _stopped(state: State, run: str, actions: list[Action]) -> State:
    record = state.runs[run]
    state = _tell(_set(state, run, phase=Phase.STOPPED, successor=None), "stopped", run)
    if record.successor is not None:
        return _begin(state, record.successor, actions)
    return _forget_if_over(state, run)


def _forget_if_over(state: State, run: str) -> State:
    record = state.runs.get(run)
    if record is None or record.listed or record.phase is not Phase.STOPPED:
        return state
    return replace(state, runs={name: other for name, other in state.runs.items() if name != run})


def _on_drain(state: State, reason: str, actions: list[Action]) -> State:
    state = replace(state, draining=reason)
    for run in list(state.runs):
        record = state.runs[run]
        said = f"agent {state.offer.agent!r} is leaving: {reason}"
        state = _set(state, run, successor=None)
        if record.phase in (Phase.CHECKING, Phase.PREPARED):
            state = _tell(state, "refused", run, reason=said)
        elif record.phase is Phase.RUNNING:
            state = _tell_failure(state, run, Suspect(_first_rank(record.assignment), said, None))
        state = _stop(state, run, actions)
    return state


# What children say and how they end


def _on_message(state: State, said: Said, actions: list[Action]) -> State:
    record = state.current(said.run, said.generation)
    if record is None or said.process not in record.alive or record.phase in (Phase.STOPPING, Phase.STOPPED):
        return state
    kind, message = said.message.get("kind"), said.message
    match said.process.kind, kind:
        case "check", "refused" if record.phase is Phase.CHECKING:
            return _refuse(state, said.run, str(message.get("reason")), actions)
        case "check", "ready" if record.phase is Phase.CHECKING:
            state = _tell(_set(state, said.run, phase=Phase.PREPARED), "prepared", said.run)
            return _start_if_prepared(state, said.run, actions)
        case "store", "ready" if record.store_address is None and record.phase in (Phase.CHECKING, Phase.PREPARED):
            address = str(message["address"])
            state = _tell(_set(state, said.run, store_address=address), "store_ready", said.run, address=address)
            return _start_if_prepared(state, said.run, actions)
        case "rank", _ if record.phase is Phase.RUNNING:
            return _on_rank_message(state, record, said.run, said.process.rank, message, actions)
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
        state = _set(state, run, suspects=(Suspect(rank, reason, None), *record.suspects))
        return _blame(state, run, actions)


def _take_rank_message(
    state: State, record: Record, run: str, rank: int, message: Mapping[str, Any], actions: list[Action]
) -> State:
    match message.get("kind"):
        case "ready":
            state = _set(state, run, ready=record.ready | {rank})
            ranks = sorted(one.rank for one in record.assignment.ranks)
            if rank not in record.ready and set(ranks) == state.runs[run].ready:
                state = _tell(state, "started", run, ranks=ranks)
            return state
        case "step":
            told = Progress.model_validate({**message, "rank": rank, "loss": _finite(message.get("loss"))})
            if told.step == 0 and told.time_ns is not None:
                state = _set(state, run, first_times_ns=dict(record.first_times_ns) | {rank: told.time_ns})
            key = RankKey(run, record.generation, rank)
            return replace(state, outbox=state.outbox.tell_progress(key, told.model_dump()))
        case "trace":
            trace = Traced.model_validate(message)
            return _tell(state, "trace", run, **trace.model_dump(mode="json"))
        case "done" if rank not in record.done:
            done = _rank_done(record, rank, message)
            state = _set(state, run, done=record.done | {rank})
            return _tell(state, "rank_done", run, **done.model_dump(mode="json"))
        case "failed" if rank not in record.done:
            at = where(message.get("step"), message.get("index"), message.get("instruction"))
            lines = tuple(map(str, message.get("traceback") or ()))
            suspect = Suspect(rank, str(message.get("reason")), at, last_lines=lines)
            delay_ns = EXIT_GRACE_NS if suspect.is_root_cause else PEER_LOST_GRACE_NS
            actions.append(SetTimer(run, record.generation, delay_ns))
            return _set(state, run, suspects=(*record.suspects, suspect))
        case _:
            return state


def _rank_done(record: Record, rank: int, message: Mapping[str, Any]) -> RankDone:
    """A rank leaves the times of its warm-up out; the service counts steps from 0, or takes no times at all."""
    times, warmup = message.get("step_times_ns"), message.get("warmup_steps", 0)
    if warmup == 1 and rank in record.first_times_ns:
        times = [record.first_times_ns[rank], *(times or ())]
    elif warmup:
        times = None
    losses = tuple(map(_finite, message.get("losses") or ()))
    return RankDone.model_validate({**message, "rank": rank, "step_times_ns": times, "losses": losses})


def _finite(loss: float | None) -> float | None:
    """JSON has no number for a loss that has run away."""
    return loss if loss is not None and math.isfinite(loss) else None


def _on_exit(state: State, gone: Exited, actions: list[Action]) -> State:
    record = state.current(gone.run, gone.generation)
    if record is None or gone.process not in record.alive:
        return state
    state = _set(state, gone.run, alive=record.alive - {gone.process})
    left = state.runs[gone.run].alive
    match record.phase:
        case Phase.STOPPING:
            return state if left else _stopped(state, gone.run, actions)
        case Phase.CHECKING | Phase.PREPARED if gone.process == STORE:
            return _refuse(state, gone.run, f"the store ended: {gone.how}", actions)
        case Phase.CHECKING:
            return _refuse(state, gone.run, f"the model could not be checked: {gone.how}", actions)
        case Phase.RUNNING if gone.process == STORE:
            lost = Suspect(_first_rank(record.assignment), f"the store ended: {gone.how}", None, gone.code)
            return _blame(_set(state, gone.run, suspects=(lost, *record.suspects)), gone.run, actions)
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
        return _set(state, gone.run, phase=Phase.DONE) if over else state
    known = next((one for one in record.suspects if one.rank == rank), None)
    if known is None:
        reason = f"rank {rank} ended before it was done: {gone.how}"
        suspect = Suspect(rank, reason, gone.instruction, gone.code, gone.last_lines)
    else:
        suspect = known._replace(code=gone.code, last_lines=known.last_lines or gone.last_lines)
    others = tuple(one for one in record.suspects if one.rank != rank)
    state = _set(state, gone.run, suspects=(*others, suspect))
    if suspect.is_root_cause:
        return _blame(state, gone.run, actions)
    if not record.suspects:
        actions.append(SetTimer(gone.run, record.generation, PEER_LOST_GRACE_NS))
    return state


def _refuse(state: State, run: str, reason: str, actions: list[Action]) -> State:
    record = state.runs[run]
    state = _tell(_set(state, run, phase=Phase.REFUSED), "refused", run, reason=reason)
    if record.alive:
        actions.append(Stop(run, record.generation))
    return state


def _blame(state: State, run: str, actions: list[Action]) -> State:
    """Name the rank that failed first: one that failed by itself, else the first that lost its peer."""
    record = state.runs[run]
    if record.phase is not Phase.RUNNING or not record.suspects:
        return state
    culprit = next((one for one in record.suspects if one.is_root_cause), record.suspects[0])
    state = _tell_failure(_set(state, run, phase=Phase.FAILED), run, culprit)
    if record.alive:
        actions.append(Stop(run, record.generation))
    return state


# Small changes of the state


def _put(state: State, record: Record) -> State:
    return replace(state, runs=dict(state.runs) | {record.assignment.run: record})


def _set(state: State, run: str, **changes: Any) -> State:
    return _put(state, replace(state.runs[run], **changes))


def _first_rank(assignment: Assignment) -> int:
    return min((one.rank for one in assignment.ranks), default=0)


def _tell(state: State, kind: EventKind, run: str, **data: Any) -> State:
    return replace(state, outbox=state.outbox.tell(kind, run, state.runs[run].generation, data))


def _tell_failure(state: State, run: str, culprit: Suspect) -> State:
    code = culprit.code
    return _tell(
        state,
        "rank_failed",
        run,
        rank=culprit.rank,
        reason=culprit.reason,
        instruction=culprit.instruction,
        signal=-code if code is not None and code < 0 else None,
        exit_code=code if code is not None and code >= 0 else None,
        last_lines=list(culprit.last_lines),
    )
