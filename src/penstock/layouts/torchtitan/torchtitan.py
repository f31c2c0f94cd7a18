"""torchtitan's pipeline settings: tables ``parallelism``, ``training`` and ``activation_checkpoint``, of two releases.

Up to 0.2 they are TOML and the head is called ``output``; from 0.3 on they are Python, and it is called ``lm_head``.

``module_fqns_per_model_part`` names the modules of each stage; without it torchtitan cuts evenly, with embedding and
head counted in. Stages are dealt to the pipeline ranks in turn, or in a V. Modules have the names of torchtitan's
transformers where the profile's names give embedding, transformer layers and head, else the profile's own layer names.

.. [1] torchtitan, ``distributed/pipeline_parallel.py``, ``config/job_config.py`` (0.2), ``config/configs.py`` (0.3).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from penstock.layouts.compared import compared, sizes_of, unknown_sentence
from penstock.layouts.drawn import Drawn, Expressed, Reading
from penstock.layouts.layout_text import Source, batch_of_replicas
from penstock.layouts.stated_degrees import Stated, degrees_in
from penstock.layouts.torchtitan import files as torchtitan_files
from penstock.layouts.torchtitan.model_parts import HEADS, cut, is_plain, names_of
from penstock.layouts.torchtitan.models import FLAVORS, named, shape_said, without_kernels
from penstock.layouts.torchtitan.settings import LENGTH, Settings, checkpoints_in_words, checkpoints_of, unmodelled
from penstock.schemas.errors import Fault, UnsupportedRequest
from penstock.schemas.transformers.degrees import ContextKind, Framework
from penstock.schemas.transformers.shape import TransformerShape
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
"""Every setting that may be written, and every setting that a layout replaces."""
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
"""Differences between a plan and FSDP without a pipeline."""
TOKENS = "num_tokens_per_microbatch_per_dp_rank"
"""The setting by which newer heads than 0.3 state micro-batches: in tokens."""


def release_of(stated: str | None) -> str:
    """Return the release that a layout is written for, by default the newest one.

    ``stated`` may have a patch number.

    Raises UnsupportedRequest for one that layouts are not written for.
    """
    newest, *_older = HEADS
    release = newest if stated is None else ".".join(stated.split(".")[:2])
    if release not in HEADS:
        raise UnsupportedRequest(
            f"layouts for torchtitan are written for releases {' and '.join(HEADS)}, not {stated}",
            faults=(Fault("/release", f"{stated} is not one of {', '.join(HEADS)}"),),
            remedy=f"--set release={newest}, or one of the others",
        )
    return release


def write(plan: Expressed, release: str | None = None) -> str:
    """Write the settings for the release: TOML, or from 0.3 on a Python module that changes a configuration."""
    release = release_of(release)
    whole = not plan.shard_states and plan.replicas > 1
    fsdp = plan.shard_states or (release == "0.2" and plan.ranks > 1 and whole)
    remarks = plan.remarks()
    if fsdp and not plan.shard_states:
        remarks.append(
            "torchtitan 0.2 has no whole replicas of a pipeline: written as FSDP, which also shares out the "
            "optimizer states that the plan counts whole"
        )
    if fsdp and plan.ranks == 1 and plan.replicas > 1 and plan.sharding != "parameters":
        remarks.append(_UNLIKE.get(plan.sharding, WHOLE_AT_ONE_RANK))
    if plan.degrees.context > 1 and not plan.shard_states:
        remarks.append(
            "torchtitan shares out parameters and optimizer states over GPUs that share a sequence; the plan counts "
            "them whole"
        )
    if plan.gradient == "parameter" and plan.profile.parameter_dtype != "fp32":
        remarks.append("gradients are counted in 16 bits: training.mixed_precision_reduce has to say so")
    if not is_plain(plan.profile, plan.roles):
        remarks.append(
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
            "module_fqns_per_model_part": [names_of(plan, first, last, release) for first, last in plan.stages],
        },
        "training": {
            # without a pipeline micro-batches are steps of gradient accumulation
            "local_batch_size": plan.rows * (plan.num_micro_batches if plan.ranks > 1 else 1),
            "global_batch_size": plan.global_batch_size,
        },
    }
    written_as = torchtitan_files.toml if release == "0.2" else torchtitan_files.python
    return written_as([*remarks, f"for torchtitan {release}"], tables, checkpoints_in_words(plan, release))


def _kept_in_words(plan: Expressed) -> dict[str, Any]:
    """Return FSDP's setting for gathering parameters again for each pass; its default does so without a pipeline."""
    if plan.sharding not in RESHARD or plan.replicas == 1:
        return {}
    return {"fsdp_reshard_after_forward": RESHARD[plan.sharding]}


def _degrees_in_words(plan: Expressed, release: str) -> dict[str, Any]:
    """Return degrees where each device is one GPU; sequences are always parallel under tensor parallelism in 0.2."""
    if plan.gpus > 1:
        return {}
    degrees = plan.degrees
    words: dict[str, Any] = {"tensor_parallel_degree": degrees.tensor, "context_parallel_degree": degrees.context}
    if release != "0.2" and degrees.tensor > 1:
        words["enable_sequence_parallel"] = True
    words["expert_parallel_degree"] = degrees.expert
    return words


def _refuse_experts(plan: Expressed, release: str, shard: int) -> None:
    """Raise UnsupportedRequest for experts on more GPUs than torchtitan has for them: the GPUs of FSDP, CP and TP."""
    among = shard * plan.degrees.mesh
    if among % plan.degrees.expert:
        raise UnsupportedRequest(
            f"torchtitan {release} cannot express this plan: expert {plan.degrees.expert} does not divide the {among} "
            f"GPUs of FSDP {shard} × context {plan.degrees.context} × tensor {plan.degrees.tensor}; it "
            "spreads experts over these GPUs only",
            faults=(Fault("/plan/degrees", f"expert {plan.degrees.expert}", "target"),),
            remedy="plan with the optimizer sharded (--sharding optimizer), which is written as FSDP",
        )


class TorchtitanText:
    """Settings of torchtitan, of any release and in any form."""

    framework: Framework | None = "torch"

    def __init__(self, source: Source) -> None:
        self.source = source
        self.settings = Settings(source.text, source.name, source.values, source.config)

    def ask(self, *, batch: bool, model: bool) -> None:
        """Return at once: settings leave nothing open that their readers do not report."""

    def degrees(self, *, experts: bool = False) -> Degrees:
        """Return the degrees of the settings."""
        dense, of_experts = _groups(self.settings)
        self.settings.faults.stop()
        return Degrees(*dense.values(), *of_experts.values())

    def named_degrees(self) -> tuple[tuple[str, str], ...]:
        """Return the settings of degrees above 1, each with its line."""
        dense, of_experts = _groups(self.settings)
        both = {**dense, **of_experts}.items()
        return tuple((f"{name} {value}", f"line {self.settings.line(name)}") for name, value in both if value > 1)

    def batch(self, gpus: int | None = None) -> int | None:
        """Return the batch; without one, a local batch on each replica."""
        stated, local = (self.settings.number("training", f"{size}_batch_size") for size in ("global", "local"))
        kinds = ("pipeline", "tensor", "context")
        degrees = [self.settings.number("parallelism", f"{kind}_parallel_degree") for kind in kinds]
        self.settings.faults.stop()
        return stated or batch_of_replicas(local, gpus, degrees)

    def shape(self) -> TransformerShape:
        """Return the shape of the model that the settings name."""
        return shape_said(self.settings, self.source.name)

    def context_kind(self) -> ContextKind | None:
        """Return torchtitan's one way of context parallelism, None without it."""
        return "all_gather" if self.degrees().context > 1 else None

    def drawn(self, reading: Reading) -> Drawn:
        """Return the layout. Raises InvalidDocument saying where."""
        return _drawn(self.settings, reading)


def _drawn(settings: Settings, reading: Reading) -> Drawn:
    _refuse_empty(settings, reading)
    name, schedule = _schedule(settings)
    ranks, stages = cut(settings, schedule, reading)
    if ranks == len(stages) == 1:  # without a pipeline no schedule is looked at
        schedule = "early-backward"
    if len(stages) % ranks:
        settings.fault(
            "pipeline_parallel_degree", f"{len(stages)} model parts cannot be dealt to {ranks} pipeline ranks"
        )
    elif (len(stages) == ranks) != (schedule in ONE_STAGE) or (schedule in IN_A_V and len(stages) != 2 * ranks):
        parts = f"{len(stages)} model parts on {ranks} ranks"
        settings.fault("pipeline_parallel_schedule", f"{name} with {parts}: torchtitan refuses it")
    rows, local, whole = _batch(settings, ranks, reading)
    checkpoints = checkpoints_of(settings)
    if local is not None and local % rows:
        detail = f"local_batch_size {local} is no multiple of pipeline_parallel_microbatch_size {rows}"
        settings.fault("local_batch_size", detail)
    degrees = _degrees(settings, ranks, reading)
    unknown = _compared(settings, reading)
    reduced = settings.get("training", "mixed_precision_reduce")
    settings.faults.stop()
    assumptions = [*degrees.assumptions, *unknown, *settings.remarks, *checkpoints.assumptions]
    if more := settings.get("model", "num_mtp_layers"):
        assumptions.append(f"num_mtp_layers {more}: judged without multi-token prediction, with which it would change")
    if converters := settings.get("model", "converters"):
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
        sequence_parallel=settings.get("parallelism", "enable_sequence_parallel") is not False,
        sharding=degrees.sharding,
        counted_whole=WHOLE_AT_ONE_RANK if ranks == 1 and degrees.shards else "",
        unmodelled=unmodelled(settings),
        gradient=None if reduced is None else "fp32" if reduced == "float32" else "parameter",
        assumptions=tuple(assumptions),
    )


def _refuse_empty(settings: Settings, reading: Reading) -> None:
    """Raise InvalidDocument for a text without settings of a job."""
    if settings.empty and reading.ranks is None:
        settings.fault("parallelism", "neither [parallelism] nor [training] nor [activation_checkpoint]")
        settings.faults.stop("the settings of a job, or its degree (--pipeline-parallel-size)")


def _batch(settings: Settings, ranks: int, reading: Reading) -> tuple[int, int | None, int | None]:
    """Return the samples of a micro-batch, of a replica between two flushes, and of a step.

    Heads after 0.3 count tokens.
    """
    local, whole = (settings.number("training", f"{size}_batch_size") for size in ("local", "global"))
    rows = settings.number("parallelism", "pipeline_parallel_microbatch_size") or reading.rows or 1
    if ranks == 1:  # without a pipeline nothing cuts the local batch
        rows = local or reading.rows or 1
    tokens = settings.number("training", TOKENS)
    if tokens is None:
        return rows, local, whole
    shape = reading.profile.shape
    length = settings.number("training", LENGTH) or (None if shape is None else shape.sequence_length)
    step = settings.number("training", "num_tokens_per_train_step")
    if length is None or tokens % length or (step or 0) % length:
        odd = tokens if length is None or tokens % length else step
        settings.fault(TOKENS, f"training has {odd} tokens, no multiple of samples of {length or 'unknown'} tokens")
        settings.faults.stop(f"training.{LENGTH} of which they are a multiple")
    assert length is not None
    rows = tokens // length
    number = settings.number("parallelism", "num_pp_microbatches") or 1
    return rows, rows * number if ranks > 1 else None, None if step is None else step // length


def _schedule(settings: Settings) -> tuple[str, str]:
    """Return the order by torchtitan's name, and by ours."""
    if settings.get("parallelism", "pipeline_parallel_schedule_csv"):
        settings.fault(
            "pipeline_parallel_schedule_csv",
            "pipeline_parallel_schedule_csv names a file: read that with `penstock import schedule`",
        )
    name = settings.get("parallelism", "pipeline_parallel_schedule") or "1F1B"
    order = {key.lower(): ours for key, ours in SCHEDULES.items()}.get(str(name).lower())
    if order is None:
        beyond = BEYOND.get(str(name).lower())
        why = f"{beyond}, which is not judged; judged are" if beyond else "is none of"
        settings.fault(
            "pipeline_parallel_schedule", f"pipeline_parallel_schedule {name!r} {why} {', '.join(SCHEDULES)}"
        )
    settings.faults.stop()
    return str(name), order or ""


class _Degrees(NamedTuple):
    """Degrees of data parallelism; ``processes`` counts devices that all degrees start, None where they are not stated.

    A device is a group of tensor and context parallelism.
    """

    processes: int | None
    shards: bool
    shard_states: bool
    sharding: Sharding | None
    stated: Stated
    assumptions: list[str]


def _degrees(settings: Settings, ranks: int, reading: Reading) -> _Degrees:
    """Read the degrees; the default for sharding is -1: all replicas that ``data_parallel_replicate_degree`` leaves.

    FSDP's groups are data_parallel_shard_degree × context_parallel_degree GPUs, so that it shards with either above 1.

    Raises UnsupportedRequest for parallelism within layers that devices do not represent.
    """
    replicate, shard = (
        settings.number("parallelism", f"data_parallel_{kind}_degree") for kind in ("replicate", "shard")
    )
    groups, experts = _groups(settings)
    stated = degrees_in(reading.source, groups, experts, reading.gpus, lambda name: f"line {settings.line(name)}")
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
            kept = settings.get("parallelism", "fsdp_reshard_after_forward") == "never"
            sharding = "gradients" if kept else "parameters"
            assumptions += [_GATHERED_EACH] if kept else []
        else:
            assumptions.append(_gathered(settings))
        if replicate not in (None, 1):
            assumptions.append(f"HSDP: states are shared out within each of {replicate} groups only; counted whole")
    processes = None if shard is None else ranks * (replicate or 1) * shard * stated.degrees.mesh
    in_all = replicate in (None, 1)
    return _Degrees(processes, shards, shards and in_all, sharding if in_all else None, stated, assumptions)


def _groups(settings: Settings) -> tuple[dict[str, int], dict[str, int]]:
    """Return degrees by torchtitan's names: of tensor and context parallelism, and of experts."""
    dense, experts = (
        {name: settings.number("parallelism", name) or 1 for name in (f"{kind}_parallel_degree" for kind in kinds)}
        for kinds in (("tensor", "context"), ("expert", "expert_tensor"))
    )
    return dense, experts


def _gathered(settings: Settings) -> str:
    """Return a sentence on FSDP under a pipeline.

    ``fsdp_reshard_after_forward`` does not keep gradients sharded between micro-batches.
    """
    policy = settings.get("parallelism", "fsdp_reshard_after_forward") or "default"
    again = "; fsdp_reshard_after_forward always gathers parameters again for each pass, which is not timed"
    return (
        "FSDP under a pipeline keeps parameters gathered, and gradients whole until the last micro-batch: both are "
        f"counted whole, optimizer states shared out over the replicas{again if policy == 'always' else ''}"
    )


def _compared(settings: Settings, reading: Reading) -> tuple[str, ...]:
    """Compare the length of a sample, and the sizes of the flavor that the configuration names, with the profile."""
    name = "seq_len" if settings.get("training", LENGTH) is None else LENGTH
    length = settings.number("training", name)
    unknown = []
    if length is not None:
        differences = compared(reading.profile, reading.roles, {"length": length})
        for words in differences.wrong.values():
            settings.fault(name, f"training.{name} is {length}; {words}")
        unknown += [f"training.{name} {length}"] if differences.unknown else []
    model = named(settings)
    shape = FLAVORS.get(model.family or "", {}).get(without_kernels(model.flavor or ""))
    if shape is not None:
        sizes = sizes_of(shape)
        differences = compared(reading.profile, reading.roles, sizes)
        for size, words in differences.wrong.items():
            settings.fault("flavor", f"model.flavor {model.flavor} of {model.family} has {size} {sizes[size]}; {words}")
        if reading.roles is not None and reading.roles.number != shape.layers:
            layers = f"{shape.layers} layers; the profile has {reading.roles.number}"
            settings.fault("flavor", f"model.flavor {model.flavor} of {model.family} has {layers}")
        unknown += [f"model.flavor {model.flavor}"] if differences.unknown else []
    return unknown_sentence(unknown)
