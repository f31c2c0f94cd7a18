"""Programs of single GPUs, made from the programs of model-parallel groups, whose GPUs run the same instructions.

GPU j of a group (its *lane*) sends to and receives from GPU j of other groups, and reduces with all GPUs that have the
same parameters: the same part of a layer's tensors in all meshes of all groups, and for routed experts the same
experts. So the checks of the groups' programs (order, rows, versions) hold for each lane, and the GPUs of a group enter
the collectives among themselves in one order, because they run the same instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.program import WEIGHT, Channel, Mesh, Program, RankStage, Shared
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Schedule, kinds_of
from penstock.solvers.model.update_rules import UpdateRule

Groups = tuple[tuple[int, ...], ...]


class Untrained(NamedTuple):
    """A part of a plan that ranks do not train, as a sentence, and a remedy."""

    why: str
    remedy: str


def untrained(problem: Problem, allocation: Allocation, rule: UpdateRule, schedule: Schedule) -> Untrained | None:
    """Return the part of a plan that ranks do not train; None where they train all of it."""
    degrees = problem.degrees
    copies = degrees.cell // degrees.tensor
    if copies > 1 and rule == "elastic_averaging":
        return Untrained(
            f"ranks do not train elastic averaging at {degrees}: {copies} GPUs of a cell hold the same parameters, and "
            "each would average as a pipeline of its own",
            "plan with another update rule, or with context and expert degrees that leave a GPU of a cell alone with "
            "its parameters, such as 1",
        )
    in_turn = [number for number, stage in enumerate(allocation.stages) if stage.dispatch == "round_robin"]
    if copies > 1 and rule == "weight_stashing" and in_turn:
        return Untrained(
            f"ranks do not train weight stashing at {degrees} where replicas take micro-batches in turn, as those of "
            f"stage {in_turn[0]}: the mean of a micro-batch's loss would be of its own cell's GPUs, and no group of "
            "ranks is these alone",
            "plan with another update rule, or with replicas that share micro-batches by rows",
        )
    again = next((stage.modules for stage in allocation.stages if stage.modules), ())
    if again and WEIGHT in kinds_of(schedule):
        return Untrained(
            f"ranks do not recompute {', '.join(again)} of each layer under schedule {schedule.name}, whose backwards "
            "come in two halves: each half would run them again, and the plan counts one",
            "plan with another schedule, or with recompute never or always",
        )
    if degrees.expert_tensor > 1:
        return Untrained(
            f"ranks do not run expert tensor {degrees.expert_tensor}; Megatron-Core does", "plan with expert tensor 1"
        )
    return None


def refuse_untrained(problem: Problem, allocation: Allocation, rule: UpdateRule, schedule: Schedule) -> None:
    """Raise UnsupportedRequest for a plan that ranks do not train."""
    fault = untrained(problem, allocation, rule, schedule)
    if fault is not None:
        raise UnsupportedRequest(fault.why, remedy=fault.remedy)


def of_gpus(programs: Sequence[Program], problem: Problem) -> list[Program]:
    """Return the programs of all GPUs of the model-parallel groups in ``programs``, group by group, by lane."""
    if problem.real is None:
        return list(programs)
    return _Cells(programs, problem).programs()


class _Cells:
    """The model-parallel groups of a run, and the communication groups of their GPUs by number."""

    def __init__(self, programs: Sequence[Program], problem: Problem) -> None:
        assert problem.real is not None
        self._programs = programs
        self._degrees = problem.degrees
        self._size = self._degrees.cell
        number = {device.name: index for index, device in enumerate(problem.devices)}
        names = [device.name for device in problem.real.devices]
        self._names = [[names[gpu] for gpu in problem.cells[number[program.device]]] for program in programs]
        self._groups: list[tuple[int, ...]] = []
        groups = programs[0].groups
        degrees = self._degrees
        self._dense = [self._between(group, degrees.tensor) for group in groups]
        shared = degrees.expert_group
        self._experts = [self._between(group, shared) if shared > 1 else [] for group in groups]
        self._tensor = self._inside(degrees.tensor, lambda lane: lane // degrees.tensor)
        self._context = self._inside(
            degrees.context, lambda lane: (lane // degrees.mesh) * degrees.tensor + lane % degrees.tensor
        )
        self._expert = self._inside(shared, lambda lane: lane // shared)

    def programs(self) -> list[Program]:
        """Return the programs of all GPUs."""
        groups = tuple(self._groups)
        return [
            self._of_gpu(program, lane, groups, self._names[cell][lane])
            for cell, program in enumerate(self._programs)
            for lane in range(self._size)
        ]

    def _add(self, ranks: tuple[int, ...]) -> int:
        """Add a group and return its number, -1 for a rank alone; no two reductions share a group."""
        if len(ranks) == 1:
            return -1
        self._groups.append(ranks)
        return len(self._groups) - 1

    def _between(self, cells: Sequence[int], parts: int) -> list[int]:
        """Return, for each of ``parts`` neighbouring lanes, the group of all GPUs of ``cells`` with the same part."""
        return [
            self._add(tuple(cell * self._size + lane for cell in cells for lane in range(part, self._size, parts)))
            for part in range(parts)
        ]

    def _inside(self, degree: int, key: Callable[[int], int]) -> list[list[int]]:
        """Return, for each model-parallel group and lane, the group of its lanes that have the same ``key``."""
        result = []
        for cell in range(len(self._programs)):
            numbers: dict[int, int] = {}
            for lane in range(self._size if degree > 1 else 0):
                if key(lane) not in numbers:
                    together = [each for each in range(self._size) if key(each) == key(lane)]
                    numbers[key(lane)] = self._add(tuple(cell * self._size + each for each in together))
            result.append([numbers.get(key(lane), -1) for lane in range(self._size)])
        return result

    def _of_gpu(self, program: Program, lane: int, groups: Groups, device: str) -> Program:
        degrees, cell = self._degrees, program.rank
        mesh = Mesh(
            *degrees,
            lane=lane,
            tensor_group=self._tensor[cell][lane],
            context_group=self._context[cell][lane],
            expert_group=self._expert[cell][lane],
        )
        tensor_rank = mesh.tensor_rank
        return replace(
            program,
            rank=cell * self._size + lane,
            world_size=program.world_size * self._size,
            device=device,
            global_batch_size=program.global_batch_size * mesh.meshes,
            row_classes=tuple((rows * mesh.meshes, count) for rows, count in program.row_classes),
            stages=tuple(self._stage(program, stage, mesh) for stage in program.stages),
            channels=tuple(self._channel(each, lane) for each in program.channels),
            groups=groups,
            shared=tuple(
                Shared(each.name, each.layers, self._dense[each.group][tensor_rank]) for each in program.shared
            ),
            mesh=mesh,
        )

    def _stage(self, program: Program, stage: RankStage, mesh: Mesh) -> RankStage:
        """Return a stage for one GPU: mesh m of a model-parallel group runs the m-th part of each micro-batch."""
        first_of = mesh.lane // (mesh.tensor * mesh.context)
        rows = tuple(
            (first_of * whole + low, first_of * whole + high)
            for (low, high), (whole, _count) in zip(stage.rows, program.row_classes, strict=True)
        )
        return replace(
            stage,
            ranks=tuple(rank * self._size + mesh.lane for rank in stage.ranks),
            rows=rows,
            buckets=tuple(
                (first, last, -1 if group < 0 else self._dense[group][mesh.tensor_rank])
                for first, last, group in stage.buckets
            ),
            expert_groups=tuple(
                -1 if group < 0 else self._experts[group][mesh.expert_rank] for _first, _last, group in stage.buckets
            )
            if self._degrees.expert_group > 1
            else (),
        )

    def _channel(self, channel: Channel, lane: int) -> Channel:
        return replace(channel, peer=channel.peer * self._size + lane)
