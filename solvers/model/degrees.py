"""Degrees of parallelism within a stage, and a profile's costs of a model at given degrees."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import numpy as np

Sharding = Literal["none", "optimizer", "gradients", "parameters", "parameters_kept"]
SHARDED: dict[Sharding, str] = {
    "none": "nothing sharded",
    "optimizer": "optimizer sharded",
    "gradients": "gradients sharded",
    "parameters": "parameters sharded",
    "parameters_kept": "parameters sharded and kept",
}
"""Names of the shardings in headlines and sentences."""
IN_ONE_STAGE: tuple[Sharding, ...] = ("gradients", "parameters")
"""Shardings whose shards move with every micro-batch, and which are therefore planned in one stage, on all GPUs."""
Phase = Literal["forward", "backward", "step"]
Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]
Over = Literal["tensor", "context", "expert"]
Module = Literal["attention", "mlp", "norm", "mla_up_proj", "moe_act", "shared_experts", "operators"]
Modules = tuple[Module, ...]
"""Modules of a layer that are recomputed by themselves, in this order."""
WITHIN: dict[Module, Module] = {"mla_up_proj": "attention", "moe_act": "mlp", "shared_experts": "mlp"}
"""Modules that are parts of another one, which recomputes them as well."""


def modules_of(named: Iterable[Container[Module]]) -> Modules:
    """Return the modules that are in all of these, in their order."""
    every = list(named)
    return tuple(module for module in get_args(Module) if all(module in each for each in every))


def without_parts(modules: Modules) -> Modules:
    """Return the modules that are not parts of other modules in the tuple."""
    return tuple(module for module in modules if WITHIN.get(module) not in modules)


ModuleCosts = dict[Module, tuple[np.ndarray, np.ndarray]]
"""Arrays (L,) by module: times in ns, and the bytes that recomputing frees."""


def undominated(sets: Sequence[Modules], measured: Iterable[tuple[ModuleCosts, np.ndarray]]) -> tuple[Modules, ...]:
    """Return the sets of modules without sets that another dominates: it frees as much in no more time, in every layer.

    ``measured``: of each measurement the modules, and the stash (L,), which is the most that a set frees. Of sets that
    are alike the first is kept.
    """
    points = list(measured)
    times, freed = (
        np.stack([np.concatenate([total(each, *point) for point in points]) for each in sets])
        for total in (_times, _freed)
    )
    kept: list[int] = []
    for one in range(len(sets)):
        better = (times <= times[one]).all(axis=1) & (freed >= freed[one]).all(axis=1)
        alike = (times == times[one]).all(axis=1) & (freed == freed[one]).all(axis=1)
        alike[:one] = False
        if not (better & ~alike).any():
            kept.append(one)
    return tuple(sets[one] for one in kept)


def _times(modules: Modules, costs: ModuleCosts, _stash: np.ndarray) -> np.ndarray:
    return np.asarray(np.sum([costs[each][0] for each in modules], axis=0))


def _freed(modules: Modules, costs: ModuleCosts, stash: np.ndarray) -> np.ndarray:
    return np.asarray(np.minimum(np.sum([costs[each][1] for each in modules], axis=0), stash))


class Degrees(NamedTuple):
    """Numbers of GPUs that share a layer: its tensors, its sequence, its experts, the tensors of an expert."""

    tensor: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1

    @property
    def mesh(self) -> int:
        """Return the number of GPUs that together run one slice of a micro-batch."""
        return self.tensor * self.context

    @property
    def cell(self) -> int:
        """Return the number of neighbouring GPUs that hold a replica: the larger of a mesh and an expert group."""
        return max(self.mesh, self.expert_group)

    @property
    def expert_group(self) -> int:
        """Return the number of GPUs that together hold each expert once."""
        return self.expert * self.expert_tensor

    @property
    def meshes(self) -> int:
        """Return g, the number of meshes of a cell; they run equally many samples of a micro-batch."""
        return self.cell // self.mesh

    @property
    def meshes_in_words(self) -> str:
        """Return the meshes of a cell in words: ``8 GPUs``, ``4 groups of 2 GPUs``."""
        return f"{self.meshes} GPUs" if self.mesh == 1 else f"{self.meshes} groups of {self.mesh} GPUs"

    def __str__(self) -> str:
        """Return the degrees above 1 in words, such as ``tensor 8, context 2``; ``tensor 1`` if all are 1."""
        above = {name: value for name, value in self._asdict().items() if value > 1} or {"tensor": self.tensor}
        return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in above.items())


class Choice(NamedTuple):
    """A choice made before a pipeline is planned.

    ``sharding``: the parts of the model that replicas share out, None for the memory rules' sharding. ``excluded``: the
    kind of devices that are left out, None for none. ``values``: of further axes (``degrees.axes``), each with its
    name.
    """

    degrees: Degrees = Degrees()
    sharding: Sharding | None = None
    excluded: str | None = None
    values: tuple[tuple[str, str], ...] = ()

    @property
    def in_one_stage(self) -> bool:
        """Return whether one stage holds the whole model, and all GPUs share out its sharded parts."""
        return self.sharding in IN_ONE_STAGE

    def __str__(self) -> str:
        """Return the choice in words, as bounds name it: ``tensor 8, optimizer sharding``."""
        sharded = "" if self.sharding is None else f", {SHARDED[self.sharding]}"
        more = "".join(f", {name} {value}" for name, value in self.values)
        return f"{self.degrees}{sharded}{more}{'' if self.excluded is None else f', without {self.excluded}'}"


@dataclass(frozen=True, slots=True)
class Collective:
    """Collectives of one layer in one pass of a micro-batch, by each group of the GPUs that run it.

    ``bytes``: of the whole tensor, summed over all collectives of this kind; of ``send`` and ``all_to_all`` the bytes
    that one GPU sends. ``count``: their number. ``hidden_ns``: the part of their time that computation hides.
    """

    phase: Phase
    operation: Operation
    over: Over
    bytes: int
    count: int = 1
    hidden_ns: int = 0


@dataclass(frozen=True, eq=False)
class CellModule:
    """A module of all layers: arrays (L,) int64 of its forward in ns and of the stash that recomputing it frees."""

    forward_ns: np.ndarray
    freed_bytes: np.ndarray
    collectives: tuple[tuple[Collective, ...], ...]


@dataclass(frozen=True, eq=False)
class CellMeasured:
    """All layers on one GPU of a mesh, for ``rows`` samples on that mesh; arrays (L,) int64, without collectives."""

    rows: int
    forward_ns: np.ndarray
    backward_ns: np.ndarray
    weight_ns: np.ndarray
    stash_bytes: np.ndarray
    workspace_bytes: np.ndarray
    collectives: tuple[tuple[Collective, ...], ...]
    modules: dict[Module, CellModule] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Variant:
    """A model at some degrees, seen from one GPU; L layers, sizes in bytes, times in ns.

    ``parameter_bytes``, ``trainable_bytes``, ``update_ns``: prefix sums (L + 1,) of one GPU's parameters and updates;
    ``expert_bytes``: the part of the trainable bytes that belongs to experts. ``copied_bytes``: as in problems.
    ``boundary_tensors``: for each cut its tensors' names and the bytes that one channel carries of each per sample,
    both ways.
    """

    degrees: Degrees
    parameter_bytes: np.ndarray
    trainable_bytes: np.ndarray
    expert_bytes: np.ndarray
    update_ns: np.ndarray
    boundary_tensors: tuple[tuple[tuple[str, int, int], ...], ...]
    shared_parameters: tuple[tuple[str, tuple[int, ...], int], ...]
    measured: dict[str, tuple[CellMeasured, ...]]
    copied_bytes: np.ndarray | None = None

    @property
    def modules(self) -> Modules:
        """Return the modules that every measurement has separate costs for."""
        return modules_of(point.modules for points in self.measured.values() for point in points)
