"""The agent's state machine under every short history: all orders of replies, words and deaths, of two generations.

After each step the machine checks itself (`broken_invariants`); here are the promises that need the whole history.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from penstock.executor.node.agent_state import Offer, Phase, State
from penstock.executor.node.state import step
from penstock.executor.node.stimuli import (
    CHECK,
    STORE,
    Action,
    ChildMessage,
    Drain,
    Exited,
    GraceOver,
    Process,
    Start,
    Stimulus,
    Synced,
)
from penstock.schemas.api.agents import Assignment, RankPrograms, SyncReply, digest_of

RANK = Process("rank", 0)
OFFER = Offer("a", frozenset({"a/0"}), {"toy": "toys:job"})
PROGRAM = {"rank": 0}


def wish(phase: str, generation: int, *, hosts_store: bool, save: bool = False) -> Assignment:
    return Assignment(
        run="r",
        generation=generation,
        phase=phase,
        plan_hash="sha256:" + 64 * "0",
        digest=digest_of([PROGRAM]),
        model="toy",
        world_size=1,
        steps=3,
        seed=0,
        check=False,
        trace_steps=0,
        save=save,
        hosts_store=hosts_store,
        store_address=None if hosts_store else "h:1",
        ranks=() if phase == "stop" else (RankPrograms(rank=0, device="a/0", programs=(PROGRAM,)),),
        layers=("x",),
    )


def replies(*, hosts_store: bool) -> list[Stimulus]:
    """Return every answer that the service may give, late and out of order included."""
    wishes = [
        (),
        *((wish(phase, g, hosts_store=hosts_store),) for g in (1, 2) for phase in ("prepare", "start", "stop")),
    ]
    return [Synced(SyncReply(state_version=1, assignments=assignments, ack=0)) for assignments in wishes]


def others() -> list[Stimulus]:
    """Return what children and timers may report, for both generations, alive or not; and a request to leave."""
    stimuli: list[Stimulus] = [Drain("it was asked to end")]
    for g in (1, 2):
        stimuli += [
            ChildMessage("r", g, CHECK, {"kind": "ready"}),
            ChildMessage("r", g, STORE, {"kind": "ready", "address": "h:1"}),
        ]
        stimuli += [
            ChildMessage("r", g, RANK, {"kind": kind, "reason": "x"}) for kind in ("ready", "done", "failed", "left")
        ]
        stimuli += [GraceOver("r", g)]
    return stimuli


@dataclass
class History:
    """A history so far: the state, the real processes, and all events and starts."""

    state: State = field(default_factory=lambda: State(OFFER))
    living: frozenset[tuple[int, Process]] = frozenset()
    events: tuple[tuple[str, int], ...] = ()
    begun: frozenset[int] = frozenset()

    def after(self, stimulus: Stimulus) -> History:
        if isinstance(stimulus, Exited):
            assert (stimulus.generation, stimulus.process) in self.living
        seen = self.state.outbox.next_sequence
        state, actions = step(self.state, stimulus)
        living = set(self.living)
        if isinstance(stimulus, Exited):
            living.discard((stimulus.generation, stimulus.process))
        for action in actions:
            refuse_beside_another_generation(action, living)
            if isinstance(action, Start):
                assert (action.generation, action.process) not in living
                living.add((action.generation, action.process))
        news = [(event.kind, event.generation) for event in state.outbox.events if event.sequence >= seen]
        starts = {action.generation for action in actions if isinstance(action, Start) and action.process == RANK}
        ended = {generation for kind, generation in news if kind == "stopped"}
        history = History(state, frozenset(living), (*self.events, *news), (self.begun | starts) - ended)
        history.refuse_broken_promises(starts & self.begun)
        return history

    def refuse_broken_promises(self, begun_again: set[int]) -> None:
        record = self.state.runs.get("r")
        expected = {(record.generation, process) for process in record.alive} if record is not None else set()
        assert expected == self.living, "the state does not know its processes"
        assert not begun_again, "ranks of one generation were started twice"
        for generation in (1, 2):
            mine = [kind for kind, of in self.events if of == generation]
            lives = " ".join(mine).split("stopped")  # what is listed again after it has been forgotten is a new one
            for kind in ("prepared", "refused", "started", "rank_failed"):
                assert max(life.count(kind) for life in lives) <= 1, f"{kind} was told twice of generation {generation}"
        if record is not None and record.phase is Phase.STOPPED:
            assert not self.living

    def next_stimuli(self, alphabet: list[Stimulus]) -> Iterator[Stimulus]:
        yield from alphabet
        for generation, process in sorted(self.living):
            for code in (0, -9):
                yield Exited("r", generation, process, code, ("last words",))


@pytest.mark.cases(1)
@pytest.mark.parametrize("hosts_store", [False, True], ids=["a-node", "the-node-of-rank-0"])
def test_every_story_of_three_from_each_place_of_the_life_of_a_run(hosts_store):
    """From every state on a run's straight way, all sequences of three stimuli; then everything comes to an end."""
    alphabet = [*replies(hosts_store=hosts_store), *others()]
    say = [
        ChildMessage("r", 1, CHECK, {"kind": "ready"}),
        ChildMessage("r", 1, STORE, {"kind": "ready", "address": "h:1"}),
    ]
    straight = [
        alphabet[1],
        *say[: 1 + hosts_store],
        Exited("r", 1, CHECK, 0),
        alphabet[2],
        ChildMessage("r", 1, RANK, {"kind": "ready"}),
        ChildMessage("r", 1, RANK, {"kind": "done"}),
    ]
    history = History()
    seen: set[tuple[object, ...]] = set()
    number = 0
    for stimulus in (None, *straight):
        history = history if stimulus is None else history.after(stimulus)
        number += sum(1 for _ in stories(history, alphabet, 3, seen))
    assert number > 500, "states apart from each other that were reached"


def stories(history: History, alphabet: list[Stimulus], depth: int, seen: set[tuple[object, ...]]) -> Iterator[History]:
    """Yield the histories that follow within ``depth`` steps; states met with as many steps left are not continued."""
    key = (depth, repr(history.state.runs), history.state.draining, history.living, history.events)
    if key in seen:
        return
    seen.add(key)
    yield history
    refuse_endless(history)
    if depth:
        for stimulus in history.next_stimuli(alphabet):
            yield from stories(history.after(stimulus), alphabet, depth - 1, seen)


def refuse_endless(history: History) -> None:
    """Check the end from anywhere: the service withdraws the run, every process dies, and nothing is left."""
    history = history.after(Synced(SyncReply(state_version=9, assignments=(), ack=0)))
    while history.living:
        generation, process = min(history.living)
        history = history.after(Exited("r", generation, process, -9))
    assert history.state.runs == {}


def refuse_beside_another_generation(action: Action, living: set[tuple[int, Process]]) -> None:
    """Refuse to start a process of a generation while a process of another one lives (fencing)."""
    if isinstance(action, Start):
        assert {generation for generation, _ in living} <= {action.generation}, "two generations at once"
