"""WPipe's double-grouped updates (2GW): the periodic order of section 3.2, figures 4c and 5 (ALGORITHMS 5.2, A.5).

The model is cut into 2N parts. Device i of a pipeline holds part i (group 0) and part N + i (group 1). In each update
period every device runs M slots of group 0, then M slots of group 1. A slot of group 0 pairs the forward of its
period with the backward of the *period before*, a slot of group 1 forward and backward of the same period; both then
look like two stages of model parallelism and splice into 1F1B over slots: device i runs the forward of slot v, then
the backward of slot v - lag, lag = K - 1 with K as DAPPLE's warm-up. The paper's is K = N - i (``A``). ``B`` differs
from the paper: K = 2 (N - i) - 1 leaves one more slot between neighbours, which overlaps transfers with computation.

Group 0 needs two weight versions and group 1 one as long as lag ≤ M on every device, and no device ever idles once
the pipeline is full, transfers aside, for M ≥ N.

.. [1] Yang et al., Group-based interleaved pipeline parallelism for large-scale DNN training (ICLR 2022).
"""

from __future__ import annotations

from typing import Literal

from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.program import BACKWARD, FORWARD, RECOMPUTE
from penstock.solvers.costs.stage import stage_costs
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.micro_batches import row_classes
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Pattern, PatternOperation

WarmUp = Literal["A", "B"]


def wpipe(problem: Problem, allocation: Allocation, *, policy: WarmUp = "A") -> Pattern:
    """Return one update period: M micro-batches through both groups.

    The starts are right for a network without transfers in which every slot takes as long as the longest. A
    recomputing part rebuilds its activations in a separate operation right before the backward, which may wait
    for its gradient meanwhile (ALGORITHMS 5.6). Raises ``UnsupportedRequest`` for allocations that are not two groups
    on the same devices, and for fewer micro-batches than the warm-up needs.
    """
    depth = _depth(allocation)
    number = allocation.num_micro_batches
    needed = least_micro_batches(depth, policy)
    if number < needed:
        raise UnsupportedRequest(
            f"WPipe's order over {depth} devices a pipeline, warm-up {policy}, needs at least {needed} micro-batches "
            f"per update; the plan has {number}",
            remedy=f"{needed} micro-batches, so of at most {max(1, problem.global_batch_size // needed)} samples, "
            f"or pipelines of at most {deepest(number, policy)} devices",
        )
    rows = row_classes(problem.global_batch_size, number)[0][0]
    costs = [stage_costs(problem, stage, rows) for stage in allocation.stages]
    forward_ns = max(1, *(cost.forward_ns for cost in costs))
    again_ns = max(cost.recompute_ns for cost in costs)
    slot_ns = forward_ns + again_ns + max(1, *(cost.backward_ns for cost in costs))
    period_ns = 2 * number * slot_ns
    operations: list[PatternOperation] = []

    def add(kind: int, part: int, m: int, slot: int, offset_ns: int) -> None:
        shift, start_ns = divmod(slot * slot_ns + offset_ns, period_ns)
        operations.append(PatternOperation(kind, part, start_ns, shift, m))

    for i in range(depth):
        late_ns = i * forward_ns
        lag = warm_up(depth, i, policy) - 1
        for group in (0, 1):
            part = group * depth + i
            recomputes = allocation.stages[part].recomputes
            for m in range(number):
                add(FORWARD, part, m, group * number + m, late_ns)
                back = (group if group else 2) * number + m + lag
                if recomputes:
                    add(RECOMPUTE, part, m, back, late_ns + forward_ns)
                add(BACKWARD, part, m, back, late_ns + forward_ns + again_ns)
    return Pattern("wpipe", period_ns, number, tuple(operations))


def warm_up(depth: int, place: int, policy: WarmUp) -> int:
    """Return K, the number of slots that a device begins before its first backward."""
    return depth - place if policy == "A" else 2 * (depth - place) - 1


def least_micro_batches(depth: int, policy: WarmUp) -> int:
    """Return the least number of micro-batches (ALGORITHMS 5.2).

    M ≥ N avoids idle time, and M ≥ K - 1 allows a single version of group 1.
    """
    return max(depth, warm_up(depth, 0, policy) - 1)


def deepest(num_micro_batches: int, policy: WarmUp) -> int:
    """Return the depth of the deepest pipeline that ``num_micro_batches`` can feed."""
    return num_micro_batches if policy == "A" else max(1, num_micro_batches // 2 + 1)


def most_in_flight(depth: int, place: int, policy: WarmUp, num_micro_batches: int) -> tuple[tuple[int, int], ...]:
    """Return the micro-batches of (group 0, group 1) that a device holds at its two peaks (R-25).

    At the end of group 0's warm-up, and at the end of group 1's; between them one is traded for the other.
    """
    ahead = warm_up(depth, place, policy)
    return (num_micro_batches + ahead, 0), (num_micro_batches, ahead)


def _depth(allocation: Allocation) -> int:
    """Return N. Each device of the first half of the stages also holds the stage N further on, and no other."""
    stages = allocation.stages
    half = len(stages) // 2
    places = [stage.devices for stage in stages]
    twice = len(stages) == 2 * half and places[:half] == places[half:]
    distinct = len({d for devices in places[:half] for d in devices}) == sum(map(len, places[:half]))
    if len(allocation.pipelines) != 1 or not twice or not distinct:
        raise UnsupportedRequest(
            "WPipe's order takes one pipeline of 2N stages, stage N + i on the same devices as stage i; "
            f"this allocation has {len(allocation.pipelines)} pipelines with {len(stages)} stages",
            remedy="an allocation by planner 'wpipe', or schedule 'eager' for one stage per device",
        )
    if any(stage.dispatch != "rows" for stage in stages):
        raise UnsupportedRequest(
            "in WPipe's order the replicas of a stage share every micro-batch by rows; this allocation deals whole "
            "micro-batches in turn",
            remedy="dispatch 'rows'",
        )
    return half
