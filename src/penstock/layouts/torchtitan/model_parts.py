"""Parts of torchtitan's models: the modules of each stage, as stated, by split points, or as torchtitan cuts.

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
"""What the head is called in the releases that layouts are written for, the newest first.

A release silently drops the module of an unknown name, and trains without a head.
"""
OUTPUTS = (NORM, *HEADS.values())
FIRST_LESS, LAST_LESS = (f"pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last"))


def cut(said: Settings, schedule: str, given: Reading) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return the ranks and the stages: as stated, by split points, or as torchtitan cuts."""
    degree = said.number("parallelism", "pipeline_parallel_degree") or given.ranks
    parts = said.get("parallelism", "module_fqns_per_model_part")
    points = said.get("parallelism", "pipeline_parallel_split_points")
    if parts is not None:
        stages = _stages(parts, given, said)
    elif points:
        stages = _split(points, given, said)
    else:
        return degree or 1, _even(said, schedule, degree or 1, given)
    return degree or len(stages) // (1 if schedule in ONE_STAGE else 2) or 1, stages


def _even(said: Settings, schedule: str, ranks: int, given: Reading) -> tuple[tuple[int, int], ...]:
    """As torchtitan cuts by itself: layers, and what embedding and head count for, evenly; the first stages have more.

    Numbers of stages: as ``pipeline_parallel_layers_per_stage`` asks for, else one or two on each rank.
    """
    if ranks == 1:
        return ((0, len(given.profile.layers) - 1),)
    roles = given.roles
    if roles is None:
        said.fault("parallelism", "no module_fqns_per_model_part, and the profile's names say no transformer layers")
        said.faults.stop("say which they are (--set transformer=FIRST-LAST), or name the modules of each part")
    assert roles is not None
    first, last = (said.number("parallelism", name, least=0) for name in (FIRST_LESS, LAST_LESS))
    less = 1 if first is None else first, 1 if last is None else last
    counted = roles.number + sum(less)
    per_stage = said.number("parallelism", "pipeline_parallel_layers_per_stage")
    stages = -(-counted // per_stage) if per_stage else ranks * (1 if schedule in ONE_STAGE else 2)
    each, more = divmod(counted, stages)
    if each < max(1, *less):
        detail = f"{counted} layers (embedding counts as {less[0]}, head as {less[1]}) are too few for {stages} stages"
        said.fault("pipeline_parallel_degree", detail)
    said.faults.stop()
    counts = [each + (s < more) for s in range(stages)]
    counts[0] -= less[0]
    counts[-1] -= less[1]
    begins = [roles.first + sum(counts[:s]) for s in range(stages)]
    bounds = [0, *begins[1:], len(given.profile.layers)]
    return tuple((bounds[s], bounds[s + 1] - 1) for s in range(stages))


def _split(points: Any, given: Reading, said: Settings) -> tuple[tuple[int, int], ...]:
    """Older versions: the first module of each stage but the first."""
    known = _layer_of(given)
    names = points.split(",") if isinstance(points, str) else points
    if not isinstance(names, list) or not all(isinstance(name, str) and name.strip() in known for name in names):
        said.fault("pipeline_parallel_split_points", f"{str(points)[:80]} is no list of modules of the profile")
        said.faults.stop(f"names like {', '.join(list(known)[-4:])}")
    bounds = [0, *(known[name.strip()] for name in names), len(given.profile.layers)]
    if any(a >= b for a, b in pairwise(bounds)):
        said.fault("pipeline_parallel_split_points", f"{str(points)[:80]} do not come in the order of the model")
    said.faults.stop()
    return tuple((a, b - 1) for a, b in pairwise(bounds))


def _layer_of(given: Reading) -> dict[str, int]:
    """The layer of each module name, the profile's own and torchtitan's."""
    layers: dict[str, int] = {layer.name: i for i, layer in enumerate(given.profile.layers)}
    last = len(given.profile.layers) - 1
    for i in range(last + 1):
        layers |= dict.fromkeys(_modules(given.profile, given.roles, i, HEADS["0.3"]), i)
    return layers | {name: last for name in OUTPUTS if given.roles is not None and name not in layers}


def is_plain(profile: ModelProfile, roles: Roles | None) -> bool:
    """Return whether embedding and head are one layer each, so that torchtitan's names say every cut."""
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


def _stages(parts: Any, given: Reading, said: Settings) -> tuple[tuple[int, int], ...]:
    where = "module_fqns_per_model_part"
    shaped = isinstance(parts, list) and parts and all(isinstance(part, list) and part for part in parts)
    if not shaped or not all(isinstance(name, str) for part in parts for name in part):
        said.fault(where, f"parallelism.{where} is no list of lists of module names, each with one")
        said.faults.stop('[["tok_embeddings", "layers.0"], ["layers.1", "norm", "lm_head"]]')
    layers = _layer_of(given)
    last = len(given.profile.layers) - 1
    stages, expected = [], 0
    for p, part in enumerate(parts):
        unknown = [name for name in part if name not in layers]
        if unknown:
            said.fault(unknown[0], f"model part {p}: the profile has no layer for {unknown[0]!r}")
            said.faults.stop(f"names like {', '.join(list(layers)[-4:])}")
        held = sorted({layers[name] for name in part})
        if held != list(range(expected, expected + len(held))):
            shown = given.profile.layers[min(expected, last)].name
            detail = f"model part {p} holds {part[0]!r} …; layer {expected} ({shown}) is the next, all in order"
            said.fault(where, detail)
            said.faults.stop("every layer once, in the order of the model")
        stages.append((expected, held[-1]))
        expected = held[-1] + 1
    if expected <= last:
        said.fault(where, f"the model parts end with layer {expected - 1}; the profile has {last + 1}")
        said.faults.stop()
    return tuple(stages)
