"""The judge's clock: when every operation, transfer, reduction and update of one step runs (ALGORITHMS A.1).

Devices run their rows in order. An operation starts when its lane is free and its input has arrived. F(s, m) needs the
activation of F(s-1, m); B(s, m) and I(s, m) need the gradient of B/I(s+1, m), on the last stage the lane's own F(s, m).
W follows I and R follows F on the same lane. A stage on several lanes has computed a micro-batch when all of them
have. Without R operations a recomputing stage's B (or I) takes the recomputation's time too.

One micro-batch over one edge in one direction is one transfer. In a shared network it needs all resources of its
route at once; in a private one its edge's channel: one for both directions (``half``), one per direction (``full``),
or a pure delay (``none``).

Gradients are added up by groups: a run of layers between stage boundaries of any pipeline, over all devices of the
stages that hold it (``reductions``). The buckets of a group run one after the other, each from when the last backward
of every lane of every stage of the group has passed its layers, over the resources of the group's ring (in a private
network over separate links); a device that holds the layers in several pipelines is in the ring once. Each pipeline
runs its range of the micro-batches; pipelines may share devices, whose rows then mix their operations.

Events of one instant have one order. First all that ends is ended. Then waiting transfers and buckets start in the
order of (ready time, stage, direction, micro-batch or bucket), each if all its resources are free at that moment; a
blocked one reserves nothing. Direction is 0 forward, 1 backward, 2 all-reduce, with its group's lowest stage and the
bucket's number over all groups of that stage, from its last layers down. Then operations start. This repeats while
something of zero duration has ended at the same instant.

A stage's optimizer step runs on each of its lanes after all the lane's operations and after the buckets of the
stage's groups; a lane with several stages steps in the order of their last backwards. The makespan is the latest end
of all.

The gradient of a parameter whose layers lie in different stages of a pipeline (a *tie*) is in no bucket: all devices of
the stages that hold any of its layers, in all pipelines, add it up in one all-reduce. A lane comes to its first tie
after all its operations and after the buckets of all its stages' groups, and to each later tie, in the order of the
profile, when the one before has ended; its steps follow the last. A tie is ready when all its lanes have come, and
waits for the resources of its ring like a bucket; ties are numbered after all buckets. In a periodic plan a lane comes
to its ties where the step of its lowest stage with a copy could start, once a round, and that step starts when the
last of them has ended. No rank sums ties under other rules than synchronous and double-buffered updates, so other
rules have no charge for ties.

A periodic schedule is judged as some global batches in one long step (``unroll``), by the same rules, with steps as
operations in the rows. *Round* t of stage s are its micro-batches [t E, (t+1) E), E = ``update_every[s]``; its chains
are ready as its last gradients pass, and STEP(s, m) starts when its lane is free and the last bucket of round m // E
has ended. In a row the gradients of a round are between its step and the one before. The time per global batch is the
steady state's. Let c(t) be the last end of a gradient of global batch t on any stage, from ``first`` to ``last``. The
global batches repeat after k rounds if c(t + k) - c(t) is always the same. The window is the last k rounds for the
smallest such k, a multiple of the rounds after which the pattern repeats, at most half of all rounds; without such a k
it is all rounds. The time is the window's length divided by k, rounded up; busy and communication times are the
window's, divided and rounded down.

Memory. A micro-batch's stash counts from its F's start to its B's end. With split backwards it counts to W's end, and
so do the received tensors; no profile splits a stash into a part that I frees and a part that W needs. Receive buffers
count from when their row posts them to the end of the backward that reads them. A row posts a receive (decision 6)
before the later of the previous operation of the same stage and direction and the second operation before the reader:
when the operation before that place has ended, or else at 0. Send buffers count from the operation's end until the
message has passed: the transfer's duration after the later of its start and the last receiver's posting. A stage that
recomputes from its first layer keeps its input from F to B: as a receive buffer, or with its stash where buffers do not
count or a stage of the same device hands it on. Gradients count from the first backward of a round to the end of its
step, workspace inside its operation. The copies of weights that the update rule keeps, for the most micro-batches
between F and the end of their gradient, count all the time. Everything at one instant counts together, so an operation
of zero duration has no workspace. A lane's devices all count its largest slice. ``docs/theory/judge.md`` has all rules
in full.
"""

from __future__ import annotations

from itertools import pairwise, repeat
from typing import NamedTuple

import numpy as np

from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.solvers.compiled.on_disk import is_kept
from penstock.solvers.costs.communicators import runtime_bytes
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.memory import weight_bytes
from penstock.solvers.judge.clocks.channels import EVENTS, FREE, FULL, HALF
from penstock.solvers.judge.clocks.events import run_events
from penstock.solvers.judge.clocks.ties import tied_starts
from penstock.solvers.judge.clocks.worklist import run_worklist
from penstock.solvers.judge.deadlock import deadlock
from penstock.solvers.judge.lanes import Lanes, Starts, make_lanes, new_state
from penstock.solvers.judge.listing_kernel import gradient_ends, most_in_flight, operation_ends, transfer_list
from penstock.solvers.judge.memory_curve import MemoryProfile, Spans
from penstock.solvers.judge.memory_kernel import all_peaks
from penstock.solvers.judge.operation_tables import DURATION, FLOW, LINES, Tables, cost_tables
from penstock.solvers.judge.shared_processor import sharing_makespan_ns, simulate_sharing
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import STEP, Orders, Pattern, Schedule
from penstock.solvers.model.timeline import DeviceUse, Interval, Timeline, Track, Transfers
from penstock.solvers.model.unroll import Unrolled, unroll
from penstock.solvers.model.update_rules import PERIODIC_RULES, UpdateRule, weight_copies


class Ran(NamedTuple):
    """The times from a kernel: starts, the end of each lane's row, starts of buckets and of the sums of ties."""

    times: Starts
    lane_ns: np.ndarray
    bucket_start: np.ndarray
    tie_start: np.ndarray


class Ends(NamedTuple):
    """Ends of lanes and of the step; times of steps, reductions and sums of ties, and the measured window."""

    lane_ns: np.ndarray
    steps: Spans
    reduced: Spans
    tied: Spans
    makespan_ns: int
    window_ns: tuple[int, int]
    window_rounds: int

    @property
    def time_ns(self) -> int:
        """Return the time per global batch."""
        first, last = self.window_ns
        return -(-(last - first) // self.window_rounds)


class Judged(NamedTuple):
    """A plan in the form that kernels need; ``unrolled`` is None for one flushed step."""

    tables: Tables
    orders: Orders
    unrolled: Unrolled | None


def simulate(
    problem: Problem,
    allocation: Allocation,
    schedule: Schedule,
    *,
    overlap: bool | None = None,
    update_rule: UpdateRule = "synchronous",
) -> Timeline:
    """Judge one flushed step, or a periodic schedule's steady state: all times, memory and use of every device.

    ``overlap``: whether all-reduces overlap the last backward (None: as in the request's rules).
    Raises InvalidPlan where operations are missing, doubled or wait for each other in a circle, devices are not
    connected, or schedule and update rule do not go together; UnsupportedRequest for periodic schedules of several
    pipelines.
    """
    if update_rule == "elastic_averaging":
        return simulate_sharing(problem, allocation, schedule)
    tables, orders, unrolled = _judged(problem, allocation, schedule, overlap, update_rule)
    if tables.unreachable:
        raise InvalidPlan(tables.unreachable[0], remedy="place the stages on devices that a link connects")
    lanes = make_lanes(tables, orders)
    ran = _run(tables, lanes, record=True)
    times, ends = ran.times, _ends(tables, lanes, ran, unrolled)
    versions = _versions(allocation, tables, lanes, update_rule)
    profile = MemoryProfile.of(tables, lanes, times, ends.steps, (ends.reduced, ends.tied), versions)
    return Timeline(
        time_per_global_batch_ns=ends.time_ns,
        fill_ns=_fill(lanes, times),
        drain_ns=_drain(lanes, ends),
        tracks=_tracks(lanes, times),
        transfers=_transfers(tables, times),
        reductions=_reductions(tables, ends),
        updates=_updates(lanes, ends),
        uses=_uses(lanes, ends, profile),
        memory_curve=profile.curve,
        activations_curve=profile.activations,
        window_ns=ends.window_ns,
        rounds=unrolled.rounds if unrolled else 1,
        window_rounds=ends.window_rounds,
        ties=_ties(tables, ends),
    )


def makespan_ns(
    problem: Problem,
    allocation: Allocation,
    schedule: Schedule,
    *,
    overlap: bool | None = None,
    update_rule: UpdateRule = "synchronous",
) -> int:
    """Return only the time per global batch; NEVER_NS where devices are not connected. Raises as ``simulate``."""
    if update_rule == "elastic_averaging":
        return sharing_makespan_ns(problem, allocation, schedule)
    tables, orders, unrolled = _judged(problem, allocation, schedule, overlap, update_rule)
    if tables.unreachable:
        return NEVER_NS
    lanes = make_lanes(tables, orders)
    record = tables.periodic or len(tables.chains.bucket_ns) > 0
    return _ends(tables, lanes, _run(tables, lanes, record), unrolled).time_ns


def is_compiled() -> bool:
    """Return whether plans are judged without waiting for the compiler: the last kernel of a judgement is cached."""
    return is_kept(all_peaks)


def _judged(
    problem: Problem, allocation: Allocation, schedule: Schedule, overlap: bool | None, update_rule: UpdateRule
) -> Judged:
    if isinstance(schedule, Pattern) and update_rule not in PERIODIC_RULES:
        raise InvalidPlan(
            f"Schedule {schedule.name} is periodic, but update rule {update_rule} needs a flush.",
            remedy="use one of " + ", ".join(sorted(PERIODIC_RULES)),
        )
    if isinstance(schedule, Orders) and update_rule in PERIODIC_RULES:
        raise InvalidPlan(
            f"Schedule {schedule.name} is one flushed step, but update rule {update_rule} needs a periodic schedule.",
            remedy="use update rule synchronous",
        )
    overlap = problem.rules.overlap_all_reduce if overlap is None else overlap
    if isinstance(schedule, Orders):
        return Judged(cost_tables(problem, allocation, overlap), schedule, None)
    if len(allocation.pipelines) > 1:
        raise UnsupportedRequest(
            f"The plan has {len(allocation.pipelines)} pipelines under update rule {update_rule}; their gradients can "
            "only be added up in a flushed step.",
            remedy="use one pipeline with replicated stages, or a schedule of one flushed step",
        )
    unrolled = unroll(problem, allocation, schedule, update_rule)
    every = unrolled.orders.update_every
    tables = cost_tables(unrolled.problem, unrolled.allocation, overlap, every, update_rule)
    return Judged(tables, unrolled.orders, unrolled)


def _run(tables: Tables, lanes: Lanes, record: bool) -> Ran:
    """Return times by the fastest clock; without ``record`` starts are left out where no events were needed."""
    flows, chains, ties, arrays = tables.flows, tables.chains, tables.ties, lanes.arrays
    clock = clock_for(tables, lanes)
    if clock == EVENTS:
        state = new_state(flows, chains, ties, arrays)
        run_events(flows, chains, ties, arrays, state)
        position, times = state.position, Starts(state.start, state.sent, state.order)
        ran = Ran(times, state.time, state.bucket_start, state.tie_start)
    else:
        position, lane_ns, start, sent, order, bucket_start = run_worklist(flows, chains, arrays, clock, record)
        tie_start = tied_starts(chains, ties, arrays, lane_ns, bucket_start)
        ran = Ran(Starts(start, sent, order), lane_ns, bucket_start, tie_start)
    if (position < arrays.lane_start[1:]).any():
        raise InvalidPlan(deadlock(tables, lanes, position))
    return ran


def clock_for(tables: Tables, lanes: Lanes) -> int:
    """Return the kind of private channels on which a worklist can time these rows; EVENTS if only the event heap can.

    A worklist needs private channels, one lane per stage, and no steps that wait. On channels that carry one transfer
    at a time, operations that send must also take time, so that no two transfers are ready on one channel at once.
    """
    rules = tables.problem.rules
    if rules.shared or not lanes.one_lane_per_stage:
        return EVENTS
    if tables.periodic and (len(tables.chains.bucket_ns) or tables.sums):
        return EVENTS
    if rules.channel == "none":
        return FREE
    table = lanes.arrays.table
    at_once = (table[:, FLOW] >= 0) & (table[:, DURATION] == 0)
    if at_once.any() and at_once[lanes.arrays.row].any():
        return EVENTS
    return HALF if rules.channel == "half" else FULL


def _ends(tables: Tables, lanes: Lanes, ran: Ran, unrolled: Unrolled | None) -> Ends:
    reductions, times, lane_ns = tables.reductions, ran.times, ran.lane_ns
    bucket_end = ran.bucket_start + tables.chains.bucket_ns[reductions.bucket]
    reduced = Spans(reductions.group, ran.bucket_start, bucket_end)
    tie = np.repeat(np.arange(len(tables.sums)), tables.ties.rounds)
    tied = Spans(tie, ran.tie_start, ran.tie_start + tables.ties.tie_ns[tie])
    if unrolled is None:
        steps = _steps_after_rows(tables, lanes, lane_ns, bucket_end, tied.end)
        last = int(steps.end.max())
        return Ends(lane_ns, steps, reduced, tied, last, (0, last), 1)
    batches = tables.allocation.num_micro_batches // unrolled.rounds
    done = gradient_ends(lanes.arrays, times.start, batches, unrolled.rounds)[unrolled.first : unrolled.last + 1]
    cycle = _cycle(done, unrolled.whole)
    window = int(done[-1 - cycle]), int(done[-1])
    return Ends(lane_ns, _steps_in_rows(tables, lanes, times), reduced, tied, int(lane_ns.max()), window, cycle)


def _cycle(done: np.ndarray, whole: int) -> int:
    """Return after how many rounds the ends repeat; the number of all rounds if that is more than half of them."""
    for k in range(whole, (len(done) - 1) // 2 + 1, whole):
        apart = done[k:] - done[:-k]
        if (apart == apart[0]).all():
            return k
    return len(done) - 1


def _steps_after_rows(
    tables: Tables, lanes: Lanes, lane_ns: np.ndarray, bucket_end: np.ndarray, tie_end: np.ndarray
) -> Spans:
    """Return one step of each slot, after the lane's operations and ties and the reductions of the stage's groups."""
    chains, last = tables.chains, lanes.arrays.last_gradient.tolist()
    reduced = [0] * len(tables.graph.static)
    if len(bucket_end):
        for s in range(len(reduced)):
            for g in chains.member_group[chains.member_start[s] : chains.member_start[s + 1]]:
                if chains.start[g] < chains.start[g + 1]:
                    reduced[s] = max(reduced[s], int(bucket_end[chains.start[g + 1] - 1]))
    start, end = [0] * len(lanes.slot_stage), [0] * len(lanes.slot_stage)
    lane_of_tie = np.repeat(np.arange(len(lane_ns)), np.diff(lanes.arrays.halt_start))
    done = lane_ns.copy()
    np.maximum.at(done, lane_of_tie, tie_end[lanes.arrays.halt_tie])
    for t, slots in zip(done.tolist(), lanes.slots, strict=True):
        for slot in sorted(slots, key=lambda k: (last[k], k)):
            s = lanes.slot_stage[slot]
            start[slot] = max(t, reduced[s])
            end[slot] = t = start[slot] + tables.graph.update_ns[s]
    return Spans(np.arange(len(start)), np.asarray(start, dtype=np.int64), np.asarray(end, dtype=np.int64))


def _steps_in_rows(tables: Tables, lanes: Lanes, times: Starts) -> Spans:
    """Return the steps that are in the rows, by slot and round."""
    arrays = lanes.arrays
    which = np.flatnonzero(arrays.row // 2 % (STEP + 1) == STEP)
    slot = arrays.row[which] // LINES
    place = arrays.round_start[slot] + arrays.batch[which] // tables.chains.every[list(lanes.slot_stage)][slot]
    order = np.argsort(place)
    start = times.start[which[order]]
    return Spans(place[order], start, start + arrays.table[arrays.row[which[order]], DURATION])


def _versions(allocation: Allocation, tables: Tables, lanes: Lanes, rule: UpdateRule) -> tuple[int, ...]:
    """Return the bytes of the weights that each slot keeps in addition to the current ones."""
    if not tables.periodic:
        return (0,) * len(lanes.slot_stage)
    result = []
    for slot, in_flight in enumerate(most_in_flight(lanes.arrays).tolist()):
        s = lanes.slot_stage[slot]
        turns = int(lanes.arrays.slot_replicas[slot])
        copies = weight_copies(rule, allocation, s, in_flight * turns)
        result.append((copies - 1) * weight_bytes(tables.problem, allocation.stages[s])[1])
    return tuple(result)


def _fill(lanes: Lanes, times: Starts) -> int:
    """Return the time from 0 until the last used device starts its first operation."""
    bounds = lanes.arrays.lane_start
    return max(int(times.start[low]) for low, high in pairwise(bounds) if low < high)


def _drain(lanes: Lanes, ends: Ends) -> int:
    """Return the time from the end of the first device to finish until the makespan."""
    bounds = lanes.arrays.lane_start
    return ends.makespan_ns - min(int(t) for i, t in enumerate(ends.lane_ns) if bounds[i] < bounds[i + 1])


def _tracks(lanes: Lanes, times: Starts) -> tuple[Track, ...]:
    arrays = lanes.arrays
    end = operation_ends(arrays.row, arrays.table, times.start)
    tracks = []
    for lane, devices in enumerate(lanes.devices):
        part = slice(int(arrays.lane_start[lane]), int(arrays.lane_start[lane + 1]))
        tracks.append(Track(devices, lanes.rows[lane], times.start[part], end[part]))
    return tuple(tracks)


def _transfers(tables: Tables, times: Starts) -> Transfers:
    stage, direction, end = transfer_list(tables.flows, times.sent)
    return Transfers(stage, direction, times.order, times.sent, end)


def _reductions(tables: Tables, ends: Ends) -> tuple[Interval, ...]:
    stage, number, reduced = tables.reductions.stage, tables.reductions.number, ends.reduced
    columns = (stage.tolist(), number.tolist(), reduced.start.tolist(), reduced.end.tolist())
    return tuple(map(Interval, *columns))


def _ties(tables: Tables, ends: Ends) -> tuple[Interval, ...]:
    number = ends.tied.place
    columns = (tables.ties.stage[number].tolist(), number.tolist(), ends.tied.start.tolist(), ends.tied.end.tolist())
    return tuple(map(Interval, *columns))


def _updates(lanes: Lanes, ends: Ends) -> tuple[Interval, ...]:
    slot = np.searchsorted(lanes.arrays.round_start, ends.steps.place, side="right") - 1
    stage = np.asarray(lanes.slot_stage)[slot].tolist()
    return tuple(map(Interval, stage, repeat(-1), ends.steps.start.tolist(), ends.steps.end.tolist()))


def _uses(lanes: Lanes, ends: Ends, profile: MemoryProfile) -> dict[int, DeviceUse]:
    uses = {}
    for devices, peak, spent in zip(lanes.devices, *profile.uses(*ends.window_ns), strict=True):
        busy, alone = (each // ends.window_rounds for each in spent)
        for device in devices:
            memory = peak._replace(context=runtime_bytes(profile.tables.problem, profile.tables.allocation, device))
            uses[device] = DeviceUse(busy, alone, ends.time_ns - busy - alone, memory)
    return dict(sorted(uses.items()))
