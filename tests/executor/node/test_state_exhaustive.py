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
    """Everything that the service may say, late and out of order included."""
    wishes = [
        (),
        *((wish(phase, g, hosts_store=hosts_store),) for g in (1, 2) for phase in ("prepare", "start", "stop")),
    ]
    return [Synced(SyncReply(state_version=1, assignments=assignments, ack=0)) for assignments in wishes]


def others() -> list[Stimulus]:
    """What children and timers may say, of both generations, whether they live or not; and being told to leave."""
    found: list[Stimulus] = [Drain("it was asked to end")]
    for g in (1, 2):
        found += [
            ChildMessage("r", g, CHECK, {"kind": "ready"}),
            ChildMessage("r", g, STORE, {"kind": "ready", "address": "h:1"}),
        ]
        found += [
            ChildMessage("r", g, RANK, {"kind": kind, "reason": "x"}) for kind in ("ready", "done", "failed", "left")
        ]
        found += [GraceOver("r", g)]
    return found


@dataclass
class Told:
    """A history so far: the state, the real processes, and what was ever told and started."""

    state: State = field(default_factory=lambda: State(OFFER))
    living: frozenset[tuple[int, Process]] = frozenset()
    events: tuple[tuple[str, int], ...] = ()
    begun: frozenset[int] = frozenset()

    def after(self, stimulus: Stimulus) -> Told:
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
        told = Told(state, frozenset(living), (*self.events, *news), (self.begun | starts) - ended)
        told.refuse_broken_promises(starts & self.begun)
        return told

    def refuse_broken_promises(self, begun_again: set[int]) -> None:
        record = self.state.runs.get("r")
        known = {(record.generation, process) for process in record.alive} if record is not None else set()
        assert known == self.living, "the state does not know its processes"
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
    """From every state on a run's straight way, all stories of three stimuli; then everything comes to an end."""
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
    told = Told()
    seen: set[tuple[object, ...]] = set()
    number = 0
    for stimulus in (None, *straight):
        told = told if stimulus is None else told.after(stimulus)
        number += sum(1 for _ in stories(told, alphabet, 3, seen))
    assert number > 500, "states apart from each other that were reached"


def stories(told: Told, alphabet: list[Stimulus], depth: int, seen: set[tuple[object, ...]]) -> Iterator[Told]:
    """All that can come of ``told`` in ``depth`` steps; a state that was met with as many steps left is not gone on."""
    key = (depth, repr(told.state.runs), told.state.draining, told.living, told.events)
    if key in seen:
        return
    seen.add(key)
    yield told
    refuse_endless(told)
    if depth:
        for stimulus in told.next_stimuli(alphabet):
            yield from stories(told.after(stimulus), alphabet, depth - 1, seen)


def refuse_endless(told: Told) -> None:
    """From anywhere: the service withdraws the run, every process dies, and nothing is left."""
    told = told.after(Synced(SyncReply(state_version=9, assignments=(), ack=0)))
    while told.living:
        generation, process = min(told.living)
        told = told.after(Exited("r", generation, process, -9))
    assert told.state.runs == {}


def refuse_beside_another_generation(action: Action, living: set[tuple[int, Process]]) -> None:
    """Fencing: nothing of a generation is started while something of another one lives."""
    if isinstance(action, Start):
        assert {generation for generation, _ in living} <= {action.generation}, "two generations at once"
