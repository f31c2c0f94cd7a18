"""Check for ``verify`` of the numbers that a timeline states: its time, its window, every device's share of it."""

from __future__ import annotations

import numpy as np

from penstock.schemas.program import FORWARD, RECOMPUTE
from penstock.solvers.costs.stage import update_ns
from penstock.solvers.model.schedule import STEP
from penstock.solvers.model.timeline import Track
from penstock.solvers.model.unroll import Unrolled
from penstock.solvers.verify.clock import Clock


def check_step_numbers(clock: Clock) -> list[str]:
    """Check a flushed step: its time per global batch is the latest end of any event."""
    end = _last_end(clock)
    timeline = clock.timeline
    faults = []
    if timeline.time_per_global_batch_ns != end:
        faults.append(
            f"The timeline states {timeline.time_per_global_batch_ns} ns, but the last thing ends at {end} ns."
        )
    if (timeline.window_ns, timeline.rounds, timeline.window_rounds) != ((0, end), 1, 1):
        faults.append(f"The timeline states the window {timeline.window_ns} of a step from 0 to {end} ns.")
    return faults + _check_edges(clock) + _check_uses(clock, (0, end), 1)


def check_steady_numbers(clock: Clock, run: Unrolled) -> list[str]:
    """Check a run of several rounds: its steady state between two global batches' last gradients, over whole cycles."""
    timeline = clock.timeline
    num_micro_batches = run.allocation.num_micro_batches // run.rounds
    done = np.zeros(run.rounds, dtype=np.int64)
    for track in timeline.tracks:
        kinds, _stages, batches = track.operations.T
        gradients = (kinds != FORWARD) & (kinds != RECOMPUTE) & (kinds != STEP)
        np.maximum.at(done, batches[gradients] // num_micro_batches, track.end_ns[gradients])
    cycle = _cycle(done[run.first : run.last + 1], run.whole)
    low, high = int(done[run.last - cycle]), int(done[run.last])
    faults = []
    if (timeline.window_ns, timeline.rounds, timeline.window_rounds) != ((low, high), run.rounds, cycle):
        faults.append(
            f"The timeline states a steady window {timeline.window_ns} of {timeline.window_rounds} global batches; "
            f"it is {(low, high)} of {cycle}."
        )
    time = -(-(high - low) // cycle)
    if timeline.time_per_global_batch_ns != time:
        faults.append(
            f"The timeline states {timeline.time_per_global_batch_ns} ns per global batch, but its steady window "
            f"gives {time} ns."
        )
    return faults or _check_edges(clock) + _check_uses(clock, (low, high), cycle)


def _cycle(done: np.ndarray, whole: int) -> int:
    """Return the fewest rounds, a multiple of ``whole``, after which the gaps repeat; all rounds if they do not."""
    rounds = len(done) - 1
    for cycle in range(whole, rounds // 2 + 1, whole):
        gaps = done[cycle:] - done[:-cycle]
        if (gaps == gaps[0]).all():
            return cycle
    return rounds


def _last_end(clock: Clock) -> int:
    timeline = clock.timeline
    ends = [int(track.end_ns.max()) for track in timeline.tracks if track.end_ns.size]
    ends += [each.end_ns for each in (*timeline.reductions, *timeline.updates)]
    ends += [int(timeline.transfers.end_ns.max())] if timeline.transfers.end_ns.size else []
    return max(ends)


def _check_edges(clock: Clock) -> list[str]:
    """Check the fill, until the last device starts, and the drain, from when the first device has finished."""
    ran = [track for track in clock.timeline.tracks if track.end_ns.size]
    fill = max(int(track.start_ns[0]) for track in ran)
    drain = _last_end(clock) - min(int(track.end_ns[-1]) for track in ran)
    stated = (clock.timeline.fill_ns, clock.timeline.drain_ns)
    if stated == (fill, drain):
        return []
    return [f"The timeline states a fill of {stated[0]} and a drain of {stated[1]} ns; they are {fill} and {drain} ns."]


def _check_uses(clock: Clock, window: tuple[int, int], window_rounds: int) -> list[str]:
    """Check that every device's busy time is the time of its operations in the window, and that its times add up."""
    timeline, faults = clock.timeline, []
    total = timeline.time_per_global_batch_ns
    for track in timeline.tracks:
        busy = _busy_ns(clock, track, window) // window_rounds
        for device in track.devices:
            use, name = timeline.uses[device], clock.problem.devices[device].name
            if sum(use[:3]) != total or min(use[:3]) < 0:
                faults.append(
                    f"The times of {name} (busy {use.busy_ns}, communication {use.communication_ns}, idle "
                    f"{use.idle_ns} ns) do not add up to {total} ns."
                )
            elif use.busy_ns != busy:
                faults.append(f"The timeline states that {name} computes for {use.busy_ns} ns; it is {busy} ns.")
    return faults


def _busy_ns(clock: Clock, track: Track, window: tuple[int, int]) -> int:
    """Return the time of a lane's operations and updates within the window."""
    low, high = window
    inside = np.minimum(track.end_ns, high) - np.maximum(track.start_ns, low)
    busy = int(np.maximum(inside, 0).sum())
    if not clock.every:
        busy += sum(update_ns(clock.problem, clock.allocation.stages[s]) for s in clock.stages_on(track))
    return busy
