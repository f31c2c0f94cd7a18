"""WPipe's search over recomputation × (d:w) × layouts × M (equation 3), and the paper's climb (section 3.4, R-26).

Every point is cut into parts and priced by the throughput model. The price decides which points are simulated, and in
which order. The paper's climb changes d:w by one divisor at a time. It compares the time of model parallelism (four
activations or gradients per micro-batch and link in WPipe and two in PipeDream-2BW) with the time of data parallelism
(the all-reduce of S_m / d bytes over w devices), both per period and device.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.costs.collectives import all_reduce_ns
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.memory import free_bytes
from penstock.solvers.costs.transfer import transfers_ns
from penstock.solvers.grid.places import Layout, check_depth, layouts, least_pass_ns
from penstock.solvers.model.micro_batches import Batch, batch_of, candidates, evenly, largest_slice
from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.wpipe.cut_search import RatedCut, improved_cuts, priced, rank
from penstock.solvers.planners.wpipe.shape import Shape, cut
from penstock.solvers.planners.wpipe.throughput import Links
from penstock.solvers.schedules.periodic.wpipe import WarmUp, least_micro_batches

MAX_PAIRS = 16
MAX_BATCHES = 6
MAX_IMPROVED = 4
MAX_OPERATIONS = 4096
"""Limit on M × parts of a period.

Without a flush more micro-batches save no idle time, but take longer to simulate.
"""
MOST_JUDGED = 2**16
"""Limit on M × parts of a period that can be simulated.

Its unrolled run, a dozen periods and more, keeps within ``MAX_OPERATIONS`` of programs.
"""
ANY_BATCH = Batch(0, 0, 0)
WORTH_EVENING = 4
"""Loads are evened where a device may run ahead by a quarter of a period."""
WORTH_CUTTING = 8
"""Shapes whose work alone takes 1/8 longer than the best estimate so far are skipped."""


class Wanted(NamedTuple):
    """The configurations to search. ``depth`` 0: any; ``by_group``: one group may recompute alone."""

    groups: int
    policies: tuple[WarmUp, ...]
    layout: str = "all"
    depth: int = 0
    by_group: bool = True


def exhaustive(problem: Problem, wanted: Wanted) -> list[RatedCut]:
    """Return every configuration, the most promising that fit first, then the others by the memory they lack."""
    rated: list[RatedCut] = []
    for pair in pairs(problem, wanted):
        fitting = [each.period_ns for each in rated if each.missing_bytes <= 0]
        limit_ns = min(fitting, default=NEVER_NS)
        rated += _configurations(problem, wanted, *pair, limit_ns + limit_ns // WORTH_CUTTING)
    return _ranked(rated, problem)


def climb(problem: Problem, wanted: Wanted) -> list[RatedCut]:
    """Return the configurations of the d:w where the paper's rule comes to rest.

    If none fits, return the configurations of the nearest deeper d:w that fits too.
    """
    every = [(d, w) for d, w in pairs(problem, wanted) if d * w == problem.num_devices]
    every = sorted(pair for pair in every if _batches(problem, *pair, "A"))
    if not every:
        return []
    at = resting_place(problem, wanted, every)
    rated: list[RatedCut] = []
    for depth, width in every[at:] + every[:at][::-1]:
        rated += _configurations(problem, wanted, depth, width)
        if any(each.missing_bytes <= 0 for each in rated):
            break
    return sorted(rated, key=rank)


def resting_place(problem: Problem, wanted: Wanted, every: list[tuple[int, int]]) -> int:
    """Return the index of the d:w of ``every`` (by rising d) at which the climb ends, from the middle on.

    d:w falls while model parallelism takes longer, otherwise rises. Where it would turn back, the d:w with the smaller
    maximum of the two times wins.
    """
    at = len(every) // 2
    costs = [_parallelism_ns(problem, wanted, *pair) for pair in every]
    falls = costs[at][0] > costs[at][1]
    while 0 <= at + (-1 if falls else 1) < len(every):
        after = at + (-1 if falls else 1)
        if (costs[after][0] > costs[after][1]) != falls:
            return min((at, after), key=lambda k: (max(costs[k]), k))
        at = after
    return at


def pairs(problem: Problem, wanted: Wanted) -> list[tuple[int, int]]:
    """Return (d, w) with d × w ≤ V: for each depth the largest width and the divisors of V.

    Pairs that use most devices come first. Raises ``UnsupportedRequest`` where the chain has too few blocks for the
    groups or the named micro-batch sizes too few micro-batches for the requested depth, ``InvalidDocument`` for a depth
    that chain or cluster do not allow.
    """
    total = problem.num_devices
    deepest = min(total, problem.num_blocks // wanted.groups)
    if deepest == 0:
        raise UnsupportedRequest(
            "WPipe cuts the model into two groups, but its layers cannot be separated anywhere",
            remedy="planner 'pipedream-2bw' or 'dp', which leave it whole",
        )
    check_depth(problem, "depth", wanted.depth, deepest)
    _refuse_shallow_batches(problem, wanted)
    every = []
    for depth in [wanted.depth] if wanted.depth else range(1, deepest + 1):
        most = total // depth
        every += [(depth, w) for w in range(1, most + 1) if w == most or total % w == 0]
    return sorted(every, key=lambda pair: (-pair[0] * pair[1], pair[0]))[:MAX_PAIRS]


def _refuse_shallow_batches(problem: Problem, wanted: Wanted) -> None:
    """Raise ``UnsupportedRequest`` where no micro-batch size gives the requested depth M ≥ N (ALGORITHMS 5.1)."""
    if not wanted.depth or not problem.micro_batch_sizes:
        return
    most = max(batch_of(problem, size).num_micro_batches for size in problem.micro_batch_sizes)
    if most < wanted.depth:
        size = problem.global_batch_size // wanted.depth
        raise UnsupportedRequest(
            f"two weight versions need as many micro-batches per update as a pipeline has devices; depth "
            f"{wanted.depth} needs {wanted.depth}, the micro-batch sizes give at most {most}",
            remedy=f"depth {most}" + (f", or micro_batch_sizes [{size}] for {wanted.depth} or more" if size else ""),
        )


def _configurations(
    problem: Problem, wanted: Wanted, depth: int, width: int, limit_ns: int = NEVER_NS
) -> Iterator[RatedCut]:
    alternatives = [(layout, Links(problem, layout.places)) for layout in layouts(problem, depth, width, wanted.layout)]
    for policy in wanted.policies if depth > 1 else wanted.policies[:1]:
        for batch in _short(_batches(problem, depth, width, policy), wanted.groups * depth):
            if alternatives and _work_ns(problem, batch, alternatives[0][0]) > limit_ns:
                continue
            cuts: dict[object, tuple[int, ...]] = {}
            for layout, links in alternatives:
                yield from _recomputing(problem, wanted, batch, policy, layout, links, cuts)


def _recomputing(
    problem: Problem,
    wanted: Wanted,
    batch: Batch,
    policy: WarmUp,
    layout: Layout,
    links: Links,
    cuts: dict[object, tuple[int, ...]],
) -> Iterator[RatedCut]:
    """Yield the least recomputation that fits; if none fits, yield all levels.

    Places that are alike are cut once (``cuts``).
    """
    places = layout.places
    alike = tuple(tuple(sorted({_like(problem, d) for d in devices})) for devices in places)
    for recompute in _levels(problem, wanted):
        shape = Shape(len(places), len(places[0]), batch, policy, recompute)
        fits = False
        for even in (False, True) if shape.slack * WORTH_EVENING >= batch.num_micro_batches else (False,):
            if (shape, alike, even) not in cuts:
                cuts[shape, alike, even] = cut(problem, shape, places, even=even)
            rated = priced(problem, shape, layout.name, places, cuts[shape, alike, even], links)
            fits |= rated.buffers_missing_bytes <= 0
            yield rated
        if fits:
            return


def _levels(problem: Problem, wanted: Wanted) -> tuple[tuple[bool, ...], ...]:
    """Return which groups recompute: group 0 first, which holds most; the paper recomputes all or nothing."""
    most = wanted.groups
    some = range(most + 1) if wanted.by_group else (0, most)
    every = tuple((True,) * n + (False,) * (most - n) for n in some)
    return {"never": every[:1], "auto": every, "always": every[-1:]}[problem.recompute]


def _short(batches: list[Batch], parts: int) -> list[Batch]:
    """Return the steps with few operations, and of all that can be simulated the one with the least memory."""
    possible = [b for b in batches if b.num_micro_batches * parts <= MOST_JUDGED]
    return [b for b in possible if b.num_micro_batches * parts <= MAX_OPERATIONS or b == possible[-1]]


def _work_ns(problem: Problem, batch: Batch, layout: Layout) -> int:
    """Return all the work of a global batch spread evenly over the places, by the fastest kind."""
    share = largest_slice(batch.most_rows, len(layout.places[0]))
    whole_ns = least_pass_ns(problem, chain.from_iterable(layout.places), share)
    return batch.num_micro_batches * whole_ns // len(layout.places)


def _like(problem: Problem, device: int) -> tuple[str, int]:
    return problem.devices[device].kind, free_bytes(problem, [device])


def _batches(problem: Problem, depth: int, width: int, policy: WarmUp) -> list[Batch]:
    """Return numbers of micro-batches that feed the replicas and the depth; the least of them too."""
    least = least_micro_batches(depth, policy)
    every = set(candidates(problem, (width,)))
    if not problem.micro_batch_sizes and problem.global_batch_size >= least:
        every.add(batch_of(problem, problem.global_batch_size // least))
    fed = sorted(b for b in every if b.num_micro_batches >= least and b.replicas_fed(problem.min_slice) >= width)
    return fed if problem.micro_batch_sizes else evenly(fed, MAX_BATCHES)


def _ranked(configurations: list[RatedCut], problem: Problem) -> list[RatedCut]:
    """Return the configurations by estimate, and the best of the first few kinds of shapes with improved cuts."""
    configurations = sorted(configurations, key=rank)
    kinds: dict[tuple[object, ...], RatedCut] = {}
    for each in configurations:
        kinds.setdefault((each.shape._replace(batch=ANY_BATCH), each.layout), each)
    better = [improved_cuts(problem, each) for each in list(kinds.values())[:MAX_IMPROVED]]
    return sorted({rank(each): each for each in configurations + better}.values(), key=rank)


def _parallelism_ns(problem: Problem, wanted: Wanted, depth: int, width: int) -> tuple[int, int]:
    """Return (T_mp, T_dp) of R-26 in layout A, with the smallest M and the mean boundary."""
    places = layouts(problem, depth, width, "A")[0].places
    batch = _batches(problem, depth, width, "A")[0]
    network = problem.network
    model_ns = 0
    if depth > 1:
        cuts = max(1, int(problem.cuttable.sum()))
        mean = int((problem.forward_bytes * problem.cuttable).sum()) // cuts
        narrowest = min(network.bandwidth(places[i][0], places[i + 1][0]) for i in range(depth - 1))
        one_ns = int(transfers_ns(np.asarray(mean * -(-batch.most_rows // width)), narrowest))
        model_ns = batch.num_micro_batches * 2 * wanted.groups * one_ns
    weights = -(-int(problem.owned_bytes[-1]) // depth)
    return model_ns, max(all_reduce_ns(problem, weights, devices) for devices in places)
