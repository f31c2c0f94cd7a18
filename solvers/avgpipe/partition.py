"""AvgPipe's partitioner: PipeDream's, with one device for each stage (section 6)."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from penstock.schemas.errors import InvalidDocument
from penstock.solvers.allocation import Stage
from penstock.solvers.allocators.block_partition import block_partition
from penstock.solvers.allocators.pipedream.hierarchy import device_order
from penstock.solvers.allocators.pipedream.layers import Layers
from penstock.solvers.allocators.pipedream.placed import Settings, placed
from penstock.solvers.allocators.pipedream.row import DeviceRow
from penstock.solvers.batches import Batch
from penstock.solvers.problem import Problem


def most_stages(problem: Problem) -> int:
    """As many as there are devices, and blocks of layers that can be separated."""
    return min(problem.num_devices, int(problem.cuttable.sum()) + 1)


def stage_counts(problem: Problem, asked: int, batch: Batch) -> list[int]:
    """How many stages to try: as many as asked for, or as the measured run has; else the partitioner's, then the most.

    Raises ``InvalidDocument`` for more stages than can be had.
    """
    run = problem.pipeline_run
    if run is not None and asked in (0, len(run.ranks)):
        asked = len(run.ranks)
    elif run is not None:
        raise InvalidDocument(
            f"option 'stages' asks for {asked} stages, but the pipeline profile has {len(run.ranks)} ranks",
            remedy=f"stages 0 or {len(run.ranks)}, or another pipeline profile",
        )
    most, blocks = most_stages(problem), int(problem.cuttable.sum()) + 1
    if asked > most:
        raise InvalidDocument(
            f"{asked} stages are asked for (option 'stages', or the ranks of the pipeline profile), but "
            f"{problem.num_devices} devices and {blocks} separable blocks of layers allow {most}",
            remedy=f"at most {most} stages",
        )
    if asked:
        return [asked]
    found = _straight(problem, batch, False)
    return list(dict.fromkeys([len(found[0]), most])) if found else [most]


def partition(problem: Problem, batch: Batch, num_stages: int, recompute: bool) -> tuple[Stage, ...]:
    """Stages on the first devices, node by node; where not one micro-batch fits, blocks of equal time.

    The judge then says what is lacking.
    """
    for stages in _straight(problem, batch, recompute):
        if len(stages) == num_stages:
            return stages
    blocks = block_partition(problem, batch, num_stages).stages
    order = device_order(problem)
    return tuple(
        replace(stage, devices=(order[i],), recompute=((stage.first, stage.last),) if recompute else ())
        for i, stage in enumerate(blocks)
    )


@lru_cache(maxsize=64)
def _straight(problem: Problem, batch: Batch, recompute: bool) -> list[tuple[Stage, ...]]:
    """The best straight pipeline for each number of stages, the best of all first."""
    row, layers = _tables(problem)
    settings = Settings(recompute=recompute, lenient=True, straight=True)
    return [found.allocation.stages for found in placed(problem, row, layers, batch, settings)]


@lru_cache(maxsize=8)
def _tables(problem: Problem) -> tuple[DeviceRow, Layers]:
    return DeviceRow(problem, device_order(problem)[: most_stages(problem)]), Layers(problem)
