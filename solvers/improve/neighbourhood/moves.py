"""Small moves: plans that differ from a plan by a cut, a run of cuts, a device, a stage or its recomputation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np

from penstock.solvers.costs.tables.device_line import server_classes
from penstock.solvers.model.allocation import Stage, stages_on
from penstock.solvers.model.problem import Problem

STEPS = (1, 2, 4, 8)
"""Numbers of cuttable positions that a cut moves at a time."""
REACH = 3
"""The largest distance, in stages, over which devices move or change places."""
RUN = 12
"""The largest number of cuts that move together."""
MANY_DEVICES = 64
"""Number of devices beyond which not all interchangeable nodes are tried: plans on them take about as long."""
ALIKE = 2
"""Number of interchangeable nodes that are tried then: two, as devices are exchanged between two of them."""
MOST_STAGES = 64
"""The most stages of a plan that is built here; other plans may have more."""

Stages = tuple[Stage, ...]
Places = dict[int, int]
"""The node of each device that may be moved."""


def moved(problem: Problem, stages: Stages) -> Iterator[Stages]:
    """Yield the stages after each small move; some occur more than once."""
    cuts = np.flatnonzero(problem.cuttable).tolist()
    for changed in _moved(problem, stages, cuts):
        yield as_asked(problem, changed)


def replaced(problem: Problem, stages: Stages) -> Iterator[Stages]:
    """Yield the stages with one unused device in the place of a device of another node or kind."""
    used = {d for stage in stages for d in stage.devices}
    node_of = _apart(problem, stages)
    spare = _one_per_node(problem, node_of, [d for d in range(problem.num_devices) if d not in used])
    for s, stage in enumerate(stages):
        for current in _one_per_node(problem, node_of, stage.devices):
            for device in spare:
                yield _with_devices(stages, {s: tuple(device if d == current else d for d in stage.devices)})


def shifted(problem: Problem, stages: Stages) -> Iterator[Stages]:
    """Yield the stages after small moves that keep their number, replicas and recomputation."""
    cuts = np.flatnonzero(problem.cuttable).tolist()
    yield from _other_cuts(stages, cuts)
    yield from _other_runs(stages, cuts)
    yield from _all_exchanged(problem, _apart(problem, stages), stages)


def even_stages(problem: Problem, devices: Sequence[int] | None = None) -> Iterator[Stages]:
    """Yield plans to begin with: 1 to 8, 16, 32 … stages that share blocks of layers and devices evenly, node by node.

    ``devices``: the devices to use, by default all.
    """
    cuts = np.flatnonzero(problem.cuttable).tolist()
    available = tuple(range(problem.num_devices)) if devices is None else tuple(devices)
    blocks, most = len(cuts) + 1, len(available)
    count = 1
    while count <= min(blocks, most, MOST_STAGES):
        bounds = [0, *(cuts[blocks * s // count - 1] + 1 for s in range(1, count)), problem.num_layers]
        shares = [available[most * s // count : most * (s + 1) // count] for s in range(count)]
        yield as_asked(problem, stages_on(shares, bounds))
        count += 1 if count < 8 else count


def as_asked(problem: Problem, stages: Stages) -> Stages:
    """Return the stages, all with recomputation if the request is always to recompute."""
    if problem.recompute != "always":
        return stages
    return tuple(stage.whole for stage in stages)


def _moved(problem: Problem, stages: Stages, cuts: list[int]) -> Iterator[Stages]:
    yield from _other_cuts(stages, cuts)
    yield from _other_runs(stages, cuts)
    yield from _other_devices(problem, stages)
    yield from _merged(stages)
    yield from _split(stages, cuts)
    if problem.recompute == "auto":
        yield from _recomputing(problem, stages)


def _other_cuts(stages: Stages, cuts: list[int]) -> Iterator[Stages]:
    for s, (one, two) in enumerate(pairwise(stages)):
        at = cuts.index(one.last)
        for step in (sign * size for size in STEPS for sign in (-1, 1)):
            if 0 <= at + step < len(cuts) and one.first <= cuts[at + step] < two.last:
                yield _with(stages, s, (one.of_layers(one.first, cuts[at + step]), two.of_layers(cuts[at + step] + 1)))


def _other_runs(stages: Stages, cuts: list[int]) -> Iterator[Stages]:
    """Yield the stages with two or more neighbouring cuts one place forwards or back.

    In effect a block moves from one stage to a stage further on.
    """
    at = [cuts.index(stage.last) for stage in stages[:-1]]
    for s in range(len(at)):
        for stop in range(s + 2, min(len(at), s + RUN) + 1):
            for step in (-1, 1):
                new = [k + step for k in at[s:stop]]
                low = at[s - 1] if s else -1
                high = at[stop] if stop < len(at) else len(cuts)
                if low < new[0] and new[-1] < high:
                    lasts = [*(cuts[k] for k in new), stages[stop].last]
                    firsts = [stages[s].first, *(last + 1 for last in lasts[:-1])]
                    yield _with(stages, s, tuple(map(Stage.of_layers, stages[s : stop + 1], firsts, lasts)), len(lasts))


def _other_devices(problem: Problem, stages: Stages) -> Iterator[Stages]:
    """Yield the stages with one device moved to another stage, removed, added or exchanged for another."""
    used = {d for stage in stages for d in stage.devices}
    node_of = _apart(problem, stages)
    spare = _one_per_node(problem, node_of, [d for d in range(problem.num_devices) if d not in used])
    for s, stage in enumerate(stages):
        for device in spare:
            yield _with_devices(stages, {s: (*stage.devices, device)})
        if stage.replicas > 1:
            for device in _one_per_node(problem, node_of, stage.devices):
                rest = tuple(d for d in stage.devices if d != device)
                yield _with_devices(stages, {s: rest})
                for t in range(max(0, s - REACH), min(len(stages), s + REACH + 1)):
                    if t != s:
                        yield _with_devices(stages, {s: rest, t: (*stages[t].devices, device)})
    yield from _all_exchanged(problem, node_of, stages)


def _all_exchanged(problem: Problem, node_of: Places, stages: Stages) -> Iterator[Stages]:
    """Yield the stages with devices exchanged between each two that are near."""
    for s, t in combinations(range(len(stages)), 2):
        if t - s <= REACH:
            yield from _exchanged(problem, node_of, stages, s, t)


def _exchanged(problem: Problem, node_of: Places, stages: Stages, s: int, t: int) -> Iterator[Stages]:
    """Yield the stages with all devices of two stages exchanged, or one for one."""
    if stages[s].replicas != stages[t].replicas or stages[s].replicas > 1:
        yield _with_devices(stages, {s: stages[t].devices, t: stages[s].devices})
    for u in _one_per_node(problem, node_of, stages[s].devices):
        for v in _one_per_node(problem, node_of, stages[t].devices):
            if problem.devices[u].node != problem.devices[v].node or problem.devices[u].kind != problem.devices[v].kind:
                one = tuple(v if d == u else d for d in stages[s].devices)
                yield _with_devices(stages, {s: one, t: tuple(u if d == v else d for d in stages[t].devices)})


def _merged(stages: Stages) -> Iterator[Stages]:
    """Yield the stages with two neighbours merged, on the devices of both, or of either."""
    for s, (one, two) in enumerate(pairwise(stages)):
        both = Stage(one.first, two.last, tuple(sorted(one.devices + two.devices)))
        for devices in dict.fromkeys((both.devices, one.devices, two.devices)):
            again = replace(both, devices=devices, recompute=one.recompute, modules=one.modules)
            yield _with(stages, s, (again.of_layers(one.first),))


def _split(stages: Stages, cuts: list[int]) -> Iterator[Stages]:
    """Yield the stages with a replicated stage split in two, its layers about in proportion to the devices."""
    for s, stage in enumerate(stages):
        inside = [cut for cut in cuts if stage.first <= cut < stage.last]
        for size in range(1, stage.replicas if inside else 1):
            middle = round(size * (len(inside) + 1) / stage.replicas) - 1
            for at in sorted({min(max(0, middle + shift), len(inside) - 1) for shift in (-1, 0, 1)}):
                for here, there in (
                    (stage.devices[:size], stage.devices[size:]),
                    (stage.devices[-size:], stage.devices[:-size]),
                ):
                    front = replace(stage.of_layers(stage.first, inside[at]), devices=here)
                    yield _with(stages, s, (front, replace(stage.of_layers(inside[at] + 1), devices=there)), 1)


def _recomputing(problem: Problem, stages: Stages) -> Iterator[Stages]:
    for s, stage in enumerate(stages):
        others = [stage.whole if stage.plain == stage else stage.plain]
        others += [replace(stage.plain, modules=each) for each in problem.module_sets]
        for other in others:
            yield _with(stages, s, (other,), 1)


def _with(stages: Stages, s: int, new: Stages, old: int = 2) -> Stages:
    return stages[:s] + new + stages[s + old :]


def _with_devices(stages: Stages, devices: dict[int, tuple[int, ...]]) -> Stages:
    return tuple(
        replace(stage, devices=tuple(sorted(devices[s]))) if s in devices else stage for s, stage in enumerate(stages)
    )


def _apart(problem: Problem, stages: Stages) -> Places:
    """Return the node of each device that may be moved.

    Above ``MANY_DEVICES``, of the nodes of a class that hold the same stages in the same places only two may move.
    Exchanging servers of a class changes no cost, so moving others of them would change only the order of replicas,
    which decides which slices of rows meet.
    """
    if problem.num_devices <= MANY_DEVICES or problem.pins:
        return {d: device.node for d, device in enumerate(problem.devices)}
    stage_of = {d: s for s, stage in enumerate(stages) for d in stage.devices}
    movable: Places = {}
    seen: Counter[object] = Counter()
    for node, (devices, alike) in enumerate(zip(problem.nodes(), server_classes(problem), strict=True)):
        mark = alike, tuple(stage_of.get(d) for d in devices)
        seen[mark] += 1
        if seen[mark] <= ALIKE:
            movable.update(dict.fromkeys(devices, node))
    return movable


def _one_per_node(problem: Problem, node_of: Places, devices: Sequence[int]) -> list[int]:
    """Return the last movable device of each node and kind."""
    last = {(node_of[d], problem.devices[d].kind): d for d in devices if d in node_of}
    return sorted(last.values())
