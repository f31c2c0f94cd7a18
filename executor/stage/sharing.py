"""The grouping of a stage's parameters into units, whose rows the replicas share out (``sharded_parameters``)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from penstock.executor.stage.sharded_parameters import Group, Member, RowPiece, Shards, Unit
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.program import WITHIN_PASSES, Program

if TYPE_CHECKING:
    from penstock.executor.stage.held_stage import StageParts


def share_out(
    parts: StageParts, program: Program, groups: Sequence[Any], modules: Mapping[int, nn.Module]
) -> tuple[StageParts, Shards | None]:
    """Replace parameters that ranks share out by this rank's rows; return the stage's parts and their units.

    A unit's parameters have one bucket, group and data type. Where collectives lie inside passes, they also have the
    same layers, so a parameter that several layers hold has a separate unit. Raises UnsupportedRequest for a parameter
    without dimensions.
    """
    sharding = program.sharding
    if sharding is None:
        return parts, None
    names = {id(parameter): name for name, parameter in parts.names.items()}
    holders = _holders(modules, parts.entry.first, parts.entry.last)
    units: dict[int, list[Unit]] = {}
    layers: dict[int, list[Unit]] = {}
    rows: dict[int, RowPiece] = {}
    for k in parts.buckets:
        units[k] = []
        for members, number in parts.summed(k):
            if number < 0:
                continue
            ranks = program.groups[number]
            group = Group(groups[number], ranks, ranks.index(program.rank))
            kinds: dict[Hashable, list[Member]] = {}
            for parameter in members:
                name = names[id(parameter)]
                _refuse_scalar(name, parameter, program)
                piece: Any = parts.pieces.get(name)
                leaf = parameter if piece is None else piece.leaf
                within = holders[id(leaf)] if sharding in WITHIN_PASSES else ()
                kinds.setdefault((parameter.dtype, within), []).append(Member(leaf, parameter, piece))
            for same in kinds.values():
                unit = Unit(same, group, sharding)
                units[k].append(unit)
                rows |= unit.pieces
                for layer in dict.fromkeys(layer for member in same for layer in holders[id(member.leaf)]):
                    layers.setdefault(layer, []).append(unit)
    local = {id(part): rows[id(part)].local_parameter if id(part) in rows else part for part in parts.parameters}
    shared = replace(
        parts,
        buckets={k: [local[id(part)] for part in members] for k, members in parts.buckets.items()},
        names={name: local[id(part)] for name, part in parts.names.items()},
        pieces={**parts.pieces, **{names[part]: piece for part, piece in rows.items()}},
    )
    return shared, Shards(sharding, units, layers)


def _holders(modules: Mapping[int, nn.Module], first: int, last: int) -> dict[int, tuple[int, ...]]:
    """Return the layers of a stage that hold each parameter, by the parameter's id."""
    holders: dict[int, tuple[int, ...]] = {}
    for layer in range(first, last + 1):
        for parameter in modules[layer].parameters():
            holders[id(parameter)] = (*holders.get(id(parameter), ()), layer)
    return holders


def _refuse_scalar(name: str, parameter: nn.Parameter, program: Program) -> None:
    if parameter.dim() == 0:
        raise UnsupportedRequest(
            f"parameter {name!r} is a single number, which sharding {program.sharding} cannot split over ranks",
            remedy="give the parameter the shape (1,), or plan with --sharding optimizer",
        )
