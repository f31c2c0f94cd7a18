"""Limits of each trainer, for planners: orders, recomputation and cuts, as ``solvers.model.trainer_limits``.

`layouts.limits` checks plans against these limits, and names the trainers' files that state them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from penstock.convert.layer_roles import OPTION, Roles, roles_of
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import Target
from penstock.schemas.transformers.degrees import ALONE
from penstock.solvers.model.degrees import Module
from penstock.solvers.model.trainer_limits import Method, Span, Within


@dataclass(frozen=True, slots=True)
class Trainer:
    """A trainer, with our schedules by the name that it has for them in ``orders``; ``rounds`` is as in ``Within``."""

    name: str
    orders: dict[str, str]
    rounds: bool
    recompute: tuple[Method, ...]
    at_once: bool
    needs_roles: bool
    """Whether it trains embedding, transformer layers and head, or any chain of layers."""


TRAINERS: dict[str, Trainer] = {
    "megatron": Trainer(
        "megatron",
        {"early-backward": "1F1B", "interleaved": "interleaved 1F1B"},
        False,
        ("block", "uniform"),
        at_once=True,
        needs_roles=True,
    ),
    "torchtitan": Trainer(
        "torchtitan",
        {
            "early-backward": "1F1B",
            "gpipe": "GPipe",
            "interleaved": "Interleaved1F1B",
            "looped-bfs-lifo": "LoopedBFS",
            "zb-v": "ZBVZeroBubble",
        },
        True,
        ("uniform", "every"),
        at_once=False,
        needs_roles=False,
    ),
    "deepspeed": Trainer("deepspeed", {"early-backward": "1F1B"}, False, ("uniform",), at_once=True, needs_roles=False),
}
assert set(TRAINERS) == set(get_args(Target))
MODULES: dict[str, dict[Module, str]] = {
    "megatron": {
        "norm": "layernorm",
        "mlp": "mlp",
        "moe_act": "moe_act",
        "shared_experts": "shared_experts",
        "mla_up_proj": "mla_up_proj",
    },
    "torchtitan": {"operators": "selective"},
}
"""The modules that trainers recompute by themselves, in their words; ``mlp`` of a layer with experts is ``moe``."""


def recomputable(target: Target | None, *, is_divided: bool) -> frozenset[Module]:
    """Return the modules that plans may recompute by themselves, of layers that GPUs share or of whole ones.

    Without a target these are the modules that ranks recompute, of layers at degrees. A module that is recomputed alone
    has no other modules beside it, since bounds assume that modules do not overlap.
    """
    if target is not None:
        return frozenset(MODULES.get(target, {}))
    return frozenset(get_args(Module)) - set(ALONE) if is_divided else frozenset()


def within_of(target: str, profile: ModelProfile, stated: str = "") -> Within:
    """Return the limits of a trainer for a model. Raises UnsupportedRequest where the trainer has no such model."""
    trainer = TRAINERS[target]
    roles = roles_of(profile, stated)
    last = len(profile.layers) - 1
    if roles is None and trainer.needs_roles:
        raise UnsupportedRequest(
            f"{target} trains an embedding, transformer layers and a head; the names of the layers of "
            f"{profile.name!r} do not say which are which ({profile.layers[0].name} … {profile.layers[last].name})",
            remedy=f"say which are the transformer layers: options {{{OPTION}: 1-{last - 1}}} "
            f"(--set {OPTION}=1-{last - 1}), or another target",
        )
    spans = target != "deepspeed" and roles is not None
    return Within(
        trainer=target,
        schedules=tuple(trainer.orders),
        rounds=trainer.rounds,
        recompute=trainer.recompute,
        at_once=trainer.at_once,
        span=Span(roles.first, roles.last) if spans and roles is not None else Span(0, last),
        cuts=tuple(_may_end(i, roles if trainer.needs_roles else None) for i in range(last)),
    )


def _may_end(layer: int, roles: Roles | None) -> bool:
    """Return whether a stage may end with a layer; Megatron keeps embedding, multi-token prediction and head whole."""
    return roles is None or roles.first - 1 <= layer <= roles.last or layer == roles.last + roles.mtp
