"""The agent's state machine: each transition by a table, and invariants under random sequences of stimuli."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.executor.node.agent_state import ImpossibleStateError, Offer, Phase, Record, State, broken_invariants
from penstock.executor.node.child_reports import EXIT_GRACE_NS, PEER_ELSEWHERE_GRACE_NS, PEER_LOST_GRACE_NS
from penstock.executor.node.outbox import GATHERED, Outbox, RankKey
from penstock.executor.node.state import HISTORY_LENGTH, step
from penstock.executor.node.stimuli import (
    CHECK,
    STORE,
    ChildMessage,
    Drain,
    Exited,
    GraceOver,
    Process,
    SetTimer,
    Start,
    Stop,
    Synced,
)
from penstock.schemas.api.agents import Assignment, RankPrograms, SyncReply, digest_of
from penstock.schemas.api.run_options import RunOptions
from penstock.schemas.ranks.assignment import RankAssignment
from penstock.schemas.trace import RankTrace

OFFER = Offer("a", frozenset({"a/0", "a/1"}), {"toy": "toys:job"})
RANK0, RANK1 = Process("rank", 0), Process("rank", 1)
TRACE = {"rank": 1, "device": "a/1", "step": 2, "events": [], "peak_memory_bytes": None}
LOST_PEER = {"kind": "failed", "reason": "RuntimeError: Connection closed by peer", "instruction": "RECV_F0@1"}


def assignment(phase="prepare", *, run="r", generation=1, devices=("a/0", "a/1"), hosts_store=False, **changes):
    programs = [{"rank": i, "global_batch_size": 4} for i in range(len(devices))]
    ranks = tuple(RankPrograms(rank=i, device=device, programs=(programs[i],)) for i, device in enumerate(devices))
    fields = {
        "plan_hash": "sha256:" + 64 * "0",
        "digest": digest_of(program for rank in ranks for program in rank.programs),
        "model": "toy",
        "world_size": 2,
        "steps": 3,
        "seed": 7,
        "check": False,
        "trace_steps": 1,
        "store_address": None if hosts_store or phase == "prepare" else "h:1",
        "layers": ("x", "y"),
        "boundaries": ((("t", 4, 4),),),
    }
    return Assignment(
        run=run, generation=generation, phase=phase, hosts_store=hosts_store, ranks=ranks, **(fields | changes)
    )


def synced(*assignments, ack=0, version=1):
    return Synced(SyncReply(state_version=version, assignments=assignments, ack=ack))


def play(*stimuli, state=None):
    """Return the state after all stimuli, and the actions of the last one."""
    state, actions = state or State(OFFER), []
    for stimulus in stimuli:
        state, actions = step(state, stimulus)
    return state, actions


def report(process, _run="r", _generation=1, **message):
    return ChildMessage(_run, _generation, process, message)


def exited(process, code=0, *lines, generation=1):
    return Exited("r", generation, process, code, lines)


def event_kinds(state):
    return [event.kind for event in state.outbox.events]


PREPARED = (synced(assignment()), report(CHECK, kind="ready"), exited(CHECK))
RUNNING = (*PREPARED, synced(assignment("start")))


def test_prepare_starts_the_check_with_the_job_of_the_models_key():
    state, actions = play(synced(assignment()))
    question = {"model": "toys:job", "layers": ["x", "y"], "global_batch_size": 4, "paths": []}
    assert actions == [Start("r", 1, CHECK, question)]
    assert state.runs["r"].phase is Phase.CHECKING
    assert event_kinds(state) == []


def test_the_agent_of_rank_0_starts_the_store_beside_the_check_and_tells_its_address():
    state, actions = play(synced(assignment(hosts_store=True)))
    assert [action.process for action in actions] == [CHECK, STORE]
    state, _ = play(report(STORE, kind="ready", address="10.0.0.1:5000"), state=state)
    (event,) = state.outbox.events
    assert (event.kind, event.data) == ("store_ready", {"address": "10.0.0.1:5000"})


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        pytest.param(assignment(devices=("a/0", "b/3")), ["'b/3'", "a/0, a/1"], id="no-such-device"),
        pytest.param(assignment(model="other"), ["'other'", "'toy'"], id="model-not-configured"),
        pytest.param(assignment(model="os:system"), ["'os:system'", "'toy'"], id="a-path-is-no-key"),
        pytest.param(assignment(digest=64 * "0"), ["digest", 64 * "0"], id="programs-changed-on-the-way"),
    ],
)
def test_prepare_is_refused_with_the_reason(wanted, words):
    state, actions = play(synced(wanted))
    assert actions == []
    (event,) = state.outbox.events
    assert event.kind == "refused"
    assert all(word in event.data["reason"] for word in words)


def test_any_model_runs_where_the_configuration_says_so():
    state = State(replace(OFFER, any_model=True))
    _, actions = play(synced(assignment(model="mine:job")), state=state)
    assert actions[0].arguments["model"] == "mine:job"


def test_a_check_that_says_no_refuses_with_its_reason():
    state, actions = play(
        synced(assignment(hosts_store=True)), report(CHECK, kind="refused", reason="layer 3 is called")
    )
    assert event_kinds(state) == ["refused"]
    assert state.outbox.events[0].data == {"reason": "layer 3 is called"}
    assert actions == [Stop("r", 1)]


def test_a_check_that_dies_refuses_with_its_last_line():
    state, _ = play(synced(assignment()), exited(CHECK, -9, "x", "Killed by the kernel"))
    assert state.outbox.events[0].data["reason"] == ("the model could not be checked: signal 9: Killed by the kernel")


def test_a_store_that_dies_while_preparing_refuses():
    state, _ = play(synced(assignment(hosts_store=True)), exited(STORE, 65, "cannot listen on '10.9.9.9'"))
    assert state.outbox.events[0].data["reason"] == "the store ended: exit code 65: cannot listen on '10.9.9.9'"


def test_start_gives_each_rank_its_program_and_the_store_of_this_generation():
    state, actions = play(*RUNNING)
    assert [action.process for action in actions] == [RANK0, RANK1]
    assert actions[1].assignment == RankAssignment(
        rank=1,
        world_size=2,
        store="h:1",
        prefix="r/1",
        plan_hash="sha256:" + 64 * "0",
        programs=({"rank": 1, "global_batch_size": 4},),
        segments=None,
        options=RunOptions().model_dump(mode="json"),
        device="a/1",
        directory="/",
        job="toys:job",
        steps=3,
        seed=7,
        check=False,
        trace_steps=1,
        layers=("x", "y"),
        boundaries=((("t", 4, 4),),),
    )
    assert state.runs["r"].phase is Phase.RUNNING


def test_start_before_the_check_is_done_waits_for_it():
    state, actions = play(synced(assignment()), synced(assignment("start")))
    assert actions == []
    _, actions = play(report(CHECK, kind="ready"), state=state)
    assert [action.process for action in actions] == [RANK0, RANK1]


def test_start_without_an_address_takes_the_own_store():
    state, actions = play(
        synced(assignment(hosts_store=True)), report(CHECK, kind="ready"), synced(assignment("start", hosts_store=True))
    )
    assert actions == []
    _, actions = play(report(STORE, kind="ready", address="me:2"), state=state)
    assert {action.assignment.store for action in actions} == {"me:2"}


def test_a_check_that_ends_while_the_ranks_run_already_is_no_failure():
    state, _ = play(synced(assignment()), report(CHECK, kind="ready"), synced(assignment("start")))
    after, actions = play(exited(CHECK), state=state)
    assert (event_kinds(after), actions) == (["prepared"], [])
    assert after.runs["r"].phase is Phase.RUNNING


def test_a_repeated_reply_changes_nothing():
    for history in (PREPARED[:1], RUNNING):
        state, _ = play(*history)
        again, actions = play(history[-1], state=state)
        assert actions == []
        assert again.runs == state.runs


def test_a_restarted_agent_does_not_join_a_generation_that_it_has_lost():
    state, actions = play(synced(assignment("start")))
    assert actions == []
    (event,) = state.outbox.events
    assert event.kind == "rank_failed"
    assert "was restarted" in event.data["reason"]


def test_a_run_that_ends_well():
    loads = {"load_at_start": 0.5, "load_at_end": 1.5, "cpu_ns": 5, "wall_ns": 9, "planned_kind": None}
    hardware = {"kind": "cpu", "model": "Xeon", "ranks": 2, "cores": 2, "machine_cores": 2, **loads}
    done = {"kind": "done", "losses": [1.0], "step_times_ns": [5], "gradient_check": None, "peak_memory_bytes": 9}
    done |= {"hardware": hardware, "collectives": {"all_reduce": 2}, "collectives_differ": None}
    state, _ = play(*RUNNING, report(RANK0, kind="ready"))
    assert event_kinds(state) == ["prepared"]
    state, actions = play(
        report(RANK1, kind="ready"),
        report(RANK1, kind="trace", rank_trace=TRACE),
        report(RANK0, **done),
        report(RANK1, **done),
        exited(RANK0),
        exited(RANK1),
        state=state,
    )
    assert event_kinds(state) == ["prepared", "started", "trace", "rank_done", "rank_done"]
    assert state.outbox.events[1].data == {"ranks": [0, 1]}
    assert state.outbox.events[2].data["rank_trace"] == RankTrace.model_validate(TRACE).model_dump(mode="json")
    assert state.outbox.events[3].data == {
        "rank": 0,
        "first_step": 0,
        "losses": [1.0],
        "step_times_ns": [5],
        "gradient_check": None,
        "collectives": {"all_reduce": 2},
        "collectives_differ": None,
        "peak_memory_bytes": 9,
        "hardware": hardware,
    }
    assert (state.runs["r"].phase, actions) == (Phase.DONE, [])
    state, actions = play(synced(ack=5), state=state)
    assert (actions, event_kinds(state), state.runs) == ([], ["stopped"], {})


@pytest.mark.parametrize(
    ("steps", "done", "expected"),
    [
        ([(0, 50), (1, 7)], {"step_times_ns": [7], "warmup_steps": 1}, [50, 7]),
        ([(0, 50)], {"step_times_ns": [50], "warmup_steps": 0}, [50]),
        ([(0, 50)], {"step_times_ns": [50]}, [50]),
        ([], {"step_times_ns": [7], "warmup_steps": 1}, None),
    ],
    ids=["warm-up-added", "no-warm-up", "not-said", "times-of-the-warm-up-unknown"],
)
def test_the_times_of_a_rank_count_from_its_first_step(steps, done, expected):
    history = [report(RANK0, kind="step", step=number, loss=1.0, time_ns=time_ns) for number, time_ns in steps]
    state, _ = play(*RUNNING, *history, report(RANK0, kind="done", losses=[1.0], **done), report(RANK0, kind="done"))
    (event,) = [event for event in state.outbox.events if event.kind == "rank_done"]
    assert event.data["step_times_ns"] == expected


def test_a_loss_that_has_run_away_is_told_as_such():
    state, _ = play(*RUNNING, report(RANK0, kind="step", step=1, loss=float("nan"), time_ns=1))
    state, _ = play(report(RANK0, kind="done", losses=[1.0, float("inf")], step_times_ns=[]), state=state)
    assert [event.data["losses"] for event in state.outbox.events if event.kind == "progress"] == [("NaN",)]
    assert state.outbox.events[-1].data["losses"] == [1.0, "Infinity"]


@pytest.mark.parametrize("error", ["NonfiniteLoss", "ModelMismatch"])
def test_what_would_fail_again_is_told_as_final(error):
    failed = {"kind": "failed", "reason": "the loss of step 2 is nan", "error": error}
    state, _ = play(*RUNNING, report(RANK0, **failed), exited(RANK0, 1))
    assert failure(state)["is_final"] is True


@pytest.mark.parametrize(
    "message",
    [
        {"kind": "step", "step": "first"},
        {"kind": "trace"},
        {"kind": "done", "gradient_check": float("inf")},
    ],
    ids=["step", "trace", "gradients-that-are-no-numbers"],
)
def test_a_rank_that_reports_nonsense_has_failed(message):
    state, actions = play(*RUNNING, report(RANK1, **message))
    assert actions == [Stop("r", 1)]
    assert f"rank 1 reported a {message['kind']!r} that is not valid" in failure(state)["reason"]


def test_a_rank_that_crashes_while_it_ends_has_been_done_already():
    state, _ = play(*RUNNING, report(RANK0, kind="done"), exited(RANK0, -11), report(RANK1, kind="done"), exited(RANK1))
    assert state.runs["r"].phase is Phase.DONE
    assert "rank_failed" not in event_kinds(state)


def failure(state):
    (event,) = [event for event in state.outbox.events if event.kind == "rank_failed"]
    return event.data


def test_a_killed_rank_is_named_at_once_and_the_rest_of_the_run_ends():
    state, actions = play(*RUNNING, replace(exited(RANK1, -9), instruction="step 2, instruction 5 (1F4)"))
    assert actions == [Stop("r", 1)]
    assert failure(state) == {
        "rank": 1,
        "reason": "rank 1 ended before it was done: signal 9",
        "instruction": "step 2, instruction 5 (1F4)",
        "signal": 9,
        "exit_code": None,
        "last_lines": [],
        "is_final": False,
    }
    state, _ = play(exited(RANK0, -15), state=state)
    assert event_kinds(state) == ["prepared", "rank_failed"]


def test_the_rank_that_lost_its_peer_is_not_blamed_when_the_peer_was_killed():
    state, actions = play(*RUNNING, report(RANK0, **LOST_PEER))
    assert actions == [SetTimer("r", 1, PEER_LOST_GRACE_NS)]
    state, _ = play(exited(RANK0, 1), exited(RANK1, -9), state=state)
    assert (failure(state)["rank"], failure(state)["signal"]) == (1, 9)


def test_a_peer_that_may_be_elsewhere_is_reported_after_its_own_agent_has_had_time():
    fields = {"devices": ("a/0",), "world_size": 2}
    prepared = (synced(assignment(**fields)), report(CHECK, kind="ready"), exited(CHECK))
    state, actions = play(*prepared, synced(assignment("start", **fields)), report(RANK0, **LOST_PEER))
    assert actions == [SetTimer("r", 1, PEER_ELSEWHERE_GRACE_NS)]
    assert play(exited(RANK0, 1), state=state)[1] == [SetTimer("r", 1, PEER_ELSEWHERE_GRACE_NS)]
    assert PEER_ELSEWHERE_GRACE_NS > EXIT_GRACE_NS


def test_a_peer_lost_on_another_node_is_told_after_the_grace():
    state, _ = play(*RUNNING, report(RANK0, **LOST_PEER), exited(RANK0, 1, "Traceback", "closed by peer"))
    assert event_kinds(state) == ["prepared"]
    state, actions = play(GraceOver("r", 1), state=state)
    assert actions == [Stop("r", 1)]
    assert failure(state)["instruction"] == "RECV_F0@1"
    assert failure(state)["exit_code"] == 1
    assert failure(state)["last_lines"] == ["Traceback", "closed by peer"]


def test_an_error_of_the_users_code_is_told_with_its_instruction_once_the_rank_is_gone():
    state, _ = play(
        *RUNNING,
        report(
            RANK1,
            kind="failed",
            reason="ZeroDivisionError: 0",
            instruction="1F4",
            step=2,
            index=9,
            traceback=["x = 1 / 0"],
        ),
        report(RANK0, **LOST_PEER),
        exited(RANK0, 1),
        exited(RANK1, 1, "other words"),
    )
    assert (failure(state)["rank"], failure(state)["instruction"]) == (1, "step 2, instruction 9 (1F4)")
    assert failure(state)["last_lines"] == ["x = 1 / 0"]


def test_a_rank_that_failed_but_hangs_is_told_after_the_grace():
    state, _ = play(
        *RUNNING, report(RANK1, kind="failed", reason="ValueError: x", instruction="1F4"), GraceOver("r", 1)
    )
    assert failure(state)["rank"] == 1


def test_a_rank_that_leaves_without_being_done_has_failed():
    state, _ = play(*RUNNING, exited(RANK0, 0))
    assert failure(state)["reason"] == "rank 0 ended before it was done: exit code 0"


def test_a_lost_store_fails_the_run():
    state, _ = play(
        synced(assignment(hosts_store=True)),
        report(STORE, kind="ready", address="me:2"),
        report(CHECK, kind="ready"),
        exited(CHECK),
        synced(assignment("start", hosts_store=True)),
        exited(STORE, -9),
    )
    assert failure(state)["reason"] == "the store ended: signal 9"


@pytest.mark.parametrize(
    ("wish", "gently"),
    [(synced(assignment("stop")), False), (synced(assignment("stop", save=True)), True), (synced(), True)],
    ids=["stop", "save-and-stop", "vanished"],
)
@pytest.mark.parametrize(
    ("history", "ends"),
    [
        pytest.param(PREPARED[:1], [exited(CHECK, -15)], id="checking"),
        pytest.param(PREPARED, [], id="prepared"),
        pytest.param(RUNNING, [exited(RANK0, -15), exited(RANK1, -9)], id="running"),
        pytest.param((*RUNNING, exited(RANK1, -9)), [exited(RANK0, -15)], id="failed"),
    ],
)
def test_stop_ends_every_process_and_tells_it_once(wish, gently, history, ends):
    state, actions = play(*history, wish)
    assert actions == ([Stop("r", 1, gently and history == RUNNING)] if ends else [])
    for one in ends:
        assert "stopped" not in event_kinds(state)
        state, _ = play(one, state=state)
    assert event_kinds(state).count("stopped") == 1
    assert event_kinds(state)[-1] == "stopped"
    state, actions = play(wish, state=state)
    assert (event_kinds(state).count("stopped"), actions) == (1, [])
    assert ("r" in state.runs) == bool(wish.reply.assignments)


def test_stop_of_an_unknown_run_is_answered():
    assert event_kinds(play(synced(assignment("stop")))[0]) == ["stopped"]


def test_a_higher_generation_waits_until_the_lower_one_is_gone():
    state, actions = play(*RUNNING, synced(assignment(generation=2)))
    assert actions == [Stop("r", 1)]
    state, actions = play(exited(RANK0, -15), state=state)
    assert actions == []
    state, actions = play(exited(RANK1, -15), state=state)
    assert actions == []
    assert event_kinds(state)[-2:] == ["stopped", "prepared"], "the model was checked for the first generation"
    assert (state.runs["r"].generation, state.runs["r"].phase) == (2, Phase.PREPARED)


def test_a_higher_generation_of_another_model_is_checked_again():
    state, _ = play(*PREPARED, synced(assignment("stop")))
    _, actions = play(synced(assignment(generation=2, layers=("x", "y", "z"))), state=state)
    assert [(action.generation, action.process) for action in actions] == [(2, CHECK)]
    assert [(event.kind, event.generation) for event in state.outbox.events] == [("prepared", 1), ("stopped", 1)]


def test_a_waiting_generation_is_itself_superseded_or_dropped():
    waiting, _ = play(*RUNNING, synced(assignment(generation=2)), exited(RANK0, -15))
    state, _ = play(synced(assignment(generation=3)), exited(RANK1, -15), state=waiting)
    assert state.runs["r"].generation == 3
    state, actions = play(synced(), exited(RANK1, -15), state=waiting)
    assert (actions, state.runs) == ([], {})


def test_a_lower_generation_and_words_of_the_dead_are_ignored():
    state, _ = play(synced(assignment(generation=2)))
    for stimulus in (
        synced(assignment("start", generation=1)),
        report(CHECK, kind="ready"),
        report(RANK0, kind="done"),
        exited(RANK0, -9),
        GraceOver("r", 1),
    ):
        after, actions = play(stimulus, state=state)
        assert (after.runs, after.outbox, actions) == (state.runs, state.outbox, [])


def test_ranks_save_before_a_leaving_agent_says_that_they_are_gone():
    state, actions = play(*RUNNING, Drain("it was asked to end"))
    assert actions == [Stop("r", 1, gently=True)]
    state, _ = play(report(RANK0, kind="checkpoint", step=2, directory="/c/step-2"), exited(RANK0), state=state)
    assert event_kinds(state) == ["prepared", "checkpoint"]
    state, _ = play(exited(RANK1), state=state)
    assert event_kinds(state) == ["prepared", "checkpoint", "rank_failed", "stopped"]
    assert failure(state)["reason"] == "agent 'a' is leaving: it was asked to end"


def test_the_store_stays_until_the_last_rank_has_saved():
    hosting = (synced(assignment(hosts_store=True)), report(STORE, kind="ready", address="me:2"), *PREPARED[1:])
    state, actions = play(*hosting, synced(assignment("start", hosts_store=True)), Drain("it was asked to end"))
    state, actions = play(exited(RANK0), exited(RANK1), state=state)
    assert actions == [Stop("r", 1)]
    assert "stopped" not in event_kinds(state)
    assert event_kinds(play(exited(STORE, -9), state=state)[0])[-1] == "stopped"


def test_ranks_that_saved_because_another_agent_leaves_are_not_to_blame_at_once():
    state, actions = play(*RUNNING, report(RANK0, kind="left", step=2), exited(RANK0, 0))
    assert actions == [SetTimer("r", 1, PEER_LOST_GRACE_NS)]
    state, _ = play(GraceOver("r", 1), state=state)
    assert failure(state)["reason"] == "rank 0 ended after 2 steps: a rank of the run was asked to end"


@pytest.mark.parametrize(
    ("message", "data"),
    [
        ({"kind": "checkpoint", "step": 4, "directory": "/c/step-4"}, {"step": 4, "directory": "/c/step-4"}),
        ({"kind": "evaluation", "step": 4, "loss": float("nan")}, {"step": 4, "loss": "NaN"}),
        ({"kind": "rung", "step": 4, "index": 1}, {"step": 4, "index": 1}),
        ({"kind": "warning", "step": 4, "text": "disk full"}, {"rank": 1, "step": 4, "text": "disk full"}),
    ],
)
def test_what_happens_on_the_way_is_told(message, data):
    (event,) = play(*RUNNING, report(RANK1, **message))[0].outbox.events[1:]
    assert (event.kind, event.data) == (message["kind"], data)


@pytest.mark.parametrize(
    ("history", "kind"),
    [(PREPARED[:1], "refused"), (PREPARED, "refused")],
    ids=["checking", "prepared"],
)
def test_an_agent_told_to_leave_says_so_and_stops(history, kind):
    state, _ = play(*history, Drain("it was asked to end"))
    event = state.outbox.events[-1] if state.is_living else state.outbox.events[-2]
    assert event.kind == kind
    assert "agent 'a' is leaving: it was asked to end" in event.data["reason"]


def test_an_agent_that_leaves_takes_nothing_on():
    state, actions = play(Drain("bye"), synced(assignment()))
    assert (event_kinds(state), actions) == (["refused"], [])


def test_acknowledged_events_are_forgotten_and_others_kept():
    state, _ = play(*RUNNING, exited(RANK1, -9), exited(RANK0, -15), synced(assignment("stop")))
    assert [event.sequence for event in state.outbox.events] == [1, 2, 3]
    state, _ = play(synced(assignment("stop"), ack=2), state=state)
    assert [event.sequence for event in state.outbox.events] == [3]


def test_the_steps_of_each_rank_are_gathered_while_earlier_ones_are_on_their_way():
    state, _ = play(*RUNNING)
    for number in range(300):
        state, _ = play(
            report(RANK0, kind="step", step=number, loss=None, time_ns=1),
            report(RANK1, kind="step", step=number, loss=0.5, time_ns=2),
            state=state,
        )
    box, events = state.outbox.take(10**6)
    shown = [(event.data["rank"], event.data["step"], len(event.data["losses"])) for event in events[1:]]
    assert shown == [(0, 0, 300), (1, 0, 300)]
    later = box.add_step(RankKey("r", 1, 0), 300, 0.25, 1)
    assert later.take(10**6)[1] == events
    (news,) = later.acknowledge(events[-1].sequence).take(10**6)[1]
    assert news.data == {"rank": 0, "step": 300, "losses": (0.25,), "times_ns": (1,)}


@pytest.mark.parametrize("steps", [range(2 * GATHERED), (0, 1, 5, 6)], ids=["many", "with-a-gap"])
def test_no_step_is_lost_however_long_the_service_is_away(steps):
    box = Outbox()
    for step_ in steps:
        box = box.add_step(RankKey("r", 1, 0), step_, step_ / 2, None)
    told_of = []
    while box:
        box, events = box.take(10**9)
        box = box.acknowledge(events[-1].sequence)
        told_of += [(event.data["step"] + i, loss) for event in events for i, loss in enumerate(event.data["losses"])]
    assert told_of == [(step_, step_ / 2) for step_ in steps]


def test_progress_comes_before_the_end_of_its_rank():
    state, _ = play(*RUNNING, report(RANK0, kind="step", step=2, loss=1.0, time_ns=1), report(RANK0, kind="done"))
    assert event_kinds(state) == ["prepared", "progress", "rank_done"]


def test_a_long_outbox_is_sent_in_portions():
    box = Outbox()
    for _ in range(5):
        box = box.add("trace", "r", 1, {"rank_trace": "x" * 1000})
    assert len(box.take(2500)[1]) == 2
    assert len(box.take(10)[1]) == 1


def test_a_broken_invariant_is_reported_with_the_story():
    state, _ = play(*RUNNING)
    broken = replace(state, runs={"r": replace(state.runs["r"], phase=Phase.DONE)})
    with pytest.raises(ImpossibleStateError) as caught:
        step(broken, GraceOver("r", 1))
    assert "run r is done with living ranks" in str(caught.value)
    assert "r/1 check said ready" in str(caught.value)
    assert "synced: version 1, ack 0, r/1 start" in str(caught.value)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (Record(assignment(), Phase.CHECKING), "without a check"),
        (Record(assignment(), Phase.STOPPED, alive=frozenset({STORE})), "is stopped, but"),
        (Record(assignment(), Phase.RUNNING, successor=assignment(generation=2)), "has a successor"),
    ],
    ids=["check", "stopped", "successor"],
)
def test_each_invariant_is_seen(record, words):
    assert words in broken_invariants(State(OFFER, runs={"r": record}))[0]


def test_the_story_is_bounded_and_leaves_steps_out():
    state, _ = play(*RUNNING, *[GraceOver("r", 9)] * 200, *[report(RANK0, kind="step", step=1)] * 3)
    assert len(state.history) == HISTORY_LENGTH
    assert state.history[-1] == "r/9 grace is over"


class Node(RuleBasedStateMachine):
    """An agent, its real processes as sets, and a service that may lose replies and requests."""

    def __init__(self):
        super().__init__()
        self.state = State(OFFER)
        self.processes: dict[tuple[str, int], set[Process]] = {}
        self.stored = []
        self.created = []
        self.wishes: dict[str, Assignment] = {}
        self.generations: dict[str, int] = {}
        self.steps: dict[tuple[str, int, Process], int] = {}

    def feed(self, stimulus):
        seen = self.state.outbox.next_sequence
        self.state, actions = step(self.state, stimulus)
        self.created += [event for event in self.state.outbox.events if event.sequence >= seen]
        for action in actions:
            key = (action.run, action.generation)
            if isinstance(action, Start):
                others = [k for k, alive in self.processes.items() if alive and k[0] == action.run and k != key]
                assert not others, "two generations of one run at once"
                assert action.process not in self.processes.setdefault(key, set())
                self.processes[key].add(action.process)

    @initialize(hosts=st.booleans())
    def first(self, hosts):
        self.hosts = hosts

    @rule(run=st.sampled_from("pq"), phase=st.sampled_from(["prepare", "start", "stop"]), newer=st.booleans())
    def wish(self, run, phase, newer):
        generation = self.generations.get(run, 0) + (newer or run not in self.wishes)
        self.generations[run] = generation
        address = "h:1" if phase == "start" else None
        self.wishes[run] = assignment(
            phase, run=run, generation=generation, hosts_store=self.hosts, store_address=address
        )

    @rule(run=st.sampled_from("pq"))
    def withdraw(self, run):
        if (old := self.wishes.get(run)) is not None and old.phase == "stop":
            del self.wishes[run]

    @rule(request_lost=st.booleans(), reply_lost=st.booleans(), max_bytes=st.sampled_from([1, 100, 10**6]))
    def sync(self, request_lost, reply_lost, max_bytes):
        seen = self.state.outbox.next_sequence
        box, events = self.state.outbox.take(max_bytes)
        self.state = replace(self.state, outbox=box)
        self.created += [event for event in box.events if event.sequence >= seen]
        if request_lost:
            return
        ack = self.stored[-1].sequence if self.stored else 0
        self.stored += [event for event in events if event.sequence > ack]
        if not reply_lost:
            ack = self.stored[-1].sequence if self.stored else 0
            self.feed(synced(*self.wishes.values(), ack=ack))

    def living(self):
        return [(run, generation, p) for (run, generation), alive in self.processes.items() for p in sorted(alive)]

    @precondition(lambda self: self.living())
    @rule(data=st.data(), kind=st.sampled_from(["ready", "step", "trace", "done", "failed", "refused"]))
    def speak(self, data, kind):
        run, generation, process = data.draw(st.sampled_from(self.living()))
        key = (run, generation, process)
        number = self.steps[key] = self.steps.get(key, -1) + (kind == "step")
        message = {"kind": kind, "address": "h:1", "reason": "closed by peer", "step": max(0, number)}
        self.feed(ChildMessage(run, generation, process, message))

    @precondition(lambda self: self.living())
    @rule(data=st.data(), code=st.sampled_from([0, 1, -9, -15]))
    def die(self, data, code):
        run, generation, process = data.draw(st.sampled_from(self.living()))
        self.processes[run, generation].remove(process)
        self.feed(Exited(run, generation, process, code, ("last words",)))

    @rule(run=st.sampled_from("pq"), generation=st.integers(1, 3))
    def grace(self, run, generation):
        self.feed(GraceOver(run, generation))

    @invariant()
    def the_state_knows_every_process(self):
        expected = {
            (run, record.generation): set(record.alive) for run, record in self.state.runs.items() if record.alive
        }
        assert expected == {key: alive for key, alive in self.processes.items() if alive}

    @invariant()
    def no_event_is_lost_and_each_has_its_own_number(self):
        kept = self.stored + [event for event in self.state.outbox.events if event not in self.stored]
        assert kept == self.created
        assert [event.sequence for event in self.created] == list(range(1, len(self.created) + 1))

    @invariant()
    def progress_does_not_pile_up(self):
        waiting = [event for event in self.state.outbox.events if event.kind == "progress"]
        others = [event for event in self.state.outbox.events if event.kind != "progress"]
        assert len(waiting) <= 2 * (len(others) + 2)

    @invariant()
    def each_generation_ends_and_fails_at_most_once(self):
        for kind in ("stopped", "rank_failed", "started", "prepared"):
            ends = [(event.run, event.generation) for event in self.created if event.kind == kind]
            assert len(ends) == len(set(ends)), kind

    @invariant()
    def only_ranks_fail(self):
        assert {event.data["rank"] for event in self.created if event.kind == "rank_failed"} <= {0, 1}

    def teardown(self):
        self.wishes = {}
        self.sync(False, False, 10**6)
        for run, generation, process in self.living():
            self.processes[run, generation].remove(process)
            self.feed(Exited(run, generation, process, -15))
        assert self.state.runs == {}
        begun = {(event.run, event.generation) for event in self.created}
        assert begun == {(event.run, event.generation) for event in self.created if event.kind == "stopped"}


Node.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestNode = Node.TestCase
