"""AvgPipe's partitioner: PipeDream's, with one device for each stage (section 6).

The dynamic program's answer depends on the size of the micro-batches, which is tuned only afterwards. So every size
that comes into question gives a candidate, and the one whose single pipeline is fastest by the judge is taken.
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


def partitions(problem: Problem, batches: Sequence[Batch], asked: int = 0) -> list[Stages]:
    """Candidates on the first devices, node by node, without recomputation.

    Of ``asked`` stages, or as many as the pipeline profile has ranks; else of the partitioner's number of stages and of
    the most that the cluster allows. Blocks of equal time where not one micro-batch fits: the judge then says what is
    lacking. Raises ``InvalidDocument`` for more stages than can be had.
    """
    most = min(problem.num_devices, problem.num_blocks)
    number = _number_of_stages(problem, asked, most)
    order = device_order(problem)
    row, layers = DeviceRow(problem, order[:most]), Layers(problem)
    recomputing = {"never": (False,), "auto": (False, True), "always": (True,)}[problem.recompute]
    found: list[Stages] = []
    for recompute, batch in product(recomputing, batches):
        settings = Settings(lenient=True, straight=True, recompute=recompute)
        straight = [each.allocation.stages for each in placed(problem, row, layers, batch, settings)]
        wanted = {number} if number else {len(straight[0]) if straight else most, most}
        found += [stages for stages in straight if len(stages) in wanted]
    if not found:
        blocks = block_partition(problem, batches[-1], number or most).stages
        found = [tuple(replace(stage, devices=(order[i],)) for i, stage in enumerate(blocks))]
    return list(dict.fromkeys(tuple(replace(stage, recompute=()) for stage in stages) for stages in found))


def _number_of_stages(problem: Problem, asked: int, most: int) -> int:
    """How many there have to be, 0 where that is open."""
    run = problem.pipeline_run
    if run is not None and asked not in (0, len(run.ranks)):
        raise InvalidDocument(
            f"option 'stages' asks for {asked} stages, but the pipeline profile has {len(run.ranks)} ranks",
            remedy=f"stages 0 or {len(run.ranks)}, or another pipeline profile",
        )
    number = asked if run is None else len(run.ranks)
    if number > most:
        raise InvalidDocument(
            f"{number} stages are asked for (option 'stages', or the ranks of the pipeline profile), but "
            f"{problem.num_devices} devices and {problem.num_blocks} separable blocks allow {most}",
            remedy=f"at most {most} stages",
        )
    return number
