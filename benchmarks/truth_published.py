"""Published runs in 16 bits against the result of a user: `penstock.even_layout` of the layout, nothing calibrated.

The rows are in ``truth/published-2026.csv``, where they name their degrees, and in Megatron-Bridge's tables. Left out:
8-bit rows, layouts that plans cannot express (recomputation by operator, states shared in groups, transfers of experts
that are overlapped or go by DeepEP), kinds of GPU that the table of devices lacks. What a source does not state has the
default here. Shapes that are not shipped: MPT of llm-foundry's ``mcli/*.yaml``, Nemotron-4 of arXiv:2402.16819
and 2406.11704, InternLM-7B of its config.json; a row that prints its parameters has to agree with its shape.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

import truth_bridge
from truth_layouts import mark

import penstock
from penstock.examples.catalogue import SHAPES, cluster, shape
from penstock.facts.device_table import LEVELS, MEASURED, MOST_EXPERT_GPUS, Level, usual_level
from penstock.importers.cluster import hardware
from penstock.schemas.errors import PenstockError
from penstock.schemas.request import PlanRequest
from penstock.schemas.transformers.degrees import Framework, Module, Sharding
from penstock.schemas.transformers.shape import TransformerShape
from penstock.shapes.parameters import total
from penstock.shapes.profiled_degrees import DegreeOptions
from penstock.shapes.profiles import profile_of

_KINDS = {"h100_80gb": "H100", "a100_80gb": "A100", "A100-80GB": "A100", "a100_40gb": "A100",
          "H100-96GB 500W": "H100"}  # fmt: skip
_SMALLER = {"a100_40gb": 40 * 10**9}
"""The size in the name of boards with another memory than the usual one."""
_SIXTEEN = ("bf16", "amp_bf16")
_NOT_EXPRESSED = ("DeepEP", "EP overlap on", "async TP", "compile")
Recompute = Literal["none", "full"] | tuple[Module, ...]
_SHARDINGS: dict[str, Sharding] = {"optimizer": "optimizer", "gradients": "gradients", "parameters": "parameters"}
_RECOMPUTE: dict[str, Recompute] = {
    "none": "none",
    "full": "full",
    "not stated": "none",
    "": "none",
    "selective": ("operators",),
    "per op selective": ("operators",),
}
_DOMAIN = 64
"""The GPUs of an NVLink domain of 72 that published runs use."""
_EAGER = ("mosaicml/llm-foundry", "pytorch/torchtitan")
"""The sources whose modules are PyTorch's."""
_INSIDE = 0.8
"""The least share of rows that lies inside the stated error."""
_MPT = {"mpt-125m": (12, 768, 12), "mpt-350m": (24, 1024, 16), "mpt-1b": (24, 2048, 16), "mpt-7b": (32, 4096, 32),
        "mpt-70b": (80, 8192, 64)}  # fmt: skip
"""The layers, width and heads of MPT models."""


class Published(NamedTuple):
    """A run: model, training and cluster, and the seconds of a step."""

    source: str
    shape: TransformerShape
    framework: Framework
    kind: str
    memory_bytes: int | None
    gpus: int
    batch: int
    size: int
    tensor: int
    context: int
    expert: int
    pipeline: int
    virtual: int
    sharding: Sharding
    recompute: Recompute
    seconds: float

    @property
    def family(self) -> str:
        """The name of the rows that have a level together."""
        return f"{self.kind}, {self.framework}"

    @property
    def stack(self) -> str:
        """The name of the rows that have a stated error together: a family, with many experts or without."""
        return self.family + (", many experts" if self.expert > MOST_EXPERT_GPUS else "")


class Predicted(NamedTuple):
    """A prediction of a run at a level, as a user gets it."""

    run: Published
    level: Level
    seconds: float
    missing_bytes: int
    expected_error: float

    @property
    def error(self) -> float:
        """The error of the time, as a share of the measured time."""
        return self.seconds / self.run.seconds - 1

    @property
    def is_usual(self) -> bool:
        """True if users get this level where they name none."""
        return self.level == usual_level(self.run.kind, self.run.framework)


def _node_size(kind: str, gpus: int) -> int:
    return min(gpus, _DOMAIN if kind.startswith("GB") else 8)


def published_rows(folder: Path) -> Iterator[Published]:
    """Return all rows that plans can express."""
    with (folder / "published-2026.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if (run := _row(row)) is not None:
                yield run
    for (_, precision), rows in truth_bridge.measured_rows(folder / "megatron-bridge.csv").items():
        if precision == "BF16":
            yield from (_of_bridge(row) for row in rows.values() if not row.fully_sharded)


def _of_bridge(row: truth_bridge.Measured) -> Published:
    run = row.run
    return Published(
        "Megatron-Bridge", run.shape, "megatron", run.kind, None, run.gpus, run.batch, run.micro_batch_size, run.tensor,
        run.context, run.expert, run.pipeline, run.virtual_stages, "optimizer", "none", row.seconds,
    )  # fmt: skip


def _row(row: dict[str, str]) -> Published | None:
    if row["precision"].lower() not in _SIXTEEN or any(words in row["note"] for words in _NOT_EXPRESSED):
        return None
    sharding = _SHARDINGS.get(row["sharding"].split(" (")[0].removesuffix(" over all DP ranks"))
    model = _shape(row["model"], int(row["seq"] or 0), row["note"])
    source = row["source"].split("github:")[-1].split("@")[0].split("/pull")[0]
    # Megatron's selective recomputation is of attention's core, which no kernel here keeps.
    recompute = "none" if source.startswith("awslabs") and row["recompute"] == "selective" else row["recompute"]
    if sharding is None or model is None or recompute not in _RECOMPUTE or not row["tp"] or not row["gbs"]:
        return None
    gpus, seq, batch, measured = int(row["gpus"]), int(row["seq"]), int(row["gbs"]), float(row["measured"])
    seconds = measured if row["unit"] == "s/step" else batch * seq / gpus / measured
    kind, memory = _KINDS.get(row["gpu_kind"], row["gpu_kind"]), None
    if row["gpu_kind"] in _SMALLER:
        memory = hardware.usual(kind).size_near(_SMALLER[row["gpu_kind"]])
        assert memory is not None
    framework: Framework = "torch" if source in _EAGER else "megatron"
    tensor, context, expert, pipeline, virtual = (int(row[name] or 1) for name in ("tp", "cp", "ep", "pp", "vpp"))
    return Published(
        source, model, framework, kind, memory and memory.value, gpus, batch, int(row["mbs"]), tensor, context, expert,
        pipeline, virtual, sharding, _RECOMPUTE[recompute], seconds,
    )  # fmt: skip


def _shape(name: str, length: int, note: str) -> TransformerShape | None:
    """Return the shape of a model, which has to have as many parameters as the note says."""
    model = _shape_of(name, length)
    if model is None:
        return None
    if (printed := re.search(r"(\d+) parameters", note)) and int(printed[1]) != total(model):
        raise ValueError(f"{name} has {printed[1]} parameters, and its shape here {total(model)}")
    return model


def _shape_of(name: str, length: int) -> TransformerShape | None:
    if name in _MPT:
        layers, hidden, heads = _MPT[name]
        return TransformerShape(
            name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=heads, head_width=hidden // heads,
            ffn=4 * hidden, gated=False, vocabulary=50_368, sequence_length=length, norm="layer",
            attention_biases="all", ffn_biases=True, positions=length, tied=True,
        )  # fmt: skip
    if name == "internlm-7b":
        return TransformerShape(
            name=name, layers=32, hidden=4096, heads=32, kv_heads=32, head_width=128, ffn=11_008, gated=True,
            vocabulary=103_168, sequence_length=length, attention_biases="all",
        )  # fmt: skip
    if name.startswith("nemotron4"):
        layers, hidden, heads = (96, 18_432, 96) if name.endswith("340b") else (32, 6144, 48)
        return TransformerShape(
            name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=8, head_width=hidden // heads,
            ffn=4 * hidden, gated=False, vocabulary=256_000, sequence_length=length, norm="layer",
        )  # fmt: skip
    shipped = {"llama-3.1-8b": "llama-3-8b", "llama-3.1-70b": "llama-3-70b"}.get(name, name)
    if shipped not in SHAPES:
        return None
    return shape(shipped).model_copy(update={"sequence_length": length})


def predicted(run: Published, level: Level) -> Predicted:
    """Judge a run's layout as `penstock.even_layout` does for a user."""
    degrees = DegreeOptions((run.tensor,), (run.context,), (run.expert,))
    sizes = (run.size,)
    profile = profile_of(run.shape, run.framework, (run.kind,), micro_batch_sizes=sizes, degrees=degrees, level=level)
    size = _node_size(run.kind, run.gpus)
    topology = cluster(f"{run.gpus // size}x{size}x{run.kind}")
    if run.memory_bytes is not None and topology.uniform is not None:
        smaller = topology.uniform.model_copy(update={"memory_bytes": run.memory_bytes})
        topology = topology.model_copy(update={"uniform": smaller})
    answer = penstock.even_layout(
        PlanRequest(
            profile=profile,
            topology=topology,
            global_batch_size=run.batch,
            target="torchtitan" if run.recompute == ("operators",) else None,
        ),
        tensor=run.tensor,
        context=run.context,
        expert=run.expert,
        pipeline=run.pipeline,
        virtual_stages=run.virtual,
        micro_batch_size=run.size,
        sharding=run.sharding,
        recompute=run.recompute,
    )
    prediction = answer.file.plan.prediction
    assert prediction is not None
    seconds = prediction.time_per_global_batch_ns / 1e9
    return Predicted(run, level, seconds, answer.missing_bytes, prediction.expected_error)


def report(folder: Path) -> int:
    """Print the predictions for users, by source and by kind, at each level; return how many targets are missed."""
    judged: list[Predicted] = []
    left_out: list[str] = []
    for run in published_rows(folder):
        for level in LEVELS if run.kind in MEASURED else LEVELS[:1]:
            try:
                judged.append(predicted(run, level))
            except PenstockError as error:
                left_out.append(f"  not predicted: {run.source}, {run.shape.name} on {run.gpus}: {error}")
    print(f"{'16-bit rows, nothing calibrated; * as users get it':58} level    rows median  size  worst inside lack")
    for (group, level), rows in _grouped(judged, lambda row: f"  {row.run.source}, {row.run.stack}"):
        print(f"{group:58} {_line(level, rows)}")
    missed = 0
    by_stack = _grouped(judged, lambda row: row.run.stack)
    by_family = _grouped(judged, lambda row: row.run.family)
    sizes = {(family, level): median(abs(row.error) for row in rows) for (family, level), rows in by_family}
    for (stack, level), rows in by_stack:
        is_usual, family = rows[0].is_usual, rows[0].run.family
        least = min(size for (other, _), size in sizes.items() if other == family)
        wrong = is_usual and (sizes[family, level] > least or _inside(rows) < _INSIDE * len(rows))
        missed += wrong
        print(f"{stack:58} {_line(level, rows)} {mark(wrong) if is_usual else ''}".rstrip())
    print(*dict.fromkeys(left_out), sep="\n")
    eager = [row for row in judged if row.is_usual and row.missing_bytes]
    fused = [predicted(row.run._replace(framework="megatron"), "runs") for row in eager]
    print(f"  of {sum(row.is_usual for row in judged)} runs {len(eager)} lack memory as eager modules, "
          f"{sum(row.missing_bytes > 0 for row in fused)} with fused norms and cross-entropy")  # fmt: skip
    return missed


def _grouped(
    rows: Sequence[Predicted], group: Callable[[Predicted], str]
) -> list[tuple[tuple[str, Level], list[Predicted]]]:
    groups: dict[tuple[str, Level], list[Predicted]] = defaultdict(list)
    for row in rows:
        groups[group(row), row.level].append(row)
    return sorted(groups.items())


def _inside(rows: Sequence[Predicted]) -> int:
    return sum(abs(row.error) <= row.expected_error for row in rows)


def _line(level: Level, rows: Sequence[Predicted]) -> str:
    errors = [row.error for row in rows]
    return (
        f"{level + ('*' if rows[0].is_usual else ''):8} {len(rows):4} {median(errors):+7.1%} "
        f"{median(map(abs, errors)):5.1%} {max(errors, key=abs):+7.1%} {_inside(rows):6} "
        f"{sum(row.missing_bytes > 0 for row in rows):4}"
    )
