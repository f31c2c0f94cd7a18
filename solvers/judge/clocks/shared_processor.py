"""The clock of pipelines that share their devices' processors, event by event (rules: ``judge/shared_processor.py``).

Each device has a clock, which advances at the speed of its operations; an operation is done when that clock has
advanced by its duration. Clocks count ``SPEED`` ticks a nanosecond, so speeds and clocks are integers. Stage s is stage
``s % K`` of pipeline ``s // K``; flow 2 s + direction has its transfers.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.solvers.compiled.decorators import compiled, inner, loop
from penstock.solvers.costs.utilisation import WHOLE

SPEED = 720_720
"""Ticks of a device's clock in a nanosecond at full speed: 1/n of it is a whole number for up to 16 pipelines."""

NEVER_TICKS = 2**62
"""The tick of events that never happen: ticks are finer than the nanoseconds of ``costs.infinity``."""

FLYING, TOUCHED, WAITING, CHANGED = 0, 1, 2, 3


class Shared(NamedTuple):
    """The operations and transfers: S stages, K devices, M micro-batches, F = 2 S flows.

    A stage has n = 2 M operations and a step. ``duration`` and ``share`` (S, n + 1): for each operation in the order of
    its stage's row, the step last. ``way`` and ``batch`` (S, n): forward 0 or backward 1, and micro-batch. ``flow_ns``
    (F, M): -1 where nothing travels.
    """

    num_devices: int
    num_resources: int
    duration: np.ndarray
    share: np.ndarray
    way: np.ndarray
    batch: np.ndarray
    flow_ns: np.ndarray
    resource_start: np.ndarray
    resources: np.ndarray


class ProcessorState(NamedTuple):
    """The state of the simulation.

    Each device has a ``clock``, valid since ``since``, a ``speed`` and the next end of an operation (``finish``). Each
    lane (one per stage) has a ``position``, whether an operation is ``running``, and the device's clock at its end
    (``due``). Each flow has a queue from ``head`` to ``tail``. ``size`` counts transfers on their way, touched lanes,
    whose next operation may be able to start, and flows with waiting transfers; its last entry is 1 if a transfer may
    be able to start. A clock stands still, at 0, while nothing runs.
    """

    start: np.ndarray
    end: np.ndarray
    sent: np.ndarray
    arrival: np.ndarray
    clock: np.ndarray
    since: np.ndarray
    speed: np.ndarray
    finish: np.ndarray
    position: np.ndarray
    running: np.ndarray
    due: np.ndarray
    arrived: np.ndarray
    queue: np.ndarray
    ready: np.ndarray
    head: np.ndarray
    tail: np.ndarray
    in_use: np.ndarray
    fly_end: np.ndarray
    fly_flow: np.ndarray
    fly_batch: np.ndarray
    touched: np.ndarray
    is_touched: np.ndarray
    waiting: np.ndarray
    size: np.ndarray


@compiled
def run_sharing(shared: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return start and end of operations (S, n + 1), start and end of transfers (F, M), and positions of lanes.

    Transfers that do not exist have -1. A lane whose position is not n + 1 waits for ever.
    """
    stages, operations = shared.duration.shape
    flows, batches = shared.flow_ns.shape
    state = ProcessorState(
        np.full((stages, operations), -1, dtype=np.int64),
        np.full((stages, operations), -1, dtype=np.int64),
        np.full((flows, batches), -1, dtype=np.int64),
        np.full((flows, batches), -1, dtype=np.int64),
        np.zeros(shared.num_devices, dtype=np.int64),
        np.zeros(shared.num_devices, dtype=np.int64),
        np.zeros(shared.num_devices, dtype=np.int64),
        np.full(shared.num_devices, NEVER_TICKS, dtype=np.int64),
        np.zeros(stages, dtype=np.int64),
        np.zeros(stages, dtype=np.bool_),
        np.zeros(stages, dtype=np.int64),
        np.zeros((flows, batches), dtype=np.bool_),
        np.zeros((flows, batches), dtype=np.int64),
        np.zeros((flows, batches), dtype=np.int64),
        np.zeros(flows, dtype=np.int64),
        np.zeros(flows, dtype=np.int64),
        np.zeros(shared.num_resources, dtype=np.bool_),
        np.zeros(flows * batches + 1, dtype=np.int64),
        np.zeros(flows * batches + 1, dtype=np.int64),
        np.zeros(flows * batches + 1, dtype=np.int64),
        np.zeros(stages, dtype=np.int64),
        np.zeros(stages, dtype=np.bool_),
        np.zeros(flows, dtype=np.int64),
        np.zeros(4, dtype=np.int64),
    )
    _run(shared, state)
    return state.start, state.end, state.sent, state.arrival, state.position


@loop
def _run(shared: Any, state: ProcessorState) -> None:
    for s in range(state.position.size):
        _touch(state, s)
    _start_operations(shared, state, 0)
    while True:
        now = _next_instant(shared, state)
        if now == NEVER_TICKS:
            return
        for d in range(shared.num_devices):
            if state.finish[d] == now:
                _end_operations(shared, state, d, now)
        _end_transfers(shared, state, now)
        _start_transfers(shared, state, now)
        _start_operations(shared, state, now)


@inner
def _touch(state: ProcessorState, s: int) -> None:
    if not state.is_touched[s]:
        state.is_touched[s] = True
        state.touched[state.size[TOUCHED]] = s
        state.size[TOUCHED] += 1


@inner
def _arrive(state: ProcessorState, flow: int, m: int) -> None:
    """Let a transfer arrive at the next stage, or at the previous one."""
    state.arrived[flow, m] = True
    _touch(state, flow // 2 + 1 - 2 * (flow % 2))


@inner
def _next_instant(shared: Any, state: ProcessorState) -> Any:
    now = NEVER_TICKS
    for d in range(shared.num_devices):
        now = min(now, state.finish[d])
    for k in range(state.size[FLYING]):
        now = min(now, state.fly_end[k])
    return now


@inner
def _advance(state: ProcessorState, d: int, now: int) -> None:
    """Bring a device's clock up to an instant."""
    state.clock[d] += (now - state.since[d]) * state.speed[d]
    state.since[d] = now


@inner
def _set_speed(shared: Any, state: ProcessorState, d: int) -> None:
    """Set a device's speed from now on, and when the first of its running operations will end, rounded up."""
    total, first = 0, NEVER_TICKS
    runs = False
    for s in range(d, state.position.size, shared.num_devices):
        if state.running[s]:
            total += shared.share[s, state.position[s]]
            first = min(first, state.due[s]) if runs else state.due[s]
            runs = True
    if not runs:
        state.clock[d], state.speed[d], state.finish[d] = 0, 0, NEVER_TICKS
    else:
        speed = SPEED if total <= WHOLE else SPEED * WHOLE // total
        state.speed[d] = speed
        state.finish[d] = state.since[d] + max(0, -((state.clock[d] - first) // speed))


@inner
def _end_operations(shared: Any, state: ProcessorState, d: int, now: int) -> None:
    _advance(state, d, now)
    for s in range(d, state.position.size, shared.num_devices):
        if state.running[s] and state.due[s] <= state.clock[d]:
            i = state.position[s]
            state.running[s] = False
            state.end[s, i] = now
            state.position[s] = i + 1
            _touch(state, s)
            if i < shared.batch.shape[1]:
                _pass_on(shared, state, 2 * s + shared.way[s, i], shared.batch[s, i], now)
    _set_speed(shared, state, d)


@inner
def _pass_on(shared: Any, state: ProcessorState, flow: int, m: int, now: int) -> None:
    """Queue an output for the other stage; at one instant by micro-batch."""
    if shared.flow_ns[flow, m] < 0:
        last = shared.num_devices - 1
        if (flow // 2) % shared.num_devices != (last if flow % 2 == 0 else 0):
            _arrive(state, flow, m)
        return
    at = state.tail[flow]
    if at == state.head[flow]:
        state.waiting[state.size[WAITING]] = flow
        state.size[WAITING] += 1
    while at > state.head[flow] and state.ready[flow, at - 1] == now and state.queue[flow, at - 1] > m:
        state.queue[flow, at], state.ready[flow, at] = state.queue[flow, at - 1], now
        at -= 1
    state.queue[flow, at], state.ready[flow, at] = m, now
    state.tail[flow] += 1
    state.size[CHANGED] = 1


@inner
def _end_transfers(shared: Any, state: ProcessorState, now: int) -> None:
    k = 0
    while k < state.size[FLYING]:
        if state.fly_end[k] != now:
            k += 1
            continue
        flow = state.fly_flow[k]
        _arrive(state, flow, state.fly_batch[k])
        state.size[CHANGED] = 1
        for r in range(shared.resource_start[flow], shared.resource_start[flow + 1]):
            state.in_use[shared.resources[r]] = False
        state.size[FLYING] -= 1
        last = state.size[FLYING]
        state.fly_end[k] = state.fly_end[last]
        state.fly_flow[k] = state.fly_flow[last]
        state.fly_batch[k] = state.fly_batch[last]


@inner
def _start_transfers(shared: Any, state: ProcessorState, now: int) -> None:
    """Start, one after the other, the waiting transfer of the least key whose resources are all free."""
    if not state.size[CHANGED]:
        return
    state.size[CHANGED] = 0
    while True:
        chosen, place, earliest = -1, -1, NEVER_TICKS
        for k in range(state.size[WAITING]):
            flow = state.waiting[k]
            ready = state.ready[flow, state.head[flow]]
            if ready > earliest or (ready == earliest and flow > chosen):
                continue
            free = True
            for r in range(shared.resource_start[flow], shared.resource_start[flow + 1]):
                free = free and not state.in_use[shared.resources[r]]
            if free:
                chosen, place, earliest = flow, k, ready
        if chosen < 0:
            return
        m = state.queue[chosen, state.head[chosen]]
        state.head[chosen] += 1
        if state.head[chosen] == state.tail[chosen]:
            state.size[WAITING] -= 1
            state.waiting[place] = state.waiting[state.size[WAITING]]
        for r in range(shared.resource_start[chosen], shared.resource_start[chosen + 1]):
            state.in_use[shared.resources[r]] = True
        end = now + shared.flow_ns[chosen, m]
        state.sent[chosen, m], state.arrival[chosen, m] = now, end
        k = state.size[FLYING]
        state.fly_end[k], state.fly_flow[k], state.fly_batch[k] = end, chosen, m
        state.size[FLYING] += 1


@inner
def _start_operations(shared: Any, state: ProcessorState, now: int) -> None:
    for k in range(state.size[TOUCHED]):
        s = state.touched[k]
        state.is_touched[s] = False
        i = state.position[s]
        if state.running[s] or i == shared.duration.shape[1] or not _has_input(shared, state, s, i):
            continue
        d = s % shared.num_devices
        _advance(state, d, now)
        state.running[s] = True
        state.start[s, i] = now
        state.due[s] = state.clock[d] + shared.duration[s, i] * SPEED
        _set_speed(shared, state, d)
    state.size[TOUCHED] = 0


@inner
def _has_input(shared: Any, state: ProcessorState, s: int, i: int) -> Any:
    """Return whether the input of a lane's next operation has arrived; a step and a pipeline's two ends need none."""
    if i == shared.batch.shape[1]:
        return True
    k, m = s % shared.num_devices, shared.batch[s, i]
    if shared.way[s, i] == 0:
        return k == 0 or state.arrived[2 * (s - 1), m]
    return k == shared.num_devices - 1 or state.arrived[2 * (s + 1) + 1, m]
