"""torchtitan's pipeline settings: TOML tables ``parallelism``, ``training`` and ``activation_checkpoint``.

``module_fqns_per_model_part`` names what each stage holds; stages are dealt to the pipeline ranks in turn. Module names
are those of torchtitan's transformers where the profile's names say embedding, transformer layers and head, else the
profile's own layer names.

.. [1] torchtitan, ``distributed/pipeline_parallel.py``, ``config/job_config.py``.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from typing import Any

from penstock.importers.lines import Faults
from penstock.layouts.drawn import NONE, Drawn, Expressed, Reading
from penstock.layouts.roles import Roles
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.profile import ModelProfile
from penstock.solvers.within import Recomputing

SCHEDULES = {
    "1F1B": "early-backward",
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved",
    "LoopedBFS": "looped-bfs",
}
EMBEDDING, NORM, OUTPUT = "tok_embeddings", "norm", "output"
OUTPUTS = (NORM, OUTPUT, "lm_head")


def write(plan: Expressed) -> str:
    """The tables."""
    parts = [_names(plan.profile, plan.roles, first, last) for first, last in plan.stages]
    schedule = next(theirs for theirs, ours in SCHEDULES.items() if ours == plan.order)
    lines = [f"# {line}" for line in plan.remarks()]
    lines += ["[parallelism]", f"pipeline_parallel_degree = {plan.ranks}"]
    lines += [
        f'pipeline_parallel_schedule = "{schedule}"',
        f"pipeline_parallel_microbatch_size = {plan.rows}",
        f"data_parallel_replicate_degree = {plan.replicas}",
        "data_parallel_shard_degree = 1",
        "module_fqns_per_model_part = [",
        *(f"    {json.dumps(names, ensure_ascii=False)}," for names in parts),
        "]",
        "",
        "[training]",
        f"local_batch_size = {plan.rows * plan.num_micro_batches}",
        f"global_batch_size = {plan.global_batch_size}",
        "",
        "[activation_checkpoint]",
        f'mode = "{"none" if plan.recompute.method == "none" else "full"}"',
        "",
    ]
    return "\n".join(lines)


def read(text: str, given: Reading) -> Drawn:
    """The layout of TOML, or of JSON with the same names. Raises InvalidDocument saying where."""
    data = _parsed(text, given.source)
    faults = Faults(given.source)
    parallel, training = _table(data, "parallelism", faults), _table(data, "training", faults)
    parts = parallel.get("module_fqns_per_model_part")
    stages = _stages(parts, given, faults)
    ranks = _number(parallel, "pipeline_parallel_degree", faults) or given.ranks or len(stages)
    if parallel.get("pipeline_parallel_schedule_csv"):
        faults.add(None, "pipeline_parallel_schedule_csv names a file: read that with `penstock import schedule`")
    name = parallel.get("pipeline_parallel_schedule", "1F1B" if len(stages) == ranks else "Interleaved1F1B")
    schedule = {key.lower(): ours for key, ours in SCHEDULES.items()}.get(str(name).lower())
    if schedule is None:
        faults.add(None, f"pipeline_parallel_schedule {name!r} is none of {', '.join(SCHEDULES)}")
    if ranks and len(stages) % ranks:
        faults.add(None, f"{len(stages)} model parts cannot be dealt to {ranks} pipeline ranks")
    elif schedule is not None and (len(stages) == ranks) != (schedule in ("early-backward", "gpipe")):
        faults.add(None, f"{name} with {len(stages)} model parts on {ranks} ranks: torchtitan refuses it")
    rows = _number(parallel, "pipeline_parallel_microbatch_size", faults) or given.rows or 1
    local, whole = (_number(training, f"{size}_batch_size", faults) for size in ("local", "global"))
    mode = _table(data, "activation_checkpoint", faults).get("mode", "none")
    if mode not in ("none", "full", "selective"):
        faults.add(None, f"activation_checkpoint.mode {mode!r} is none of none, full, selective")
    if local is not None and local % rows:
        faults.add(None, f"local_batch_size {local} is no multiple of pipeline_parallel_microbatch_size {rows}")
    faults.stop()
    said = ["selective checkpoints are inside the profile's stashes, or they are not counted"] * (mode == "selective")
    if _number(parallel, "data_parallel_shard_degree", faults) not in (None, 1):
        said.append("parameters are counted as replicated, not as sharded (data_parallel_shard_degree)")
    return Drawn(
        stages,
        ranks,
        schedule or "",
        rows=rows,
        global_batch_size=whole,
        recompute=Recomputing("uniform", 1) if mode == "full" else NONE,
        assumptions=tuple(said),
    )


def _parsed(text: str, source: str) -> dict[str, Any]:
    try:
        data = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise InvalidDocument(f"{source} is neither TOML nor JSON: {error}") from None
    if not isinstance(data, dict):
        raise InvalidDocument(f"{source} holds {type(data).__name__}, no tables")
    return data


def _table(data: dict[str, Any], name: str, faults: Faults) -> dict[str, Any]:
    found = data.get(name, {})
    if not isinstance(found, dict):
        faults.add(None, f"{name} is no table")
        return {}
    return found


def _number(table: dict[str, Any], name: str, faults: Faults) -> int | None:
    value = table.get(name)
    if value is None or (name == "global_batch_size" and value == -1):
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value < 10**9 or value == 0:
        faults.add(None, f"{name} is {value!r}, no number from 1 on")
        return None
    return value


def _plain(profile: ModelProfile, roles: Roles | None) -> bool:
    """Whether embedding and head are one layer each, so that torchtitan's names say every cut."""
    return roles is not None and roles.first == 1 and roles.behind == 1


def _names(profile: ModelProfile, roles: Roles | None, first: int, last: int) -> list[str]:
    names: list[str] = []
    for layer in range(first, last + 1):
        names += _modules(profile, roles, layer)
    return names


def _modules(profile: ModelProfile, roles: Roles | None, layer: int) -> Sequence[str]:
    if roles is None or not _plain(profile, roles):
        return (profile.layers[layer].name,)
    if layer < roles.first:
        return (EMBEDDING,)
    return (f"layers.{layer - roles.first}",) if layer <= roles.last else (NORM, OUTPUT)


def _stages(parts: Any, given: Reading, faults: Faults) -> tuple[tuple[int, int], ...]:
    shaped = isinstance(parts, list) and parts and all(isinstance(part, list) and part for part in parts)
    if not shaped or not all(isinstance(name, str) for part in parts for name in part):
        faults.add(None, "parallelism.module_fqns_per_model_part is no list of lists of module names, each with one")
        faults.stop('[["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]')
    layers: dict[str, int] = {layer.name: i for i, layer in enumerate(given.profile.layers)}
    for i in range(len(given.profile.layers)):
        layers |= dict.fromkeys(_modules(given.profile, given.roles, i), i)
    last = len(given.profile.layers) - 1
    layers |= {name: last for name in OUTPUTS if given.roles is not None and name not in layers}
    stages, expected = [], 0
    for p, part in enumerate(parts):
        unknown = [name for name in part if name not in layers]
        if unknown:
            faults.add(None, f"model part {p}: the profile has no layer for {unknown[0]!r}")
            faults.stop(f"names like {', '.join(list(layers)[-4:])}")
        held = sorted({layers[name] for name in part})
        if held != list(range(expected, expected + len(held))):
            shown = given.profile.layers[min(expected, last)].name
            faults.add(
                None, f"model part {p} holds {part[0]!r} …; layer {expected} ({shown}) is the next, all in order"
            )
            faults.stop("every layer once, in the order of the model")
        stages.append((expected, held[-1]))
        expected = held[-1] + 1
    if expected <= last:
        faults.add(None, f"the model parts end with layer {expected - 1}; the profile has {last + 1}")
        faults.stop()
    return tuple(stages)
