"""Sums of tied parameters: when all ranks are ready, and when each goes on.

A *halt* is a place where a lane waits for ties: in a flushed step a lane, after its row; in a periodic plan a slot,
before its step. ``lanes.halt_tie[lanes.halt_start[h]:]`` are the ties of halt h in the order in which it sums them,
``lanes.tie_halt[lanes.tie_start[k]:]`` the halts of tie k.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.solvers.compiled.decorators import compiled, inner
from penstock.solvers.compiled.indices import never_negative
from penstock.solvers.judge.clocks.state import READY, ClockState, free, later, touch

never_negative(__name__)


@inner
def halt_ready(chains: Any, lanes: Any, state: ClockState, halt: int, t: int) -> None:
    """Record the end of one event that a halt awaits; after the last one it goes to its first tie."""
    state.halt_left[halt] -= 1
    if state.halt_left[halt] == 0 and lanes.halt_start[halt] < lanes.halt_start[halt + 1]:
        come_to_tie(chains, lanes, state, halt, t)


@inner
def come_to_tie(chains: Any, lanes: Any, state: ClockState, halt: int, t: int) -> None:
    """Let a halt reach its next tie; the tie is ready when its last halt has reached it."""
    k = lanes.halt_tie[lanes.halt_start[halt] + state.halt_next[halt]]
    state.tie_left[k] -= 1
    if state.tie_left[k] == 0:
        state.tie_ready[k] = t
        later(state, t, READY, chains.stage.size + k, 0)


@inner
def buckets_over(chains: Any, ties: Any, lanes: Any, state: ClockState, g: int, t: int) -> None:
    """Record the end of a chain's last bucket for the halts of its stages' lanes."""
    if ties.tie_ns.size == 0 or ties.periodic:
        return
    for s in range(chains.member_start.size - 1):
        for k in range(chains.member_start[s], chains.member_start[s + 1]):
            if chains.member_group[k] == g:
                for slot in range(lanes.slot_start[s], lanes.slot_start[s + 1]):
                    halt_ready(chains, lanes, state, lanes.slot_lane[slot], t)


@inner
def end_tie(flows: Any, chains: Any, ties: Any, lanes: Any, state: ClockState, k: int, t: int) -> None:
    """End a tie: each of its halts goes on to its next tie, or to its steps."""
    free(flows, state, flows.flow_ns.size + chains.stage.size + k)
    state.tie_round[k] += 1
    state.tie_left[k] = lanes.tie_start[k + 1] - lanes.tie_start[k]
    for i in range(lanes.tie_start[k], lanes.tie_start[k + 1]):
        halt = lanes.tie_halt[i]
        state.halt_next[halt] += 1
        if state.halt_next[halt] < lanes.halt_start[halt + 1] - lanes.halt_start[halt]:
            come_to_tie(chains, lanes, state, halt, t)
        elif ties.periodic:
            state.halt_next[halt] = 0
            state.halt_passed[halt] = True
            touch(state, lanes.slot_lane[halt])


@inner
def step_has_to_wait(chains: Any, ties: Any, lanes: Any, state: ClockState, slot: int, t: int) -> bool:
    """Return whether ties must be summed before a step in a row, which otherwise could begin now."""
    if not ties.periodic or lanes.halt_start[slot] == lanes.halt_start[slot + 1]:
        return False
    if state.halt_passed[slot]:
        state.halt_passed[slot] = False
        state.halt_left[slot] = 1
        return False
    if state.halt_left[slot] > 0:
        halt_ready(chains, lanes, state, slot, t)
    return True


@compiled
def tied_starts(chains: Any, ties: Any, lanes: Any, lane_ns: np.ndarray, bucket_start: np.ndarray) -> np.ndarray:
    """Return when the sum of each tie of a flushed step begins, on private links."""
    starts = np.zeros_like(ties.tie_ns)
    if ties.tie_ns.size == 0:
        return starts
    at = lane_ns.copy()
    for s in range(chains.member_start.size - 1):
        for k in range(chains.member_start[s], chains.member_start[s + 1]):
            g = chains.member_group[k]
            if chains.start[g] < chains.start[g + 1]:
                b = chains.start[g + 1] - 1
                end = bucket_start[b] + chains.bucket_ns[b]
                for slot in range(lanes.slot_start[s], lanes.slot_start[s + 1]):
                    at[lanes.slot_lane[slot]] = max(at[lanes.slot_lane[slot]], end)
    for k in range(ties.tie_ns.size):
        for i in range(lanes.tie_start[k], lanes.tie_start[k + 1]):
            starts[k] = max(starts[k], at[lanes.tie_halt[i]])
        for i in range(lanes.tie_start[k], lanes.tie_start[k + 1]):
            at[lanes.tie_halt[i]] = starts[k] + ties.tie_ns[k]
    return starts
