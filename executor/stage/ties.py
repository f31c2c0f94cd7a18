"""Parameters that several layers share, such as an embedding that is also the output's weight.

The layers that one process holds share one Parameter object. Where stages on different ranks hold them, each has a
separate copy. All copies begin with the value that the first layer draws, and their gradients are summed before every
step (REDUCE_SHARED), so all of them stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from penstock.executor.run.job import Job, shared_names
from penstock.schemas.errors import InvalidDocument, ModelMismatch


class Tie(NamedTuple):
    """One parameter of several layers, with its full names. ``places``: the same as (layer, name within the layer).

    The first name represents the parameter.
    """

    names: tuple[str, ...]
    places: tuple[tuple[int, str], ...]

    @property
    def name(self) -> str:
        """The name in profiles, plans, checks and checkpoints."""
        return self.names[0]

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that have it, ascending, each once."""
        return tuple(sorted({layer for layer, _ in self.places}))

    def parameter(self, modules: Mapping[int, nn.Module]) -> nn.Parameter | None:
        """Return the parameter as it is in these layers; None if none of them has it."""
        for (layer, name), full in zip(self.places, self.names, strict=True):
            if layer in modules:
                return _find(modules[layer], name, full)
        return None

    def join(self, modules: Mapping[int, nn.Module], build: Callable[[int], nn.Module]) -> None:
        """Make the parameter one object in these layers. ``build`` makes the first layer if ``modules`` lacks it.

        Raises ModelMismatch where a layer has no such parameter, or a parameter of another shape or type.
        """
        here = [one for one in zip(self.places, self.names, strict=True) if one[0][0] in modules]
        if not here:
            return
        (layer, name), full = here[0]
        kept = _find(modules[layer], name, full)
        (first, first_name), first_full = self.places[0], self.names[0]
        if first not in modules:
            value = _find(build(first), first_name, first_full)
            _refuse_other(value, first_full, kept, full)
            if not kept.is_meta:
                with torch.no_grad():
                    kept.copy_(value)
        for (layer, name), other in here[1:]:
            _refuse_other(kept, full, _find(modules[layer], name, other), other)
            *path, attribute = name.split(".")
            setattr(modules[layer].get_submodule(".".join(path)), attribute, kept)

    def rejoin(self, modules: Mapping[int, nn.Module]) -> None:
        """Make the parameter one object again in these layers, which have been divided one by one.

        Raises ModelMismatch where they are divided differently.
        """
        here = [one for one in zip(self.places, self.names, strict=True) if one[0][0] in modules]
        if not here:
            return
        (layer, name), full = here[0]
        kept = _find(modules[layer], name, full)
        for (layer, name), other in here[1:]:
            parameter = _find(modules[layer], name, other)
            if getattr(parameter, "placements", None) != getattr(kept, "placements", None):
                raise ModelMismatch(
                    f"{full!r} and {other!r} are declared as one parameter, but `parallel` divides them differently",
                    remedy="divide both along the same dimension",
                )
            *path, attribute = name.split(".")
            setattr(modules[layer].get_submodule(".".join(path)), attribute, kept)


def ties_of(job: Job, names: Sequence[str]) -> tuple[Tie, ...]:
    """Return the job's ties. Raises InvalidDocument for a layer that does not exist and for a parameter in two ties."""
    ties, seen = [], set()
    numbers = {name: i for i, name in enumerate(names)}
    for full_names in shared_names(job):
        places = []
        for full in full_names:
            layer = max((name for name in names if full.startswith(name + ".")), key=len, default=None)
            if layer is None:
                raise InvalidDocument(
                    f"job {job.name!r}: shared_parameters names {full!r}, which is in no layer; write layer.parameter, "
                    f"with one of the layers {', '.join(names[:8])}{', …' if len(names) > 8 else ''}"
                )
            if full in seen:
                raise InvalidDocument(f"job {job.name!r}: shared_parameters names {full!r} twice")
            seen.add(full)
            places.append((numbers[layer], full[len(layer) + 1 :]))
        ties.append(Tie(full_names, tuple(places)))
    return tuple(ties)


def refuse_untied(
    ties: Sequence[Tie], stage_ranges: Sequence[tuple[int, int]], shared: Sequence[tuple[str, tuple[int, ...]]]
) -> None:
    """Raise ModelMismatch where the plan's ties, ``shared``, differ from the job's ties.

    ``stage_ranges``: first and last layer of each stage of this rank. A tie within one stage needs no tie in the plan.
    """
    by_name = {tie.name: tie for tie in ties}
    for name, layers in shared:
        match = by_name.get(name)
        if match is None or match.layers != tuple(sorted(set(layers))):
            has = "no layers share it" if match is None else f"layers {list(match.layers)} share it"
            raise ModelMismatch(
                f"layers {list(layers)} share the parameter {name!r} in the plan, but in the job's shared_parameters "
                f"{has}",
                remedy="profile this model and plan with that profile",
            )
    planned = {name for name, _ in shared}
    for tie in ties:
        for first, last in stage_ranges:
            inside = [first <= layer <= last for layer in tie.layers]
            if any(inside) and not all(inside) and tie.name not in planned:
                raise ModelMismatch(
                    f"the parameter {tie.name!r} is shared by the layers {list(tie.layers)}, which lie in different "
                    "stages, but the plan does not tie them, so its copies would diverge",
                    remedy="profile this model and plan with that profile",
                )


def _find(module: nn.Module, name: str, full: str) -> nn.Parameter:
    *path, attribute = name.split(".")
    try:
        return module.get_submodule(".".join(path)).get_parameter(attribute)
    except AttributeError:
        existing = [one for one, _ in module.named_parameters()]
        raise ModelMismatch(
            f"shared_parameters names {full!r}, but that layer has the parameters {existing}",
            remedy="write layer.parameter, as the layer's named_parameters() has it",
        ) from None


def _refuse_other(one: nn.Parameter, name: str, other: nn.Parameter, other_name: str) -> None:
    if one.shape != other.shape or one.dtype != other.dtype or one.requires_grad != other.requires_grad:
        raise ModelMismatch(
            f"{name!r} and {other_name!r} are declared as one parameter, but are {_words(one)} and {_words(other)}",
            remedy="tie parameters of the same shape and type, both trained or both frozen",
        )


def _words(parameter: nn.Parameter) -> str:
    return f"{tuple(parameter.shape)} {parameter.dtype}{'' if parameter.requires_grad else ' frozen'}"
