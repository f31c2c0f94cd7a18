"""Readers of published measurements: each turns the rows of a file into steps, or says why it leaves one out.

``published-2026.csv`` names the source of each row; ``megatron-bridge.csv`` is NVIDIA-NeMo/Megatron-Bridge's tables
(Apache-2.0), ``mlperf-training.csv`` MLCommons' results, ``simumax-b200.csv`` MooreThreads/SimuMax's (Apache-2.0), with
shapes in ``models/``, ``vtrain-*.csv`` VIA-Research/vTrain's (MIT). Shapes that are not shipped: MPT of llm-foundry's
``mcli/*.yaml``, Nemotron-4 of arXiv:2402.16819 and 2406.11704, InternLM-7B of its config.json. A row that prints its
parameters has to agree with its shape.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from penstock.examples.catalogue import SHAPES, shape
from penstock.importers.cluster import hardware
from penstock.schemas.transformers.degrees import Framework
from penstock.schemas.transformers.shape import Experts, LatentAttention, TransformerShape
from penstock.shapes.parameters import total
from truth.rows import SIXTEEN, PublishedLayout, PublishedStep, PublishedSteps, SkippedStep

KINDS = {"h100_80gb": "H100", "a100_80gb": "A100", "A100-80GB": "A100", "a100_40gb": "A100", "H100-96GB 500W": "H100"}
"""Kinds of the table of devices by the names that sources use."""
SMALLER = {"a100_40gb": 40 * 10**9}
"""The size in the name of boards with another memory than the usual one."""
NOT_HERE = {
    "TPU": "TPUs",
    "MI3": "AMD's GPUs",
    "fake backend": "torchtitan#4153 (one rank runs)",
    "B200 (by its": "a row without a precision",
}
"""Kinds of GPU that are left out, by a part of their names."""
NOT_MODELLED = {
    "DeepEP": "DeepEP",
    "EP overlap on": "overlapped all-to-all",
    "async TP": "asynchronous tensor parallelism",
    "compile": "torch.compile",
}
"""Features of runs that plans cannot have, by words of a row's note."""
EAGER = ("mosaicml/llm-foundry", "pytorch/torchtitan")
"""The sources whose modules are PyTorch's."""
EIGHT = {"FP8": "FP8", "MXFP8": "MXFP8", "NVFP4": "NVFP4", "amp_fp8": "FP8"}
RECOMPUTE = {"none": "none", "full": "full", "not stated": "none", "": "none"}
OPERATORS = ("selective", "per op selective")
"""Selective checkpointing of torchtitan, by operators."""
MPT = {"mpt-125m": (12, 768, 12), "mpt-350m": (24, 1024, 16), "mpt-1b": (24, 2048, 16), "mpt-7b": (32, 4096, 32),
       "mpt-70b": (80, 8192, 64)}  # fmt: skip
"""The layers, width and heads of MPT models."""
BRIDGE = {
    "LLAMA3_70B": "llama-3-70b",
    "LLAMA3.1_405B": "llama-3.1-405b",
    "Qwen3_30B_a3B": "qwen3-30b-a3b",
    "Qwen3_235B_a22B": "qwen3-235b-a22b",
    "GPT OSS 120B": "gpt-oss-120b",
}
NOT_SAID = ("", "0", "n/a")
PADDED = {"llama3_405b": "llama3-405b_padding_128"}
"""Files of ``models`` of SimuMax's cases whose names differ."""


def rows_of(folder: Path) -> PublishedSteps:
    """Return all rows of a folder of this form; files that it lacks are named among the rows left out."""
    rows, left_out = [], []
    for name, read in READERS.items():
        path = folder / "truth" / name
        if not path.exists():
            left_out.append(SkippedStep(name, "no such file"))
            continue
        with path.open(encoding="utf-8") as file:
            for values in read(path, csv.DictReader(file)):
                if isinstance(values, PublishedStep):
                    rows.append(values)
                else:
                    left_out.append(values)
            if name == "megatron-bridge.csv":
                rows += NOTES
    return PublishedSteps(rows, left_out)


def _notes() -> Iterator[PublishedStep]:
    """Yield the layouts of Megatron-Bridge's performance notes, which compare them by model TFLOP/s of a GPU.

    llama-3-70b is fine-tuned in FP8 on 32 H100 with 4,096 tokens and 32 samples a step. ``seconds`` are relative.
    """
    model = shape("llama-3-70b").model_copy(update={"sequence_length": 4096})
    base = PublishedLayout(tensor=4, pipeline=4, chunks=5)
    recomputed = base._replace(recompute="mlp")
    layouts = ((base, 704.0), (base._replace(pipeline=8), 668.0), (base._replace(tensor=8), 508.7), (recomputed, 593.6))
    for layout, tera in layouts:
        yield PublishedStep(
            "Megatron-Bridge, notes", model, "megatron", "H100", 32, 32, layout, 1 / tera, "FP8", is_timed=False
        )


NOTES = list(_notes())


def _published(_path: Path, lines: Iterator[dict[str, str]]) -> Iterator[PublishedStep | SkippedStep]:
    for line in lines:
        source = line["source"].split("github:")[-1].split("@")[0].split("/pull")[0].split(":")[0]
        row = _published_row(source, line)
        yield row if isinstance(row, PublishedStep) else SkippedStep(source, row)


def _published_row(source: str, line: dict[str, str]) -> PublishedStep | str:
    """Return the row of a line, or the reason for which it is left out."""
    if reason := next(
        (why for words, why in (NOT_HERE | NOT_MODELLED).items() if words in line["gpu_kind"] + line["note"]), None
    ):
        return reason
    if not line["seq"]:
        return "a row without a sequence length"
    if not line["tp"] or not line["gbs"]:
        return "a row without degrees or a batch"
    precision = SIXTEEN if "bf16" in line["precision"].lower() else EIGHT.get(line["precision"].split(" ")[0])
    if precision is None:
        return "a row without a precision"
    sharding = line["sharding"].split(" (")[0].removesuffix(" over all DP ranks")
    if sharding not in ("optimizer", "gradients", "parameters", "none"):
        return f"sharding: {sharding or 'not stated'}"
    model = _shape(line["model"], int(line["seq"]), line["note"])
    if model is None:
        return f"no shape of {line['model']}"
    is_eager = source in EAGER
    recompute, target = RECOMPUTE.get(line["recompute"]), None
    # Megatron's selective recomputation is of attention's core, which no kernel here keeps.
    if line["recompute"] in OPERATORS:
        recompute, target = ("operators", "torchtitan") if is_eager else ("none", None)
    if recompute is None:
        return f"recomputation: {line['recompute']}"
    gpus, batch, measured = int(line["gpus"]), int(line["gbs"]), float(line["measured"])
    kind, memory = KINDS.get(line["gpu_kind"], line["gpu_kind"]), None
    if line["gpu_kind"] in SMALLER:
        memory = hardware.usual(kind).size_near(SMALLER[line["gpu_kind"]])
        assert memory is not None
    framework: Framework = "torch" if is_eager else "megatron"
    degrees = (int(line[name] or 1) for name in ("tp", "cp", "ep", "pp", "vpp", "mbs"))
    return PublishedStep(
        source, model, framework, kind, gpus, batch, PublishedLayout(*degrees, sharding, recompute),
        measured if line["unit"] == "s/step" else batch * model.sequence_length / gpus / measured,
        precision, memory and memory.value, target=target,
    )  # fmt: skip


def _shape(name: str, length: int, note: str) -> TransformerShape | None:
    """Return the shape of a model, which has to have as many parameters as the note says."""
    model = _shape_of(name, length)
    if model is not None and (printed := re.search(r"(\d+) parameters", note)) and int(printed[1]) != total(model):
        raise ValueError(f"{name} has {printed[1]} parameters, and its shape here {total(model)}")
    return model


def _shape_of(name: str, length: int) -> TransformerShape | None:
    if name in MPT:
        layers, hidden, heads = MPT[name]
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


def _bridge(_path: Path, lines: Iterator[dict[str, str]]) -> Iterator[PublishedStep | SkippedStep]:
    """Yield the newest release's row of each model, kind and precision; a fully sharded one shards parameters."""
    newest: dict[tuple[str, ...], dict[str, str]] = {}
    for line in sorted(lines, key=lambda line: tuple(map(int, line["release"].split(".")))):
        newest[line["model"], line["phase"], line["System"], line["Precision"]] = line
    for (model, phase, system, precision), line in newest.items():
        if not phase.startswith("Pre-Training"):
            yield SkippedStep("Megatron-Bridge", f"phase: {phase}")
        elif model not in BRIDGE:
            yield SkippedStep("Megatron-Bridge", f"no shape of {model}")
        elif not line["TP"]:
            yield SkippedStep("Megatron-Bridge", "a row without degrees or a batch")
        else:
            kind, gpus, batch, length = (
                system.removeprefix("DGX-"), int(line["#-GPUs"]), int(line["GBS"]), int(line["Sequence Length"])
            )  # fmt: skip
            sharding = "optimizer" if line["FSDP"] in NOT_SAID else "parameters"
            degrees = (1 if line[name] in NOT_SAID else int(line[name]) for name in ("TP", "CP", "EP", "PP", "VP"))
            yield PublishedStep(
                "Megatron-Bridge", shape(BRIDGE[model]).model_copy(update={"sequence_length": length}), "megatron",
                kind, gpus, batch, PublishedLayout(*degrees, int(line["MBS"]), sharding),
                batch * length / gpus / float(line["Tokens / sec / GPU"]),
                SIXTEEN if precision == "BF16" else precision,
                unmodelled=("collectives of tensor parallelism under products (tp_comm_overlap)",),
            )  # fmt: skip


def _mlperf(_path: Path, lines: Iterator[dict[str, str]]) -> Iterator[PublishedStep | SkippedStep]:
    """Yield the rows of the 405B whose layout the file has."""
    for line in lines:
        if line["benchmark"] != "llama31_405b" or not line.get("tp"):
            yield SkippedStep("MLPerf Training", f"no shape or no degrees of {line['benchmark']}")
            continue
        kind = next((each for each in ("H100", "H200", "GB200", "B200") if each in line["gpu"]), None)
        if kind is None:
            yield SkippedStep("MLPerf Training", f"kind: {line['gpu']}")
            continue
        degrees = (int(line[name] or 1) for name in ("tp", "cp"))
        yield PublishedStep(
            "MLPerf Training", shape("llama-3.1-405b").model_copy(update={"sequence_length": int(line["sequence"])}),
            "megatron", kind, int(line["gpus"]), int(line["gbs"]),
            PublishedLayout(*degrees, 1, int(line["pp"]), int(line["vp"] or 1)), float(line["median_step_s"]),
            line["precision"], unmodelled=("reductions under several micro-batches (overlap_grad_reduce)",),
        )  # fmt: skip


def _simumax(path: Path, lines: Iterator[dict[str, str]]) -> Iterator[PublishedStep | SkippedStep]:
    """Yield steps on eight B200; a case is named like ``llama3_70b_tp2_pp1_dp4_l12_mbc4_cef``."""
    for line in lines:
        case = line["case"]
        if (file := _model_of(path.parents[1], case)) is None:
            yield SkippedStep("SimuMax", f"no file of the model of {case}")
            continue
        stated = {name: int(value) for name, value in re.findall(r"_(tp|cp|pp|dp|ep|l|mbc|seq)(\d+)(?=_|$)", case)}
        number = {"cp": 1, "ep": 1, "seq": 4096} | stated
        yield PublishedStep(
            "SimuMax", simumax_shape(file, number["l"], number["seq"]), "megatron", "B200",
            number["tp"] * number["cp"] * number["pp"] * number["dp"], number["mbc"] * number["dp"],
            PublishedLayout(number["tp"], number["cp"], number["ep"], number["pp"]), float(line["measured_ms"]) / 1000,
            context_kind="all_to_all", measured_bytes=round(float(line["measured_alloc_gib"]) * 2**30),
        )  # fmt: skip


def _model_of(folder: Path, case: str) -> Path | None:
    """Return the file of a case's model: the one with the longest name that it begins with."""
    files = {path.stem.replace("-", "_"): path for path in (folder / "models").glob("*.json")}
    files |= {name: folder / "models" / f"{stem}.json" for name, stem in PADDED.items()}
    names = [name for name, path in files.items() if case.startswith(f"{name}_") and path.exists()]
    return files[max(names, key=len)] if names else None


def simumax_shape(path: Path, layers: int, sequence_length: int) -> TransformerShape:
    """Return the shape that a file of SimuMax's describes, with another number of layers.

    Its measurements drop and pad to capacity (``--moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity``).
    """
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    experts = latent = None
    if "expert_num" in data:
        experts = Experts(
            number=data["expert_num"],
            per_token=data["topk"],
            ffn=data.get("moe_ffn_hidden_size", data["intermediate_size"]),
            shared_ffn=data.get("moe_shared_expert_intermediate_size", 0),
            dense_layers=min(layers, data.get("dense_layers", 0)),
            capacity_factor=1.0,
        )
    if data.get("attention_type") == "mla":
        latent = LatentAttention(
            query_rank=data["q_lora_rank"],
            key_value_rank=data["kv_lora_rank"],
            plain_width=data["qk_head_dim"],
            rotary_width=data["qk_pos_emb_head_dim"],
            value_width=data["v_head_dim"],
        )
    return TransformerShape(
        name=path.stem,
        layers=layers,
        hidden=data["hidden_size"],
        heads=data["head_num"],
        kv_heads=data["kv_head_num"],
        head_width=data["head_size"],
        ffn=data["intermediate_size"],
        gated=data["use_swiglu"],
        vocabulary=data["vocab_size"],
        sequence_length=sequence_length,
        experts=experts,
        latent=latent,
    )


def _vtrain(_path: Path, lines: Iterator[dict[str, str]]) -> Iterator[PublishedStep | SkippedStep]:
    """Yield GPTs on nodes of eight A100: fp16, full recomputation, no sequence parallelism, 1F1B (vTrain's README)."""
    for line in lines:
        *numbers, measured = [*line.values()][-11:]
        gpus, batch, size, hidden, heads, layers, length, tensor, _data, pipeline = map(int, numbers)
        model = TransformerShape(
            name="gpt", layers=layers, hidden=hidden, heads=heads, kv_heads=heads, head_width=hidden // heads,
            ffn=4 * hidden, gated=False, vocabulary=51_200, sequence_length=length, norm="layer",
            attention_biases="all", ffn_biases=True, positions=length, tied=True,
        )  # fmt: skip
        yield PublishedStep(
            "vTrain, one node" if gpus <= 8 else "vTrain, several nodes", model, "megatron", "A100", gpus, batch,
            PublishedLayout(tensor, 1, 1, pipeline, 1, size, "none", "full"), float(measured) / 1000,
            unmodelled=("no sequence parallelism",),
        )  # fmt: skip


Reader = Callable[[Path, Iterator[dict[str, str]]], Iterator[PublishedStep | SkippedStep]]
READERS: dict[str, Reader] = {
    "published-2026.csv": _published,
    "megatron-bridge.csv": _bridge,
    "mlperf-training.csv": _mlperf,
    "simumax-b200.csv": _simumax,
    "vtrain-one-node.csv": _vtrain,
    "vtrain-multi-node.csv": _vtrain,
}
"""The readers of a folder's files."""
