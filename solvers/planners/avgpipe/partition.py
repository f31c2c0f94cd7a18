"""AvgPipe's partitioner: PipeDream's, with one device for each stage (section 6).

The dynamic program's answer depends on the size of the micro-batches, which is tuned only afterwards. So every size
to be considered gives a candidate, and the planner takes the candidate whose single pipeline is simulated fastest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from penstock.schemas.errors import InvalidDocument
from penstock.solvers.costs.tables.device_line import device_order
from penstock.solvers.grid.block_partition import block_partition
from penstock.solvers.grid.device_row import DeviceRow
from penstock.solvers.grid.row_partition import Settings, placed
from penstock.solvers.grid.slice_costs import Layers
from penstock.solvers.model.allocation import Stage
from penstock.solvers.model.micro_batches import Batch
from penstock.solvers.model.problem import Problem

Stages = tuple[Stage, ...]


def partitions(problem: Problem, batches: Sequence[Batch], required: int = 0) -> list[Stages]:
    """Return candidate partitions on the first devices, node by node, without recomputation.

    The number of stages is ``required``, or the number of ranks of the pipeline profile. Without either, candidates
    have the partitioner's number of stages and the most stages that the cluster allows. Where no micro-batch fits, the
    candidate has blocks of equal time, and the simulator reports what is lacking.

    Raises ``InvalidDocument`` for more stages than devices and blocks allow.
    """
    most = min(problem.num_devices, problem.num_blocks)
    number = _number_of_stages(problem, required, most)
    order = device_order(problem)
    row, layers = DeviceRow(problem, order[:most]), Layers(problem)
    recomputing = {"never": (False,), "auto": (False, True), "always": (True,)}[problem.recompute]
    candidates: list[Stages] = []
    for recompute, batch in product(recomputing, batches):
        settings = Settings(lenient=True, straight=True, recompute=recompute)
        straight = [each.allocation.stages for each in placed(problem, row, layers, batch, settings)]
        sizes = {number} if number else {len(straight[0]) if straight else most, most}
        candidates += [stages for stages in straight if len(stages) in sizes]
    if not candidates:
        blocks = block_partition(problem, batches[-1], number or most).stages
        candidates = [tuple(replace(stage, devices=(order[i],)) for i, stage in enumerate(blocks))]
    return list(dict.fromkeys(tuple(replace(stage, recompute=()) for stage in stages) for stages in candidates))


def _number_of_stages(problem: Problem, required: int, most: int) -> int:
    """Return the number of stages that the request fixes, or 0 if it leaves the number open."""
    run = problem.pipeline_run
    if run is not None and required not in (0, len(run.ranks)):
        raise InvalidDocument(
            f"option 'stages' is {required}, but the pipeline profile has {len(run.ranks)} ranks",
            remedy=f"stages 0 or {len(run.ranks)}, or another pipeline profile",
        )
    number = required if run is None else len(run.ranks)
    if number > most:
        raise InvalidDocument(
            f"{number} stages are requested (option 'stages', or the ranks of the pipeline profile), but "
            f"{problem.num_devices} devices and {problem.num_blocks} separable blocks allow {most}",
            remedy=f"at most {most} stages",
        )
    return number
