"""The model that a trainer's file describes, as a profile, and its global batch, stated or by default."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import PurePath

from penstock.layouts.megatron import reading
from penstock.layouts.megatron.flags import NO_GIVEN, Flags
from penstock.layouts.megatron.model import SHAPED_BY, context_kind_said, shape_said
from penstock.layouts.megatron.names import CONTEXT, RANKS, TENSOR
from penstock.layouts.torchtitan import models, torchtitan
from penstock.layouts.torchtitan.settings import Settings
from penstock.schemas.errors import Fault, InvalidDocument, UnsupportedRequest
from penstock.schemas.profile import ModelProfile
from penstock.schemas.transformers.degrees import ContextKind, Framework
from penstock.shapes.profiled_degrees import TENSOR_DEGREES, Asked
from penstock.shapes.profiles import computed_profile
from penstock.solvers.model.degrees import Degrees

TRAINERS: dict[str, Framework] = {"megatron": "megatron", "torchtitan": "torch"}
"""Whose files may say the model, and whose kernels then compute it."""
_STATED = {
    "deepspeed": r"[\"']train_batch_size[\"']\s*:\s*(\d{1,9})",
    "ranges": r"\"global_batch_size\"\s*:\s*(\d{1,9})",
}
_DEGREES_OF_DEEPSPEED = ("num_stages", "stages", "num_mp", "sequence_parallel_size", "autotp_size")


def degrees_said(
    form: str,
    text: str,
    source: str,
    given: Mapping[str, str] = NO_GIVEN,
    config: str | None = None,
    *,
    experts: bool = False,
) -> Degrees:
    """The degrees of a file, for a profile that has costs at them; 1 each where it has none, or is not understood.

    ``experts``: whether the model has any though the file does not say so.
    """
    if form == "torchtitan":
        return torchtitan.degrees_said(Settings(text, source, given, config))
    if form == "megatron":
        return reading.degrees_said(text, source, given, config, experts=experts)
    return Degrees()


def ask(
    form: str, text: str, source: str, given: Mapping[str, str], config: str | None, *, batch: bool, model: bool
) -> None:
    """Raise InvalidDocument for all at once that the file leaves open; ``batch``, ``model``: whether no option says it.

    Only Megatron's scripts leave anything open that is asked for.
    """
    if form == "megatron":
        names = ("global-batch-size",) * batch + SHAPED_BY * model
        Flags(text, source, given, config).ask(dict.fromkeys((*reading.ASKED, *names)))


@contextmanager
def naming_degrees(
    form: str, text: str, source: str, given: Mapping[str, str] = NO_GIVEN, config: str | None = None
) -> Iterator[None]:
    """What a model cannot have is said of the file's own degrees, by line."""
    try:
        yield
    except UnsupportedRequest as error:
        if form == "torchtitan":
            named = torchtitan.degrees_by_place(Settings(text, source, given, config))
        else:
            named = reading.degrees_by_place(text, source, given, config)
        if not named:
            raise
        said = f"{source} has {', '.join(name for name, _place in named)}"
        raise UnsupportedRequest(
            f"{said}, and no trainer has such a layout: {error.detail}",
            faults=tuple(Fault(place, name, "degree") for name, place in named),
            remedy=error.remedy,
        ) from None


def profile_said(
    form: str,
    text: str,
    source: str,
    device_kinds: Sequence[str],
    *,
    given: Mapping[str, str] = NO_GIVEN,
    config: str | None = None,
    compare: bool = True,
) -> ModelProfile:
    """The profile of the transformer that a file describes or names, computed for these kinds of devices.

    It has costs at the file's degrees, and with ``compare`` at the usual ones. Raises InvalidDocument where the file
    does not say all of a transformer, UnsupportedRequest for one whose costs are not computed.
    """
    if form not in TRAINERS:
        raise InvalidDocument(
            f"{source} does not say the model: only Megatron's flags and torchtitan's configurations do",
            remedy="--example, --hf, or --profile",
        )
    stated = degrees_said(form, text, source, given, config)
    kind: ContextKind | None
    if form == "megatron":
        flags = Flags(text, source, given, config)
        shape, kind = shape_said(flags, config or PurePath(source).stem), context_kind_said(flags)
    else:
        shape = models.shape_said(Settings(text, source, given, config), source, config)
        kind = "all_gather" if stated.context > 1 else None
    with naming_degrees(form, text, source, given, config):
        return computed_profile(
            shape, TRAINERS[form], device_kinds, asked=asked_for(stated, compare=compare), context_kind=kind
        )


def asked_for(stated: Degrees, *, compare: bool) -> Asked:
    """Degrees at which a profile has to have costs: a layout's own, and with ``compare`` the usual ones."""
    tensor, context, expert, expert_tensor = stated
    if not compare:
        return Asked((tensor,), (context,), (expert,), expert_tensor)
    return Asked(
        tuple({*TENSOR_DEGREES, tensor}) if tensor not in (1, *TENSOR_DEGREES) else None,
        (1, context) if context > 1 else None,
        (1, expert) if expert > 1 and expert & (expert - 1) else None,
        expert_tensor,
    )


def batch_said(
    form: str,
    text: str,
    source: str = "the layout",
    values: Mapping[str, str] = NO_GIVEN,
    config: str | None = None,
    *,
    gpus: int | None = None,
) -> int | None:
    """Return the global batch size that a layout names; the reader checks it again.

    ``values``: what the text leaves open. Where the layout names no batch, return the trainer's default for a job on
    ``gpus``, which is each replica's samples once. None is returned where that does not follow from the text.
    """
    if form == "megatron":
        return _of_megatron(Flags(text, source, values, config), gpus)
    if form == "torchtitan":
        return _of_torchtitan(Settings(text, source, values, config), gpus)
    match = re.search(_STATED.get(form, r"(?!)"), text)
    if match is not None and int(match[1]):
        return int(match[1])
    return _of_deepspeed(text, gpus) if form == "deepspeed" else None


def _of_megatron(flags: Flags, gpus: int | None) -> int | None:
    """Return the batch of flags; without one, a micro-batch on each replica. Recipes in Python have other defaults."""
    stated = flags.number("global-batch-size")
    if stated is not None or flags.configured:
        return stated
    return _of_replicas(
        flags.number("micro-batch-size"), gpus, [flags.number(name) for name in (RANKS, TENSOR, CONTEXT)]
    )


def _of_torchtitan(settings: Settings, gpus: int | None) -> int | None:
    stated = settings.number("training", "global_batch_size")
    local = settings.number("training", "local_batch_size")
    degrees = [settings.number("parallelism", f"{kind}_parallel_degree") for kind in ("pipeline", "tensor", "context")]
    settings.faults.stop()
    return stated or _of_replicas(local, gpus, degrees)


def _of_deepspeed(text: str, gpus: int | None) -> int | None:
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", *_DEGREES_OF_DEEPSPEED)
    matches = {name: re.search(rf"[\"']?\b{name}[\"']?\s*[:=]\s*(\d{{1,9}})\b", text) for name in names}
    rows, steps, *degrees = (int(match[1]) if match else None for match in matches.values())
    return _of_replicas(rows and rows * (steps or 1), gpus, degrees)


def _of_replicas(samples: int | None, gpus: int | None, degrees: list[int | None]) -> int | None:
    """Return the samples of all replicas, of which a file's degrees leave so many on the GPUs of a job."""
    group = prod(degree or 1 for degree in degrees)
    if not samples or not gpus or gpus % group:
        return None
    return samples * (gpus // group)
