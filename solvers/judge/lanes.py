"""Rows of a schedule as *lanes*, and the state in which the event clock begins to time them.

The devices of a lane hold the same stages and run the same operations at the same time, with the times of the slowest
replica. A *slot* is one stage on one lane; slots are numbered by stage, then lane, so that slot = stage when every
stage lies on one lane.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.schemas.errors import InvalidPlan
from penstock.schemas.program import KINDS, RECOMPUTE
from penstock.solvers.compiled.fields import Fields
from penstock.solvers.costs.reductions import Chains
from penstock.solvers.costs.ties import Ties
from penstock.solvers.judge.clocks.state import NOWHERE, TOUCHED, ClockState, lanes_of_rounds, waits_of_halts
from penstock.solvers.judge.operation_tables import FlowTables, Tables
from penstock.solvers.judge.scan_kernel import DUPLICATE, EARLY, GOOD, OUT_OF_ROUND, Scan, find_missing, scan_lane
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem, prefix_sums
from penstock.solvers.model.schedule import STEP, Orders


@Fields.register
class LaneTables(NamedTuple):
    """Arrays for kernels; N operations, L lanes, K slots.

    ``row`` (N,) is each operation's line in ``table`` (12 K, 8), whose columns ``operation_tables`` explains; ``batch``
    (N,) its micro-batch. ``first_gradient`` and ``last_gradient`` are by slot and round, slot k's from
    ``round_start[k]`` on (-1: none); a flushed step is one round. ``clocks.ties`` explains halts and their ties.
    """

    batch: np.ndarray
    lane_start: np.ndarray
    slot_of: np.ndarray
    slot_start: np.ndarray
    slot_lane: np.ndarray
    slot_replica: np.ndarray
    slot_replicas: np.ndarray
    row: np.ndarray
    table: np.ndarray
    round_start: np.ndarray
    first_gradient: np.ndarray
    last_gradient: np.ndarray
    lanes_needed: np.ndarray
    halt_start: np.ndarray
    halt_tie: np.ndarray
    tie_start: np.ndarray
    tie_halt: np.ndarray


@Fields.register
class Starts(NamedTuple):
    """Starts of operations, and of transfers flow by flow as they were sent, with their micro-batches (``order``)."""

    start: np.ndarray
    sent: np.ndarray
    order: np.ndarray


@dataclass(frozen=True, eq=False)
class Lanes:
    """The lanes of a schedule, checked: every operation of a lane's stages exactly once, in a possible order."""

    devices: tuple[tuple[int, ...], ...]
    slots: tuple[tuple[int, ...], ...]
    slot_stage: tuple[int, ...]
    apart: tuple[bool, ...]
    rows: tuple[np.ndarray, ...]
    arrays: LaneTables

    @property
    def one_lane_per_stage(self) -> bool:
        """Return whether no stage is on several lanes."""
        return len(self.slot_stage) + 1 == len(self.arrays.slot_start)


def make_lanes(tables: Tables, orders: Orders) -> Lanes:
    """Return the rows of ``orders`` as lanes.

    Raises InvalidPlan where rows and allocation do not fit, or operations are missing, doubled or out of order.
    """
    allocation, problem = tables.allocation, tables.problem
    stages_of_lane = _held_stages(problem, allocation, orders)
    pairs = sorted((s, lane) for lane, stages in enumerate(stages_of_lane) for s in stages)
    slot_of = np.full((len(stages_of_lane), len(allocation.stages)), -1, dtype=np.int32)
    for slot, (s, lane) in enumerate(pairs):
        slot_of[lane, s] = slot
    parts = [np.ascontiguousarray(row.operations, dtype=np.int32).reshape(-1, 3) for row in orders.rows]
    lane_start = prefix_sums([len(part) for part in parts])
    apart = _recomputes_apart(allocation, pairs, parts)
    replica, replicas = _replicas(allocation, orders, pairs)
    per_stage = np.bincount([s for s, _lane in pairs], minlength=len(allocation.stages))
    rounds = -(-allocation.num_micro_batches // tables.chains.every)[[s for s, _lane in pairs]]
    arrays = LaneTables(
        batch=np.empty(lane_start[-1], dtype=np.int32),
        lane_start=lane_start,
        slot_of=slot_of,
        slot_start=prefix_sums(per_stage),
        slot_lane=np.asarray([lane for _s, lane in pairs], dtype=np.int32),
        slot_replica=replica,
        slot_replicas=replicas,
        row=np.empty(lane_start[-1], dtype=np.int32),
        table=_operation_lines(tables, pairs, apart),
        round_start=prefix_sums(rounds),
        first_gradient=np.full(rounds.sum(), -1, dtype=np.int64),
        last_gradient=np.full(rounds.sum(), -1, dtype=np.int64),
        lanes_needed=np.asarray(
            [n if stage.dispatch == "rows" else 1 for n, stage in zip(per_stage, allocation.stages, strict=True)],
            dtype=np.int64,
        ),
        **_halts(tables, stages_of_lane, slot_of, len(pairs)),
    )
    lanes = Lanes(
        devices=tuple(row.devices for row in orders.rows),
        slots=tuple(tuple(int(slot_of[lane, s]) for s in stages) for lane, stages in enumerate(stages_of_lane)),
        slot_stage=tuple(s for s, _lane in pairs),
        apart=tuple(apart),
        rows=tuple(parts),
        arrays=arrays,
    )
    _check_operations(tables, lanes)
    return lanes


def _held_stages(problem: Problem, allocation: Allocation, orders: Orders) -> list[tuple[int, ...]]:
    """Return the stages of each row's devices; every device that holds a stage is in exactly one row."""
    holds, seen = allocation.held_stages, set[int]()
    result = []
    for number, row in enumerate(orders.rows):
        for device in row.devices:
            if device in seen:
                name = problem.devices[device].name
                raise InvalidPlan(f"Device {name} is in two rows of schedule {orders.name}.")
            if device not in holds:
                name = problem.devices[device].name
                raise InvalidPlan(f"Row {number} of schedule {orders.name} names {name}, which holds no stage.")
            seen.add(device)
            if holds[device] != holds[row.devices[0]]:
                name = problem.devices[device].name
                first = problem.devices[row.devices[0]].name
                raise InvalidPlan(
                    f"Row {number} of schedule {orders.name}: {first} holds stages {list(holds[row.devices[0]])}, "
                    f"{name} holds {list(holds[device])}.",
                    remedy="give devices of different stages separate rows",
                )
        result.append(holds[row.devices[0]])
    if missing := sorted(set(holds) - seen):
        name = problem.devices[missing[0]].name
        raise InvalidPlan(
            f"Device {name} holds stage {holds[missing[0]][0]}, but schedule {orders.name} has no row for it."
        )
    return result


def _halts(
    tables: Tables, stages_of_lane: list[tuple[int, ...]], slot_of: np.ndarray, slots: int
) -> dict[str, np.ndarray]:
    """Return where lanes wait for ties: after their rows, or before the step of the lowest stage with a copy."""
    ties_of: list[list[int]] = [[] for _ in range(slots if tables.periodic else len(stages_of_lane))]
    halts_of: list[list[int]] = [[] for _ in tables.sums]
    for k, tie in enumerate(tables.sums):
        for lane, stages in enumerate(stages_of_lane):
            users = [s for s in stages if s in tie.stages]
            if users:
                halt = int(slot_of[lane, users[0]]) if tables.periodic else lane
                ties_of[halt].append(k)
                halts_of[k].append(halt)
    arrays = {}
    for name, start, lists in (("halt_tie", "halt_start", ties_of), ("tie_halt", "tie_start", halts_of)):
        arrays[start] = prefix_sums([len(each) for each in lists])
        arrays[name] = np.asarray([number for each in lists for number in each], dtype=np.int64)
    return arrays


def _recomputes_apart(allocation: Allocation, pairs: list[tuple[int, int]], parts: list[np.ndarray]) -> list[bool]:
    """Return for each slot whether its row has R operations for the stage."""
    if not any(stage.recomputes for stage in allocation.stages):
        return [False] * len(pairs)
    recomputed = [set(part[part[:, 0] == RECOMPUTE, 1].tolist()) for part in parts]
    return [s in recomputed[lane] for s, lane in pairs]


def _operation_lines(tables: Tables, pairs: list[tuple[int, int]], apart: list[bool]) -> np.ndarray:
    stages = [s for s, _lane in pairs]
    lines = tables.operations[stages]
    if any(apart):
        lines = np.where(np.asarray(apart)[:, None, None, None], tables.operations_apart[stages], lines)
    return np.ascontiguousarray(lines.reshape(-1, lines.shape[-1]))


def _replicas(allocation: Allocation, orders: Orders, pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return each slot's replica number and count for round-robin stages; 0 of 1 where rows are shared."""
    replica, replicas = [], []
    for s, lane in pairs:
        stage, devices = allocation.stages[s], orders.rows[lane].devices
        shared = stage.dispatch == "rows"
        if not shared and len(devices) > 1:
            raise InvalidPlan(
                f"Stage {s} takes micro-batches in turn, but {len(devices)} of its devices share a row.",
                remedy="give each replica of a round-robin stage its own row",
            )
        replica.append(0 if shared else stage.devices.index(devices[0]))
        replicas.append(1 if shared else stage.replicas)
    return np.asarray(replica, dtype=np.int32), np.asarray(replicas, dtype=np.int32)


def _check_operations(tables: Tables, lanes: Lanes) -> None:
    flows, arrays = tables.flows, lanes.arrays
    count = np.diff(flows.base)
    base = prefix_sums(count[list(lanes.slot_stage)])
    scan = Scan(
        first=flows.first,
        batches=count,
        slot_replica=arrays.slot_replica,
        slot_replicas=arrays.slot_replicas,
        slot_base=base,
        marks=np.zeros(base[-1], dtype=np.uint8),
        row=arrays.row,
        batch=arrays.batch,
        first_gradient=arrays.first_gradient,
        last_gradient=arrays.last_gradient,
        periodic=tables.periodic,
        every=tables.chains.every,
        round_start=arrays.round_start,
        stepped=np.zeros(len(lanes.slot_stage), dtype=np.int64),
        seen=np.zeros((len(lanes.slot_stage), len(KINDS)), dtype=np.int64),
    )
    for lane, operations in enumerate(lanes.rows):
        status, at = scan_lane(scan, operations, arrays.slot_of[lane], int(arrays.lane_start[lane]), flows.cut)
        if status != GOOD:
            raise InvalidPlan(_what_is_wrong(tables, lanes, int(status), lane, int(at)))
    _check_counts(tables, lanes, scan)
    if tables.periodic:
        _check_steps(tables, lanes, scan)


def _check_counts(tables: Tables, lanes: Lanes, scan: Scan) -> None:
    turns = zip(scan.slot_replica.tolist(), scan.slot_replicas.tolist(), scan.seen.tolist(), strict=True)
    for slot, (turn, replicas, (forward, backward, split, weight, again)) in enumerate(turns):
        s = lanes.slot_stage[slot]
        batches = tables.allocation.micro_batches(s)
        want = len(range(batches.start + (turn - batches.start) % replicas, batches.stop, replicas))
        good = forward == want and backward + split == want and weight == split
        if good and again in ((want,) if lanes.apart[slot] else (0, want)):
            continue
        m, kind = find_missing(scan, slot, s, lanes.apart[slot] or again > 0)
        name = tables.problem.devices[lanes.devices[int(lanes.arrays.slot_lane[slot])][0]].name
        raise InvalidPlan(f"{KINDS[kind]}{m} of stage {s} is missing in the row of {name}.")


def _check_steps(tables: Tables, lanes: Lanes, scan: Scan) -> None:
    for slot, s in enumerate(lanes.slot_stage):
        every, stepped = int(scan.every[s]), int(scan.stepped[slot])
        if stepped < tables.allocation.num_micro_batches // every:
            name = tables.problem.devices[lanes.devices[int(lanes.arrays.slot_lane[slot])][0]].name
            last = (stepped + 1) * every - 1
            raise InvalidPlan(
                f"The optimizer step of stage {s} after micro-batch {last} is missing in the row of {name}."
            )


def operation_name(kind: int, s: int, m: int) -> str:
    """Return the name of an operation in messages."""
    if kind == STEP:
        return f"The optimizer step of stage {s} after micro-batch {m}"
    return f"{KINDS[kind]}{m} of stage {s}" if 0 <= kind < STEP else f"Operation kind {kind}"


def _what_is_wrong(tables: Tables, lanes: Lanes, status: int, lane: int, at: int) -> str:
    what = operation_name(*(int(v) for v in lanes.rows[lane][at]))
    where = f"the row of {tables.problem.devices[lanes.devices[lane][0]].name}"
    if status == DUPLICATE:
        return f"{what} is twice in {where}."
    if status == EARLY:
        return f"{what} is out of order in {where}: F comes before B or I, I before W, R between F and B or I."
    if status == OUT_OF_ROUND:
        return (
            f"{what} is out of order in {where}: the gradients of a round have to run between the previous step "
            "and its step."
        )
    return f"{what} is in {where}, whose devices do not run it."


def new_state(flows: FlowTables, chains: Chains, ties: Ties, lanes: LaneTables) -> ClockState:
    """Return the initial state of the event clock.

    No kernel creates it, since kernels that allocate many arrays are slow to compile.
    """
    num_lanes, num_flows, num_chains = len(lanes.lane_start) - 1, len(flows.flow_ns), len(chains.stage)
    num_ties, halts, resources = len(ties.tie_ns), len(lanes.halt_start) - 1, len(flows.watch_start) - 1
    users, watch = num_flows + num_chains + num_ties, int(flows.watch_start[-1])
    transfers, routes = int(flows.flow_offset[-1]), flows.resource_start[: num_flows + 1]
    at_once = transfers if (routes[1:] == routes[:-1]).any() else 0
    events = num_lanes + users + num_chains + at_once + 1
    closing = lanes_of_rounds(chains, lanes)
    words, word = _parts(
        np.int64,
        {
            **dict.fromkeys(("event_time", "event_code"), events),
            **dict.fromkeys(("position", "time", "touched"), num_lanes),
            **dict.fromkeys(("head", "tail"), num_flows),
            **dict.fromkeys(("where", "fresh"), users),
            **dict.fromkeys(("watch_first", "watch_second"), watch),
            **dict.fromkeys(("watch_size", "freed"), resources),
            **dict.fromkeys(("candidate_first", "candidate_second"), users + resources + 1),
            **dict.fromkeys(("bucket", "bucket_round"), num_chains),
            **dict.fromkeys(("closing", "closing_place"), len(lanes.slot_lane)),
            **dict.fromkeys(("halt_left", "halt_next"), halts),
            **dict.fromkeys(("tie_left", "tie_round", "tie_ready"), num_ties),
            "size": TOUCHED + 1,
            "bucket_ready": len(chains.bucket_ns),
            "lanes_left": len(closing),
        },
    )
    marks = {"busy": num_lanes, "is_touched": num_lanes, "in_use": resources, "halt_passed": halts}
    flags, flag = _parts(np.bool_, {**marks, "arrived": flows.places})
    word["position"][:] = lanes.lane_start[:-1]
    word["head"][:] = word["tail"][:] = flows.flow_offset[:-1]
    word["where"][:] = NOWHERE
    word["bucket"][:] = chains.start[:-1]
    word["lanes_left"][:] = closing
    word["closing_place"][:] = lanes.round_start[:-1] - 1
    word["halt_left"][:] = waits_of_halts(chains, ties, lanes) if num_ties else 1
    word["tie_left"][:] = lanes.tie_start[1:] - lanes.tie_start[:-1]
    return ClockState(
        words=words,
        flags=flags,
        start=np.empty(len(lanes.batch), np.int64),
        done=np.zeros(2 * int(flows.base[-1]), np.uint16),
        sent=np.full(transfers, -1, np.int64),
        order=np.empty(transfers, np.int32),
        bucket_start=np.full(int(chains.run_start[num_chains]), -1, np.int64),
        tie_start=np.full(int(ties.run_start[num_ties]), -1, np.int64),
        **word,
        **flag,
    )


def _parts(dtype: type, sizes: dict[str, int]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return an array of zeros, and its parts by name."""
    whole: np.ndarray = np.zeros(sum(sizes.values()), dtype)
    parts, at = {}, 0
    for name, size in sizes.items():
        parts[name] = whole[at : at + size]
        at += size
    return whole, parts
