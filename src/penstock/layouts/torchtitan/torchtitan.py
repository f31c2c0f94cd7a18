"""torchtitan's pipeline settings: tables ``parallelism``, ``training`` and ``activation_checkpoint``, of two releases.

Up to 0.2 they are TOML and the head is called ``output``; from 0.3 on they are Python, and it is called ``lm_head``.

``module_fqns_per_model_part`` names what each stage holds; without it torchtitan cuts, evenly but for what embedding
and head count for. Stages are dealt to the pipeline ranks in turn, or in a V. Module names are those of torchtitan's
transformers where the profile's names say embedding, transformer layers and head, else the profile's own layer names.

.. [1] torchtitan, ``distributed/pipeline_parallel.py``, ``config/job_config.py`` (0.2), ``config/configs.py`` (0.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from penstock.convert.layer_roles import Roles
from penstock.layouts.compared import compared, sizes_of, unknown_sentence
from penstock.layouts.drawn import Drawn, Expressed, Reading
from penstock.layouts.stated_degrees import Stated, degrees_in
from penstock.layouts.torchtitan import files as torchtitan_files
from penstock.layouts.torchtitan.models import FLAVORS, named, without_kernels
from penstock.layouts.torchtitan.settings import LENGTH, Settings, checkpoints_in_words, checkpoints_of, unmodelled
from penstock.schemas.errors import Fault, UnsupportedRequest
from penstock.schemas.profile import ModelProfile
from penstock.solvers.model.degrees import Degrees, Sharding
from penstock.solvers.schedules.trainer_orders import IN_A_V, ONE_STAGE

SCHEDULES = {
    "1F1B": "early-backward",
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved",
    "LoopedBFS": "looped-bfs-lifo",
    "ZBVZeroBubble": "zb-v",
}
BEYOND = {
    "dualpipev": "runs a forward and a backward of one rank at once",
    "interleavedzerobubble": "splits backwards over stages in a loop",
}
EMBEDDING, NORM = "tok_embeddings", "norm"
HEADS = {"0.3": "lm_head", "0.2": "output"}
"""What the head is called in the releases that layouts are written for, the newest first.

A release silently drops the module of an unknown name, and trains without a head.
"""
OUTPUTS = (NORM, *HEADS.values())
WRITTEN = (
    "pipeline_parallel_degree",
    "pipeline_parallel_schedule",
    "pipeline_parallel_microbatch_size",
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "fsdp_reshard_after_forward",
    "tensor_parallel_degree",
    "context_parallel_degree",
    "enable_sequence_parallel",
    "expert_parallel_degree",
    "module_fqns_per_model_part",
    "local_batch_size",
    "global_batch_size",
    "activation_checkpoint",
    "mode",
    "pipeline_parallel_layers_per_stage",
    "pipeline_parallel_split_points",
    "pipeline_parallel_schedule_csv",
    "expert_tensor_parallel_degree",
)
"""Every setting that may be written, and those that a layout replaces."""
WHOLE_AT_ONE_RANK = (
    "FSDP without a pipeline shards parameters and gradients too, and gathers parameters for each layer's forward and "
    "backward: here only optimizer states are shared out, so memory is counted higher than it is, and the gathering is "
    "not timed"
)
RESHARD: dict[Sharding, str] = {"gradients": "never", "parameters": "always", "parameters_kept": "never"}
_GATHERED_EACH = (
    "fsdp_reshard_after_forward never: parameters are gathered once for each micro-batch, and judged is once a step"
)
_UNLIKE: dict[Sharding, str] = {
    "gradients": "torchtitan gathers parameters once for each micro-batch, the plan once a step",
    "parameters_kept": "without a pipeline torchtitan gathers parameters and sums gradients once for each micro-batch; "
    "the plan does either once a step, and counts gradients whole",
}
"""What FSDP without a pipeline does otherwise than a plan."""
TOKENS = "num_tokens_per_microbatch_per_dp_rank"
"""How newer heads than 0.3 state micro-batches: in tokens."""
FIRST_LESS, LAST_LESS = (f"pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last"))


def release_of(stated: str | None) -> str:
    """The release that a layout is written for: as stated, with or without a patch number, else the newest known.

    Raises UnsupportedRequest for one that layouts are not written for.
    """
    newest, *_older = HEADS
    found = newest if stated is None else ".".join(stated.split(".")[:2])
    if found not in HEADS:
        raise UnsupportedRequest(
            f"layouts for torchtitan are written for releases {' and '.join(HEADS)}, not {stated}",
            faults=(Fault("/release", f"{stated} is none of {', '.join(HEADS)}"),),
            remedy=f"--set release={newest}, or one of the others",
        )
    return found


def write(plan: Expressed, release: str | None = None) -> str:
    """The settings as the release reads them: TOML, or from 0.3 on a Python module that changes a configuration."""
    release = release_of(release)
    whole = not plan.shard_states and plan.replicas > 1
    fsdp = plan.shard_states or (release == "0.2" and plan.ranks > 1 and whole)
    said = plan.remarks()
    if fsdp and not plan.shard_states:
        said.append(
            "torchtitan 0.2 has no whole replicas of a pipeline: written as FSDP, which also shares out the "
            "optimizer states that the plan counts whole"
        )
    if fsdp and plan.ranks == 1 and plan.replicas > 1 and plan.sharding != "parameters":
        said.append(_UNLIKE.get(plan.sharding, WHOLE_AT_ONE_RANK))
    if plan.degrees.context > 1 and not plan.shard_states:
        said.append(
            "torchtitan shares out parameters and optimizer states over GPUs that share a sequence; the plan counts "
            "them whole"
        )
    if plan.gradient == "parameter" and plan.profile.parameter_dtype != "fp32":
        said.append("gradients are counted in 16 bits: training.mixed_precision_reduce has to say so")
    if not _plain(plan.profile, plan.roles):
        said.append(
            "modules are called as the profile's layers are: torchtitan drops what its model lacks, without a word"
        )
    shard = plan.replicas if fsdp else 1
    _refuse_experts(plan, release, shard)
    tables: dict[str, dict[str, Any]] = {
        "parallelism": {
            "pipeline_parallel_degree": plan.ranks,
            "pipeline_parallel_schedule": next(name for name, ours in SCHEDULES.items() if ours == plan.order),
            "pipeline_parallel_microbatch_size": plan.rows,
            "data_parallel_replicate_degree": 1 if fsdp else plan.replicas,
            "data_parallel_shard_degree": shard,
            **_kept_in_words(plan),
            **_degrees_in_words(plan, release),
            "module_fqns_per_model_part": [_names(plan, first, last, release) for first, last in plan.stages],
        },
        "training": {
            # without a pipeline micro-batches are steps of gradient accumulation
            "local_batch_size": plan.rows * (plan.num_micro_batches if plan.ranks > 1 else 1),
            "global_batch_size": plan.global_batch_size,
        },
    }
    written_as = torchtitan_files.toml if release == "0.2" else torchtitan_files.python
    return written_as([*said, f"for torchtitan {release}"], tables, checkpoints_in_words(plan, release))


def _kept_in_words(plan: Expressed) -> dict[str, Any]:
    """Whether FSDP gathers parameters again for each pass; left out, it does so without a pipeline."""
    if plan.sharding not in RESHARD or plan.replicas == 1:
        return {}
    return {"fsdp_reshard_after_forward": RESHARD[plan.sharding]}


def _degrees_in_words(plan: Expressed, release: str) -> dict[str, Any]:
    """Degrees where each device is one GPU; sequences are always parallel under tensor parallelism in 0.2."""
    if plan.gpus > 1:
        return {}
    degrees = plan.degrees
    words: dict[str, Any] = {"tensor_parallel_degree": degrees.tensor, "context_parallel_degree": degrees.context}
    if release != "0.2" and degrees.tensor > 1:
        words["enable_sequence_parallel"] = True
    words["expert_parallel_degree"] = degrees.expert
    return words


def _refuse_experts(plan: Expressed, release: str, shard: int) -> None:
    """Raise UnsupportedRequest for experts on more GPUs than torchtitan has for them: those of FSDP, CP and TP."""
    among = shard * plan.degrees.mesh
    if among % plan.degrees.expert:
        raise UnsupportedRequest(
            f"torchtitan {release} cannot express this plan: expert {plan.degrees.expert} does not divide the {among} "
            f"GPUs of FSDP {shard} × context {plan.degrees.context} × tensor {plan.degrees.tensor}; it shares out "
            "experts among these only",
            faults=(Fault("/plan/degrees", f"expert {plan.degrees.expert}", "target"),),
            remedy="plan with the optimizer sharded (--sharding optimizer), which is written as FSDP",
        )


def read(text: str, given: Reading) -> Drawn:
    """The layout of torchtitan's settings (``torchtitan_settings``). Raises InvalidDocument saying where."""
    said = Settings(text, given.source, given.given, given.config)
    _refuse_empty(said, given)
    name, schedule = _schedule(said)
    ranks, stages = _cut(said, schedule, given)
    if ranks == len(stages) == 1:  # without a pipeline no schedule is looked at
        schedule = "early-backward"
    if len(stages) % ranks:
        said.fault("pipeline_parallel_degree", f"{len(stages)} model parts cannot be dealt to {ranks} pipeline ranks")
    elif (len(stages) == ranks) != (schedule in ONE_STAGE) or (schedule in IN_A_V and len(stages) != 2 * ranks):
        parts = f"{len(stages)} model parts on {ranks} ranks"
        said.fault("pipeline_parallel_schedule", f"{name} with {parts}: torchtitan refuses it")
    rows, local, whole = _batch(said, ranks, given)
    checkpoints = checkpoints_of(said)
    if local is not None and local % rows:
        detail = f"local_batch_size {local} is no multiple of pipeline_parallel_microbatch_size {rows}"
        said.fault("local_batch_size", detail)
    degrees = _degrees(said, ranks, given)
    unknown = _compared(said, given)
    reduced = said.get("training", "mixed_precision_reduce")
    said.faults.stop()
    assumptions = [*degrees.assumptions, *unknown, *said.remarks, *checkpoints.assumptions]
    if more := said.get("model", "num_mtp_layers"):
        assumptions.append(f"num_mtp_layers {more}: judged without multi-token prediction, with which it would change")
    if converters := said.get("model", "converters"):
        names = ", ".join(map(str, converters)) if isinstance(converters, list) else converters
        assumptions.append(f"model.converters {names}: matrix products are judged in 16 bits all the same")
    return Drawn(
        stages,
        ranks,
        schedule,
        rows=rows,
        global_batch_size=whole,
        local_rows=None if ranks == 1 else local,
        recompute=checkpoints.recompute,
        modules=checkpoints.modules,
        shard_states=degrees.shard_states,
        processes=degrees.processes,
        degrees=degrees.stated.degrees,
        named=degrees.stated.named,
        sequence_parallel=said.get("parallelism", "enable_sequence_parallel") is not False,
        sharding=degrees.sharding,
        counted_whole=WHOLE_AT_ONE_RANK if ranks == 1 and degrees.shards else "",
        unmodelled=unmodelled(said),
        gradient=None if reduced is None else "fp32" if reduced == "float32" else "parameter",
        assumptions=tuple(assumptions),
    )


def _refuse_empty(said: Settings, given: Reading) -> None:
    """Raise InvalidDocument for a text that says nothing of a job."""
    if said.empty and given.ranks is None:
        said.fault("parallelism", "neither [parallelism] nor [training] nor [activation_checkpoint]")
        said.faults.stop("the settings of a job, or its degree (--pipeline-parallel-size)")


def _batch(said: Settings, ranks: int, given: Reading) -> tuple[int, int | None, int | None]:
    """Samples of a micro-batch, of a replica between two flushes, and of a step; heads after 0.3 count tokens."""
    local, whole = (said.number("training", f"{size}_batch_size") for size in ("local", "global"))
    rows = said.number("parallelism", "pipeline_parallel_microbatch_size") or given.rows or 1
    if ranks == 1:  # without a pipeline nothing cuts the local batch
        rows = local or given.rows or 1
    tokens = said.number("training", TOKENS)
    if tokens is None:
        return rows, local, whole
    shape = given.profile.shape
    length = said.number("training", LENGTH) or (None if shape is None else shape.sequence_length)
    step = said.number("training", "num_tokens_per_train_step")
    if length is None or tokens % length or (step or 0) % length:
        odd = tokens if length is None or tokens % length else step
        said.fault(TOKENS, f"training has {odd} tokens, no multiple of samples of {length or 'unknown'} tokens")
        said.faults.stop(f"training.{LENGTH} of which they are a multiple")
    assert length is not None
    rows = tokens // length
    number = said.number("parallelism", "num_pp_microbatches") or 1
    return rows, rows * number if ranks > 1 else None, None if step is None else step // length


def _schedule(said: Settings) -> tuple[str, str]:
    """Its name there, and ours."""
    if said.get("parallelism", "pipeline_parallel_schedule_csv"):
        said.fault(
            "pipeline_parallel_schedule_csv",
            "pipeline_parallel_schedule_csv names a file: read that with `penstock import schedule`",
        )
    name = said.get("parallelism", "pipeline_parallel_schedule") or "1F1B"
    found = {key.lower(): ours for key, ours in SCHEDULES.items()}.get(str(name).lower())
    if found is None:
        beyond = BEYOND.get(str(name).lower())
        why = f"{beyond}, which is not judged; judged are" if beyond else "is none of"
        said.fault("pipeline_parallel_schedule", f"pipeline_parallel_schedule {name!r} {why} {', '.join(SCHEDULES)}")
    said.faults.stop()
    return str(name), found or ""


class _Degrees(NamedTuple):
    """``processes``: devices that all degrees start, in groups of tensor and context parallelism; None: not said."""

    processes: int | None
    shards: bool
    shard_states: bool
    sharding: Sharding | None
    stated: Stated
    assumptions: list[str]


def _degrees(said: Settings, ranks: int, given: Reading) -> _Degrees:
    """Left out, the degree of sharding is -1: over all replicas that ``data_parallel_replicate_degree`` leaves.

    FSDP's groups are data_parallel_shard_degree × context_parallel_degree GPUs, so that it shards with either above 1.

    Raises UnsupportedRequest for parallelism within layers that devices do not represent.
    """
    replicate, shard = (said.number("parallelism", f"data_parallel_{kind}_degree") for kind in ("replicate", "shard"))
    groups, experts = _groups(said)
    stated = degrees_in(given.source, groups, experts, given.gpus, lambda name: f"line {said.line(name)}")
    assumptions = list(stated.remarks)
    sharding: Sharding | None = None
    shards = shard != 1 or stated.degrees.context > 1
    if shard == 1 and shards:
        assumptions.append(
            f"FSDP shards over the {stated.degrees.context} GPUs that share a sequence, though "
            "data_parallel_shard_degree is 1"
        )
    if shards:
        if ranks == 1:
            kept = said.get("parallelism", "fsdp_reshard_after_forward") == "never"
            sharding = "gradients" if kept else "parameters"
            assumptions += [_GATHERED_EACH] if kept else []
        else:
            assumptions.append(_gathered(said))
        if replicate not in (None, 1):
            assumptions.append(f"HSDP: states are shared out within each of {replicate} groups only; counted whole")
    processes = None if shard is None else ranks * (replicate or 1) * shard * stated.degrees.mesh
    in_all = replicate in (None, 1)
    return _Degrees(processes, shards, shards and in_all, sharding if in_all else None, stated, assumptions)


def _groups(said: Settings) -> tuple[dict[str, int], dict[str, int]]:
    """Degrees by their names there: of tensor and context parallelism, and of experts."""
    dense, experts = (
        {name: said.number("parallelism", name) or 1 for name in (f"{kind}_parallel_degree" for kind in kinds)}
        for kinds in (("tensor", "context"), ("expert", "expert_tensor"))
    )
    return dense, experts


def degrees_said(said: Settings) -> Degrees:
    """The degrees of the settings, for a profile that has costs at them."""
    dense, experts = _groups(said)
    said.faults.stop()
    return Degrees(*dense.values(), *experts.values())


def degrees_by_place(said: Settings) -> tuple[tuple[str, str], ...]:
    """How the settings have degrees above 1, by place."""
    dense, experts = _groups(said)
    return tuple(
        (f"{name} {value}", f"line {said.line(name)}") for name, value in {**dense, **experts}.items() if value > 1
    )


def _gathered(said: Settings) -> str:
    """FSDP under a pipeline: ``fsdp_reshard_after_forward`` does not keep gradients sharded between micro-batches."""
    policy = said.get("parallelism", "fsdp_reshard_after_forward") or "default"
    again = "; fsdp_reshard_after_forward always gathers parameters again for each pass, which is not timed"
    return (
        "FSDP under a pipeline keeps parameters gathered, and gradients whole until the last micro-batch: both are "
        f"counted whole, optimizer states shared out over the replicas{again if policy == 'always' else ''}"
    )


def _compared(said: Settings, given: Reading) -> tuple[str, ...]:
    """The length of a sample, and the sizes of the flavor that the configuration names, against the profile."""
    name = "seq_len" if said.get("training", LENGTH) is None else LENGTH
    length = said.number("training", name)
    unknown = []
    if length is not None:
        found = compared(given.profile, given.roles, {"length": length})
        for words in found.wrong.values():
            said.fault(name, f"training.{name} is {length}; {words}")
        unknown += [f"training.{name} {length}"] if found.unknown else []
    model = named(said, given.config)
    shape = FLAVORS.get(model.family or "", {}).get(without_kernels(model.flavor or ""))
    if shape is not None:
        sizes = sizes_of(shape)
        found = compared(given.profile, given.roles, sizes)
        for size, words in found.wrong.items():
            said.fault("flavor", f"model.flavor {model.flavor} of {model.family} has {size} {sizes[size]}; {words}")
        if given.roles is not None and given.roles.number != shape.layers:
            layers = f"{shape.layers} layers; the profile has {given.roles.number}"
            said.fault("flavor", f"model.flavor {model.flavor} of {model.family} has {layers}")
        unknown += [f"model.flavor {model.flavor}"] if found.unknown else []
    return unknown_sentence(unknown)


def _cut(said: Settings, schedule: str, given: Reading) -> tuple[int, tuple[tuple[int, int], ...]]:
    """The ranks, and the stages: as stated, by split points, or as torchtitan cuts."""
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


def _plain(profile: ModelProfile, roles: Roles | None) -> bool:
    """Whether embedding and head are one layer each, so that torchtitan's names say every cut."""
    return roles is not None and roles.first == 1 and roles.after == 1


def _names(plan: Expressed, first: int, last: int, release: str) -> list[str]:
    names: list[str] = []
    for layer in range(first, last + 1):
        names += _modules(plan.profile, plan.roles, layer, HEADS[release])
    return names


def _modules(profile: ModelProfile, roles: Roles | None, layer: int, head: str) -> Sequence[str]:
    if roles is None or not _plain(profile, roles):
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
