"""The agent's reaction to assignments and to a request to leave (part of the state machine of `state`)."""

from __future__ import annotations

from dataclasses import replace

from penstock.executor.node.agent_state import Offer, Phase, Record, State, Suspect
from penstock.executor.node.changes import change, first_rank, put, queue_event, report_failure
from penstock.executor.node.stimuli import CHECK, STORE, Action, Process, Start, Stop
from penstock.schemas.api.agents import Assignment, SyncReply, digest_of
from penstock.schemas.ranks.assignment import RankAssignment


def on_reply(state: State, reply: SyncReply, actions: list[Action]) -> State:
    """Bring every run to the phase that the service requests."""
    state = replace(
        state,
        state_version=reply.state_version,
        outbox=state.outbox.acknowledge(reply.ack),
    )
    wanted = {assignment.run: assignment for assignment in reply.assignments}
    for run in [run for run in state.runs if run not in wanted]:
        state = change(state, run, listed=False, successor=None)
        state = _stop(state, run, actions, gently=True)
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
    state = change(state, run, listed=True)
    if wanted.generation > record.generation:
        if record.phase is Phase.STOPPED:
            return _begin(state, wanted, actions)
        state = _stop(state, run, actions)
        if state.runs[run].phase is Phase.STOPPED:
            return _begin(state, wanted, actions)
        return change(state, run, successor=wanted)
    if wanted.phase == "stop":
        return _stop(state, run, actions, gently=wanted.save)
    if wanted.phase == "start" and record.phase in (Phase.CHECKING, Phase.PREPARED):
        state = change(state, run, assignment=wanted)
        return start_if_prepared(state, run, actions)
    return state


def _begin(state: State, wanted: Assignment, actions: list[Action]) -> State:
    run = wanted.run
    if state.draining is not None and wanted.phase != "stop":
        state = put(state, Record(wanted, Phase.REFUSED))
        return queue_event(state, "refused", run, reason=f"agent {state.offer.agent!r} is leaving: {state.draining}")
    match wanted.phase:
        case "stop":
            return queue_event(put(state, Record(wanted, Phase.STOPPED)), "stopped", run)
        case "start":
            state = put(state, Record(wanted, Phase.FAILED))
            lost = f"agent {state.offer.agent!r} was restarted and has lost generation {wanted.generation}"
            return report_failure(state, run, Suspect(first_rank(wanted), lost, None))
        case "prepare":
            reason = _why_refused(state.offer, wanted)
            if reason is not None:
                return queue_event(put(state, Record(wanted, Phase.REFUSED)), "refused", run, reason=reason)
            return _prepare(state, wanted, actions)


def _prepare(state: State, wanted: Assignment, actions: list[Action]) -> State:
    """Start the store, and check the model unless the previous generation has done so."""
    before = state.runs.get(wanted.run)
    is_checked = before is not None and before.has_checked(wanted)
    processes = [*(() if is_checked else (CHECK,)), *((STORE,) if wanted.hosts_store else ())]
    model = state.offer.reference(wanted.model)
    programs = [program for rank in wanted.ranks for program in rank.programs]
    question = {
        "model": model,
        "layers": list(wanted.layers),
        "global_batch_size": max((program.get("global_batch_size", 0) for program in programs), default=0),
        "paths": _paths(wanted),
    }
    for process in processes:
        actions.append(Start(wanted.run, wanted.generation, process, question if process == CHECK else {}))
    phase = Phase.PREPARED if is_checked else Phase.CHECKING
    state = put(state, Record(wanted, phase, alive=frozenset(processes), is_checked=is_checked))
    return queue_event(state, "prepared", wanted.run) if is_checked else state


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
    outside = [path for path in _paths(wanted) if not offer.may_use(path)]
    if outside:
        allowed = ", ".join(map(repr, offer.outputs or ())) or "none"
        return (
            f"agent {offer.agent!r} lets runs write below its output_directories only; there are {allowed}, and the "
            f"run names {', '.join(map(repr, outside))}. Add the directory to the agent's settings, or name another"
        )
    digest = digest_of(program for rank in wanted.ranks for program in rank.programs)
    if digest != wanted.digest:
        return f"the programs do not match their digest: announced {wanted.digest}, received {digest}"
    return None


def _paths(wanted: Assignment) -> list[str]:
    options = wanted.options
    named = (options.checkpoint_directory, options.metrics_path, options.tensorboard_directory)
    return [path for path in named if path is not None]


def start_if_prepared(state: State, run: str, actions: list[Action]) -> State:
    """Start the ranks when the service requests it, the model is checked and the store's address is known."""
    record = state.runs[run]
    wanted = record.assignment
    address = wanted.store_address or record.store_address
    if record.phase is not Phase.PREPARED or wanted.phase != "start" or address is None:
        return state
    started = set()
    for rank in wanted.ranks:
        process = Process("rank", rank.rank)
        started.add(process)
        job = state.offer.reference(wanted.model)
        assert job is not None, "a run whose model is not offered is refused before"
        assignment = RankAssignment(
            rank=rank.rank,
            world_size=wanted.world_size,
            programs=rank.programs,
            segments=wanted.segments or None,
            steps=wanted.steps,
            job=job,
            directory=state.offer.directory,
            options=wanted.options.model_dump(mode="json"),
            plan_hash=wanted.plan_hash,
            layers=wanted.layers,
            boundaries=wanted.boundaries,
            seed=wanted.seed,
            check=wanted.check,
            trace_steps=wanted.trace_steps,
            store=address,
            prefix=f"{run}/{wanted.generation}",
            device=rank.device,
            outputs=state.offer.outputs,
        )
        actions.append(Start(run, wanted.generation, process, assignment=assignment))
    return change(state, run, phase=Phase.RUNNING, alive=record.alive | started)


def _stop(state: State, run: str, actions: list[Action], *, gently: bool = False) -> State:
    """End the run; ``stopped`` is reported when no process is left. ``gently``: ranks may save first."""
    record = state.runs[run]
    if record.phase in (Phase.STOPPING, Phase.STOPPED):
        return state
    state = change(state, run, phase=Phase.STOPPING)
    if record.alive:
        actions.append(Stop(run, record.generation, gently and record.phase is Phase.RUNNING))
        return state
    return stopped(state, run, actions)


def stopped(state: State, run: str, actions: list[Action]) -> State:
    """Report that no process of this generation is left, and begin the next generation if there is one."""
    record = state.runs[run]
    if record.parting is not None:
        state = report_failure(state, run, Suspect(first_rank(record.assignment), record.parting, None))
    state = queue_event(change(state, run, phase=Phase.STOPPED, successor=None, parting=None), "stopped", run)
    if record.successor is not None:
        return _begin(state, record.successor, actions)
    return _forget_if_over(state, run)


def _forget_if_over(state: State, run: str) -> State:
    record = state.runs.get(run)
    if record is None or record.listed or record.phase is not Phase.STOPPED:
        return state
    return replace(state, runs={name: other for name, other in state.runs.items() if name != run})


def on_drain(state: State, reason: str, actions: list[Action]) -> State:
    """Leave: begin nothing new, let running ranks save, and report the reason to the service."""
    state = replace(state, draining=reason)
    message = f"agent {state.offer.agent!r} is leaving: {reason}"
    for run in list(state.runs):
        record = state.runs[run]
        state = change(state, run, successor=None)
        if record.phase in (Phase.CHECKING, Phase.PREPARED):
            state = queue_event(state, "refused", run, reason=message)
        elif record.phase is Phase.RUNNING:
            state = change(state, run, parting=message)
        state = _stop(state, run, actions, gently=True)
    return state
