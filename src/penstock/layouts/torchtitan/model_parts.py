"""Parts of torchtitan's models: the modules of each stage, as stated, by split points, or by torchtitan's own cut.

.. [1] torchtitan, ``distributed/pipeline_parallel.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from penstock.convert.layer_roles import Roles
from penstock.layouts.drawn import Expressed, Reading
from penstock.layouts.torchtitan.settings import Settings
from penstock.schemas.profile import ModelProfile
from penstock.solvers.schedules.trainer_orders import ONE_STAGE

EMBEDDING, NORM = "tok_embeddings", "norm"
HEADS = {"0.3": "lm_head", "0.2": "output"}
"""Names of the head in the releases that layouts are written for, the newest first.

A release silently drops the module of an unknown name, and trains without a head.
"""
OUTPUTS = (NORM, *HEADS.values())
FIRST_LESS, LAST_LESS = (f"pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last"))


def cut(settings: Settings, schedule: str, reading: Reading) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return the ranks and the stages: as stated, by split points, or by torchtitan's own cut."""
    degree = settings.number("parallelism", "pipeline_parallel_degree") or reading.ranks
    parts = settings.get("parallelism", "module_fqns_per_model_part")
    points = settings.get("parallelism", "pipeline_parallel_split_points")
    if parts is not None:
        stages = _stages(parts, reading, settings)
    elif points:
        stages = _split(points, reading, settings)
    else:
        return degree or 1, _even(settings, schedule, degree or 1, reading)
    return degree or len(stages) // (1 if schedule in ONE_STAGE else 2) or 1, stages


def _even(settings: Settings, schedule: str, ranks: int, reading: Reading) -> tuple[tuple[int, int], ...]:
    """Cut as torchtitan does by itself: layers, with embedding and head counted in, evenly; the first stages have more.

    ``pipeline_parallel_layers_per_stage`` gives the number of stages, else there are one or two on each rank.
    """
    if ranks == 1:
        return ((0, len(reading.profile.layers) - 1),)
    roles = reading.roles
    if roles is None:
        settings.fault(
            "parallelism", "no module_fqns_per_model_part, and the profile's names say no transformer layers"
        )
        settings.faults.stop("say which they are (--set transformer=FIRST-LAST), or name the modules of each part")
    assert roles is not None
    first, last = (settings.number("parallelism", name, least=0) for name in (FIRST_LESS, LAST_LESS))
    less = 1 if first is None else first, 1 if last is None else last
    counted = roles.number + sum(less)
    per_stage = settings.number("parallelism", "pipeline_parallel_layers_per_stage")
    stages = -(-counted // per_stage) if per_stage else ranks * (1 if schedule in ONE_STAGE else 2)
    each, more = divmod(counted, stages)
    if each < max(1, *less):
        detail = f"{counted} layers (embedding counts as {less[0]}, head as {less[1]}) are too few for {stages} stages"
        settings.fault("pipeline_parallel_degree", detail)
    settings.faults.stop()
    counts = [each + (s < more) for s in range(stages)]
    counts[0] -= less[0]
    counts[-1] -= less[1]
    begins = [roles.first + sum(counts[:s]) for s in range(stages)]
    bounds = [0, *begins[1:], len(reading.profile.layers)]
    return tuple((bounds[s], bounds[s + 1] - 1) for s in range(stages))


def _split(points: Any, reading: Reading, settings: Settings) -> tuple[tuple[int, int], ...]:
    """Read split points of older versions: the first module of each stage but the first."""
    layers = _layer_of(reading)
    names = points.split(",") if isinstance(points, str) else points
    if not isinstance(names, list) or not all(isinstance(name, str) and name.strip() in layers for name in names):
        settings.fault("pipeline_parallel_split_points", f"{str(points)[:80]} is no list of modules of the profile")
        settings.faults.stop(f"names like {', '.join(list(layers)[-4:])}")
    bounds = [0, *(layers[name.strip()] for name in names), len(reading.profile.layers)]
    if any(a >= b for a, b in pairwise(bounds)):
        settings.fault("pipeline_parallel_split_points", f"{str(points)[:80]} do not come in the order of the model")
    settings.faults.stop()
    return tuple((a, b - 1) for a, b in pairwise(bounds))


def _layer_of(reading: Reading) -> dict[str, int]:
    """Return the layer of each module name, the profile's own and torchtitan's."""
    layers: dict[str, int] = {layer.name: i for i, layer in enumerate(reading.profile.layers)}
    last = len(reading.profile.layers) - 1
    for i in range(last + 1):
        layers |= dict.fromkeys(_modules(reading.profile, reading.roles, i, HEADS["0.3"]), i)
    return layers | {name: last for name in OUTPUTS if reading.roles is not None and name not in layers}


def is_plain(profile: ModelProfile, roles: Roles | None) -> bool:
    """Return whether embedding and head are one layer each, so that torchtitan's names can state every cut."""
    return roles is not None and roles.first == 1 and roles.after == 1


def names_of(plan: Expressed, first: int, last: int, release: str) -> list[str]:
    """Return the modules of a stage by the names of a release."""
    names: list[str] = []
    for layer in range(first, last + 1):
        names += _modules(plan.profile, plan.roles, layer, HEADS[release])
    return names


def _modules(profile: ModelProfile, roles: Roles | None, layer: int, head: str) -> Sequence[str]:
    if roles is None or not is_plain(profile, roles):
        return (profile.layers[layer].name,)
    if layer < roles.first:
        return (EMBEDDING,)
    return (f"layers.{layer - roles.first}",) if layer <= roles.last else (NORM, head)


def _stages(parts: Any, reading: Reading, settings: Settings) -> tuple[tuple[int, int], ...]:
    where = "module_fqns_per_model_part"
    shaped = isinstance(parts, list) and parts and all(isinstance(part, list) and part for part in parts)
    if not shaped or not all(isinstance(name, str) for part in parts for name in part):
        settings.fault(where, f"parallelism.{where} is no list of lists of module names, each with one")
        settings.faults.stop('[["tok_embeddings", "layers.0"], ["layers.1", "norm", "lm_head"]]')
    layers = _layer_of(reading)
    last = len(reading.profile.layers) - 1
    stages, expected = [], 0
    for p, part in enumerate(parts):
        unknown = [name for name in part if name not in layers]
        if unknown:
            settings.fault(unknown[0], f"model part {p}: the profile has no layer for {unknown[0]!r}")
            settings.faults.stop(f"names like {', '.join(list(layers)[-4:])}")
        numbers = sorted({layers[name] for name in part})
        if numbers != list(range(expected, expected + len(numbers))):
            shown = reading.profile.layers[min(expected, last)].name
            detail = f"model part {p} holds {part[0]!r} …; layer {expected} ({shown}) is the next, all in order"
            settings.fault(where, detail)
            settings.faults.stop("every layer once, in the order of the model")
        stages.append((expected, numbers[-1]))
        expected = numbers[-1] + 1
    if expected <= last:
        settings.fault(where, f"the model parts end with layer {expected - 1}; the profile has {last + 1}")
        settings.faults.stop()
    return tuple(stages)
