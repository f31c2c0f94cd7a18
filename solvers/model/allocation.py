"""An ``Allocation``: the layers of each stage, and the devices that hold it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, pairwise
from typing import Literal

from penstock.solvers.model.degrees import Modules


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers ``first`` to ``last`` (both included) on ``devices`` (indices of the problem, in replica order).

    ``recompute``: ranges of layers that are recomputed whole, each from its input; or ``modules``: the modules that
    every layer recomputes, one layer at a time. ``coded``: whether tensors are encoded on the edges to the previous and
    to the next stage (``codecs``).
    """

    first: int
    last: int
    devices: tuple[int, ...]
    dispatch: Literal["rows", "round_robin"] = "rows"
    recompute: tuple[tuple[int, int], ...] = ()
    coded: tuple[bool, bool] = (False, False)
    modules: Modules = ()

    @property
    def recomputes(self) -> bool:
        """Return whether any layer, or any part of one, is recomputed."""
        return bool(self.recompute or self.modules)

    @property
    def plain(self) -> Stage:
        """Return the stage with nothing recomputed."""
        return replace(self, recompute=(), modules=()) if self.recomputes else self

    @property
    def whole(self) -> Stage:
        """Return the stage with all layers recomputed as one run, from the stage's input."""
        return replace(self, recompute=((self.first, self.last),), modules=())

    def of_layers(self, first: int, last: int | None = None) -> Stage:
        """Return the stage with other layers, to its last one by default; it recomputes whole if it did."""
        end = self.last if last is None else last
        return replace(self, first=first, last=end, recompute=((first, end),) if self.recompute else ())

    @property
    def replicas(self) -> int:
        """Return the number of devices that hold the stage."""
        return len(self.devices)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages covering all layers in order, and the first and last micro-batch that they process."""

    stages: tuple[Stage, ...]
    micro_batches: tuple[int, int]


@dataclass(frozen=True)
class Allocation:
    """Pipelines of stages. Stages are numbered consecutively through all pipelines: see ``stages``."""

    pipelines: tuple[Pipeline, ...]
    num_micro_batches: int

    def __hash__(self) -> int:
        """Return the hash of the fields, computed once: caches use it often, also for 10,000 devices."""
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        """Leave the hash out, which differs in another process, and the index by device."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_hash", "held_stages")}

    def on(self, devices: Mapping[int, int]) -> Allocation:
        """Return the allocation with ``devices[d]`` in the place of device d."""
        return self.having(replace(stage, devices=tuple(devices[d] for d in stage.devices)) for stage in self.stages)

    def having(self, stages: Iterable[Stage]) -> Allocation:
        """Return the allocation with other stages, as many in each pipeline, in the order of their numbers."""
        left = iter(stages)
        pipelines = (replace(each, stages=tuple(islice(left, len(each.stages)))) for each in self.pipelines)
        return Allocation(tuple(pipelines), self.num_micro_batches)

    def recomputing(self, numbers: Container[int]) -> Allocation:
        """Return the allocation with the stages of these numbers recomputing whole."""
        return self.having(stage.whole if s in numbers else stage for s, stage in enumerate(self.stages))

    def in_turn(self) -> Allocation:
        """Return the allocation with replicas that take whole micro-batches in turn."""
        turning = (replace(each, dispatch="round_robin") if each.replicas > 1 else each for each in self.stages)
        return self.having(turning)

    @cached_property
    def _hash(self) -> int:
        return hash((self.pipelines, self.num_micro_batches))

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Return all stages; the index in this tuple is the stage's number in operations."""
        return tuple(stage for pipeline in self.pipelines for stage in pipeline.stages)

    @cached_property
    def pipeline_of(self) -> tuple[int, ...]:
        """Return the pipeline of each stage number."""
        return tuple(p for p, pipeline in enumerate(self.pipelines) for _ in pipeline.stages)

    @cached_property
    def held_stages(self) -> dict[int, tuple[int, ...]]:
        """Return the numbers of the stages that each device holds, ascending; devices by their first stages."""
        numbers: dict[int, tuple[int, ...]] = {}
        for s, stage in enumerate(self.stages):
            for device in stage.devices:
                numbers[device] = (*numbers.get(device, ()), s)
        return numbers

    def previous(self, stage: int) -> int | None:
        """Return the number of the previous stage in the same pipeline."""
        return stage - 1 if stage > 0 and self.pipeline_of[stage - 1] == self.pipeline_of[stage] else None

    def next(self, stage: int) -> int | None:
        """Return the number of the next stage in the same pipeline."""
        last = len(self.pipeline_of) - 1
        return stage + 1 if stage < last and self.pipeline_of[stage + 1] == self.pipeline_of[stage] else None

    def micro_batches(self, stage: int) -> range:
        """Return the micro-batches that pass through a stage."""
        first, last = self.pipelines[self.pipeline_of[stage]].micro_batches
        return range(first, last + 1)


def stages_on(places: Iterable[tuple[int, ...]], bounds: Iterable[int]) -> tuple[Stage, ...]:
    """Return a stage on the devices of each place, of the layers from a bound to the next one."""
    return tuple(Stage(first, stop - 1, place) for place, (first, stop) in zip(places, pairwise(bounds), strict=True))


def single_pipeline(stages: tuple[Stage, ...], num_micro_batches: int) -> Allocation:
    """Return the usual allocation: one pipeline that processes every micro-batch."""
    return Allocation((Pipeline(stages, (0, num_micro_batches - 1)),), num_micro_batches)
