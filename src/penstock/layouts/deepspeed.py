"""DeepSpeed's ``PipelineModule``: parts written as a small Python module, and read back from one, or from JSON.

DeepSpeed partitions by a method (``uniform``, ``parameters``, ``type:regex``) and has no setting for parts, so that a
subclass has to state them. The reader takes ``PARTS`` (or ``parts``) or ``partition_method`` with ``num_stages``, from
assignments, from the call of ``PipelineModule`` or from a configuration, and DeepSpeed's own names of batch sizes.

.. [1] DeepSpeed, ``runtime/pipe/module.py``, ``runtime/utils.py`` (partition_uniform, partition_balanced).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import re2

from penstock.importers.lines import Faults
from penstock.layouts.drawn import NONE, Drawn, Expressed, Reading
from penstock.layouts.files.logs import printed_json
from penstock.layouts.layout_text import ModelUnsaid, Source, batch_of_replicas
from penstock.layouts.stated_degrees import degrees_in
from penstock.schemas.errors import Fault, InvalidDocument, UnsupportedRequest
from penstock.solvers.model.degrees import IN_ONE_STAGE, Sharding
from penstock.solvers.model.trainer_limits import Recomputing

KEYS = (
    "parts",
    "partition_method",
    "num_stages",
    "activation_checkpoint_interval",
    "config",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "num_mp",
    "sequence_parallel_size",
    "tensor_parallel",
    "zero_optimization",
)
OTHERS = ("parts", "partition_method", "config", "tensor_parallel", "zero_optimization")
"""The keys whose values are no numbers."""
_BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_DEGREES = ("num_stages", "num_mp", "sequence_parallel_size")
_CONFIGURED = (*KEYS[5:], "bf16", "fp16", "optimizer", "steps_per_print", "activation_checkpointing")
"""One of these at least is in a configuration of DeepSpeed's."""
_PRINTED = re.compile(r"  json = (?=\{)")
"""Words of a log before the configuration, as DeepSpeed prints it."""
_BARE = re.compile(r":\s*([A-Za-z_]\w*)\s*[,}\]\n]")
"""A name in the place of a value, as templates have them."""
_STAGES: tuple[Sharding, ...] = ("none", "optimizer", "gradients", "parameters")
"""The sharding of each stage of ZeRO."""
_NO_MODULE = "one stage, under DeepSpeed's own engine: no PipelineModule takes this stage of ZeRO"
_OWN_CHECKPOINTS = "the plan recomputes layers: the model has to checkpoint them itself"
_MODULE = '''
from deepspeed.pipe import PipelineModule


class PlannedPipelineModule(PipelineModule):
    """A PipelineModule whose stage s holds the layers PARTS[s] to PARTS[s + 1] - 1."""

    def __init__(self, layers, **options):
        options.setdefault("activation_checkpoint_interval", ACTIVATION_CHECKPOINT_INTERVAL)
        super().__init__(layers, num_stages=NUM_STAGES, **options)

    def _partition_layers(self, method="uniform"):
        if len(self._layer_specs) != PARTS[-1]:
            raise ValueError(f"the plan is for {PARTS[-1]} layers, the model has {len(self._layer_specs)}")
        self.parts = list(PARTS)
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])
'''


def write(plan: Expressed) -> str:
    """Return a Python module with the parts, the batch sizes, and a ``PipelineModule`` that takes them.

    For ZeRO 2 and 3, which no ``PipelineModule`` takes, it has the configuration alone. Raises UnsupportedRequest for
    parameters that are sharded and kept gathered until the step, which DeepSpeed has no word for.
    """
    if plan.sharding not in _STAGES:
        raise UnsupportedRequest(
            f"deepspeed cannot express this plan: unlike sharding {plan.sharding}, ZeRO 3 gathers parameters again for "
            "each pass",
            faults=(Fault("/plan/sharding", plan.sharding, "target"),),
            remedy="plan with --sharding optimizer (ZeRO 1), or with --sharding parameters in one stage (ZeRO 3)",
        )
    parts = [first for first, _last in plan.stages] + [plan.stages[-1][1] + 1]
    config = {
        "train_batch_size": plan.global_batch_size,
        "train_micro_batch_size_per_gpu": plan.rows,
        "gradient_accumulation_steps": plan.num_micro_batches,
        **({"zero_optimization": {"stage": stage}} if (stage := _STAGES.index(plan.sharding)) else {}),
    }
    title, *more = [line.replace("\\", "/").replace('"', "'") for line in plan.remarks()]
    text = "\n".join([f'"""{title}', *([""] if more else []), *more, '"""'])
    values = {
        "NUM_STAGES": plan.ranks,
        "PARTS": parts,
        "ACTIVATION_CHECKPOINT_INTERVAL": plan.recompute.layers,
        "CONFIG": config,
    }
    if plan.sharding in IN_ONE_STAGE:
        values = {"NUM_STAGES": 1, "CONFIG": config}
        more += [_NO_MODULE, *([_OWN_CHECKPOINTS] if plan.recompute.method != "none" else [])]
        text = "\n".join([f'"""{title}', "", *more, '"""'])
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items()]
    if plan.sharding in IN_ONE_STAGE:
        return "\n".join([text, "", *lines, ""])
    return "\n".join([text, "", *lines, _MODULE])


class DeepSpeedText(ModelUnsaid):
    """The text of such a module, or JSON."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._values = _values(source)
        self._values |= self._values.pop("config", None) or {}

    def batch(self, gpus: int | None = None) -> int | None:
        """Return the batch; without one, the accumulated samples of each replica."""
        faults = Faults(self.source.name)
        numbers = {name: _number(self._values, name, faults) for name in (*_BATCHES, *_DEGREES)}
        whole, rows, steps, *degrees = (*numbers.values(), _autotp(self._values, faults))
        faults.stop()
        return whole or batch_of_replicas(rows and rows * (steps or 1), gpus, degrees)

    def drawn(self, reading: Reading) -> Drawn:
        """Return the layout. Raises InvalidDocument saying where."""
        return _drawn(self._values, reading)


def _autotp(values: dict[str, Any], faults: Faults) -> int | None:
    tensor = values.get("tensor_parallel")
    return _number(tensor, "autotp_size", faults, least=0) if isinstance(tensor, dict) else None


def _drawn(values: dict[str, Any], reading: Reading) -> Drawn:
    faults = Faults(reading.source)
    numbers = {name: _number(values, name, faults) for name in KEYS if name not in OTHERS}
    autotp = _autotp(values, faults)
    faults.stop()
    groups = {"num_mp": numbers["num_mp"] or 1, "sequence_parallel_size": numbers["sequence_parallel_size"] or 1}
    if autotp:
        groups = {"tensor_parallel.autotp_size": autotp, "sequence_parallel_size": groups["sequence_parallel_size"]}
    stated = degrees_in(reading.source, groups, {}, reading.gpus, lambda name: f"/{name.replace('.', '/')}")
    ranks = numbers["num_stages"] or reading.ranks or (None if "parts" in values else 1)
    remarks: tuple[str, ...] = ()
    if "parts" in values:
        parts = _checked(values["parts"], len(reading.profile.layers), faults)
    elif ranks == 1:
        parts = [0, len(reading.profile.layers)]
    else:
        parts, remarks = _partitioned(str(values.get("partition_method", "parameters")), ranks, reading, faults)
    if ranks is not None and ranks != len(parts) - 1:
        faults.add(None, f"num_stages is {ranks}, but {len(parts) - 1} parts are given")
    whole, steps = numbers["train_batch_size"], numbers["gradient_accumulation_steps"]
    rows = numbers["train_micro_batch_size_per_gpu"] or reading.rows
    if whole and steps and rows and whole % (steps * rows):
        faults.add(None, f"train_batch_size {whole} is no multiple of {rows} samples × {steps} accumulation steps")
    faults.stop()
    stage, host = _zero(values.get("zero_optimization"), len(parts) - 1, faults)
    if host:
        remarks = (*remarks, f"{host[0]}: what is kept on the host is counted on the device, and not moved")
    interval = numbers["activation_checkpoint_interval"]
    return Drawn(
        tuple((first, after - 1) for first, after in pairwise(parts)),
        len(parts) - 1,
        "early-backward",
        rows=rows,
        global_batch_size=whole,
        shard_states=stage > 0,
        local_rows=rows * steps if rows and steps else None,
        recompute=Recomputing("uniform", interval) if interval else NONE,
        degrees=stated.degrees,
        named=stated.named,
        sharding=_STAGES[stage] if stage > 1 else None,
        counted_whole=_counted_whole(stage),
        unmodelled=host,
        assumptions=(*stated.remarks, *remarks),
    )


def _zero(table: Any, stages: int, faults: Faults) -> tuple[int, tuple[str, ...]]:
    """Return the stage of ZeRO, and the settings that keep states on the host."""
    zero = table if isinstance(table, dict) else {}
    stage = zero.get("stage", 0)
    stage = 0 if stage == "auto" else stage
    allowed = (0, 1) if stages > 1 else (0, 1, 2, 3)
    if isinstance(stage, bool) or stage not in allowed:
        pipeline = "; PipelineModule takes 0 or 1" if stages > 1 else f", none of {', '.join(map(str, allowed))}"
        faults.add(None, f"zero_optimization.stage is {stage!r}{pipeline}")
        faults.stop()
    host = [name for name in ("offload_optimizer", "offload_param") if _offloads(zero.get(name))]
    host += ["cpu_offload"] if zero.get("cpu_offload") is True else []
    return int(stage), tuple(f"zero_optimization.{name}" for name in host)


def _counted_whole(stage: int) -> str:
    """Return a sentence on a stage of ZeRO that is not judged as it is."""
    if stage < 2:
        return ""
    what = "gradients" if stage == 2 else "gradients and parameters"
    gathered = "" if stage == 2 else ", and the gathering of parameters is not timed"
    return (
        f"ZeRO {stage}: optimizer states are shared out over the replicas; {what} are in truth too, and counted "
        f"whole{gathered}"
    )


def _offloads(table: Any) -> bool:
    return isinstance(table, dict) and table.get("device", "none") not in (None, "none")


def _values(source: Source) -> dict[str, Any]:
    """Read the values of the known names; nothing of the text is run."""
    text = printed_json(source.text, _PRINTED)
    for name, value in source.values.items():  # templates have names in the place of values
        text = re.sub(rf"(?<![\w$]){re.escape(name)}\b", _replacement(value), text)
    try:
        data = json.loads(text) if text.lstrip().startswith("{") else _of_python(text, source)
    except json.JSONDecodeError as error:
        if names := list(dict.fromkeys(name for name in _BARE.findall(text) if name not in ("true", "false", "null"))):
            raise InvalidDocument(
                f"{source.name} has names in the place of values: {', '.join(names)}",
                remedy=f"give the values: {' '.join(f'--given {name}=…' for name in names)}",
            ) from None
        raise InvalidDocument(f"{source.name} is not valid JSON: {error}") from None
    except SyntaxError as error:
        raise InvalidDocument(
            f"{source.name} is not valid Python, line {error.lineno}, column {error.offset}: {error.msg}",
            remedy='PARTS = [0, 13, 26] as Python, or {"parts": [0, 13, 26]} as JSON',
        ) from None
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise InvalidDocument(f"{source.name} cannot be read: {error}") from None
    pipeline = data.get("pipeline")
    if isinstance(pipeline, dict):  # of DeepSpeed's own configuration
        data = {"num_stages": pipeline.get("stages"), "partition_method": pipeline.get("partition"), **data, **pipeline}
    if "config" in data and not isinstance(data["config"], dict):
        raise InvalidDocument(f"{source.name}: config is not a table of DeepSpeed's settings")
    stated = {name: value for name, value in data.items() if name in KEYS and value not in (None, "auto", "best")}
    configured = text.lstrip().startswith("{") and any(name in data for name in _CONFIGURED)
    if source.ranks is None and not configured and not any(name in stated for name in ("parts", "num_stages")):
        raise InvalidDocument(
            f"{source.name} says neither parts nor num_stages",
            remedy='{"parts": [0, 13, 26], "train_micro_batch_size_per_gpu": 2, "train_batch_size": 64}, or the '
            "number of stages (--pipeline-parallel-size)",
        )
    return stated


def _replacement(value: str) -> Callable[[re.Match[str]], str]:
    """Return a replacement function for a name; a value of letters may have backslashes."""
    return lambda _match: value


def _of_python(text: str, source: Source) -> dict[str, Any]:
    """Read assignments and the arguments of ``PipelineModule`` and its topology, in the order of the text."""
    values: dict[str, Any] = {}
    for node in ast.walk(ast.parse(text)):
        items: list[tuple[str, ast.expr]] = []
        if isinstance(node, ast.Assign):
            items = [(target.id.lower(), node.value) for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.Call):
            items = [("num_stages" if each.arg == "num_pp" else each.arg or "", each.value) for each in node.keywords]
        for name, value in items:
            literal = _literal(name, value, source, isinstance(node, ast.Call)) if name in KEYS else None
            if literal is not None:
                values[name] = literal
    return values


def _literal(name: str, node: ast.expr, source: Source, argument: bool) -> Any:
    if name in source.values or (name == "num_stages" and source.ranks is not None):
        value = source.values.get(name, str(source.ranks))
        return int(value) if value.isdecimal() else value
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        if name == "config" or (argument and isinstance(node, ast.Name)):
            return None  # read from a file, or a name that is assigned elsewhere
    raise InvalidDocument(
        f"{source.name}, line {node.lineno}, column {node.col_offset + 1}: {name} is {ast.unparse(node)[:60]}, "
        "which is not a plain list, number or text",
        remedy=f"give the value: --given {name}=…, or write it in the file",
    )


def _number(values: dict[str, Any], name: str, faults: Faults, least: int = 1) -> int | None:
    value = values.get(name)
    least = 0 if name == "activation_checkpoint_interval" else least
    if value is None or value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 10**9:
        faults.add(None, f"{name} is {value!r}, not a whole number of at least {least}")
        return None
    return value


def _checked(parts: Any, layers: int, faults: Faults) -> list[int]:
    whole = isinstance(parts, list | tuple) and len(parts) > 1
    if not whole or not all(isinstance(part, int) and not isinstance(part, bool) for part in parts):
        faults.add(None, f"parts is {str(parts)[:60]}, no list of layer numbers")
    elif parts[0] != 0 or parts[-1] != layers:
        faults.add(None, f"parts go from {parts[0]} to {parts[-1]}; the profile's {layers} layers from 0 to {layers}")
    elif bad := next((s for s, (a, b) in enumerate(pairwise(parts)) if a >= b), None):
        faults.add(None, f"stage {bad} would hold layers {parts[bad]} to {parts[bad + 1] - 1}; each holds one at least")
    elif parts[0] >= parts[1]:
        faults.add(None, "stage 0 would hold no layer; each holds one at least")
    faults.stop(f"[0, …, {layers}], where each stage begins, and their end")
    return list(parts)


def _partitioned(
    method: str, stages: int | None, reading: Reading, faults: Faults
) -> tuple[list[int], tuple[str, ...]]:
    """Apply DeepSpeed's own partition methods to the profile's layers."""
    layers = reading.profile.layers
    count = len(layers)
    if stages is None or stages > count:
        faults.add(None, f"num_stages is {stages}; {count} layers can be 1 to {count} stages")
        faults.stop()
    assert stages is not None
    method = method.lower()
    if method == "uniform":
        each, more = divmod(count, stages)
        return [s * each + min(s, more) for s in range(stages)] + [count], ()
    if method == "parameters":
        weights = [layer.parameter_bytes if layer.trainable else 0 for layer in layers]
    elif method.startswith("type:"):
        try:
            # DeepSpeed takes Python's expressions; these of others' files are matched in linear time.
            options = re2.Options()
            options.case_sensitive, options.log_errors = False, False
            wanted = re2.compile(method.removeprefix("type:"), options=options)
        except re2.error as error:
            faults.add(None, f"partition_method {method!r}: {error}")
            faults.stop()
        weights = [1 if wanted.search(f"{layer.kind}") else 0 for layer in layers]
        if not any(weights):
            faults.add(None, f"partition_method {method!r} finds no layer; kinds are like {layers[count // 2].kind!r}")
    else:
        faults.add(None, f"partition_method {method!r} is none of uniform, parameters, type:regex")
    faults.stop()
    return _balanced(weights, stages), (
        f"parts by {method} as DeepSpeed balances them: the least difference of largest and smallest part",
    )


def _balanced(weights: list[int], stages: int) -> list[int]:
    """Return the parts that ``partition_balanced`` makes.

    Each prefix has the least difference of largest and smallest part. Of several such last parts the shortest one is
    taken. O(stages L^2).
    """
    count = len(weights)
    before = np.concatenate(([0.0], np.cumsum(weights, dtype=np.float64)))
    part = np.where(np.tri(count + 1, k=-1, dtype=bool), before[:, None] - before[None, :], np.inf)  # [end, begin]
    largest = np.full(count + 1, np.inf)
    smallest = np.full(count + 1, np.inf)
    largest[0] = 0
    begins = []
    for _stage in range(stages):
        most, least = np.maximum(largest[None, :], part), np.minimum(smallest[None, :], part)
        reachable = np.isfinite(most)
        spread = np.where(reachable, most, np.inf) - np.where(reachable, least, 0)
        begin = count - np.argmin(spread[:, ::-1], axis=1)
        ends = np.arange(count + 1)
        largest, smallest = most[ends, begin], least[ends, begin]
        begins.append(begin)
    bounds = [count]
    for begin in reversed(begins):
        bounds.append(int(begin[bounds[-1]]))
    return bounds[::-1]
