"""Memory, legality, times and layouts against published measurements: tables of errors, row by row.

    scripts/bench-truth FOLDER

FOLDER holds ``truth/simumax-b200.csv`` (cases and measured GiB, from MooreThreads/SimuMax,
summary of release 1.2 on B200, Apache-2.0), ``models/*.json`` (shapes as SimuMax lists them) and
``trainers/megatron-legality.jsonl`` (products of degrees with the verdict of Megatron-LM's own checks). For times also
``primitives/simumax-b200_bf16_ceperm.json`` (SimuMax) and ``truth/vtrain-*.csv`` (VIA-Research/vTrain, MIT); for judged
layouts ``truth/mlperf-training.csv`` (MLCommons' results), ``truth/megatron-bridge.csv`` (NVIDIA-NeMo/Megatron-Bridge,
Apache-2.0) and ``truth/sailor.csv`` (eth-easl/sailor, MIT). For uncalibrated results
``truth/published-2026.csv``, whose column `source` names the source of a row. Another folder of the same form works
too: files that it lacks are left out, and so are rows of models without a shape. None of it is part of this repository.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import truth_bridge
import truth_mlperf
import truth_pairs
import truth_published
import truth_sailor
import truth_times

from penstock.schemas.transformers.shape import Experts, LatentAttention, TransformerShape
from penstock.shapes.gpu_memory import memory_of_stages
from penstock.shapes.layout import Layout
from penstock.shapes.legality import broken

GIB = 2**30
MOST_ERROR, MOST_CONTEXT_ERROR, MOST_EXPERTS_ERROR = 0.02, 0.03, 0.05
PADDED = {"llama3_405b": "llama3-405b_padding_128"}
"""A dict from cases to their files of ``models``, where these have another name."""

VERDICT_WORDS = {
    "total_model_size": "product",
    "Number of layers": "layers",
    "num_attention_heads": "heads",
    "num_query_groups": "key_value_heads",
    "seq-length": "context",
    "eval_global_batch_size": "batch",
    "Number of experts": "experts",
    "expert_tensor_model_pipeline": "expert_groups",
}
"""A dict from words of Megatron's verdict to the rule here that has to be among the broken ones."""


class Measured(NamedTuple):
    """A row of SimuMax's table."""

    case: str
    dense: bool
    context: int
    measured_gib: float
    predicted_gib: float

    @property
    def error(self) -> float:
        """The error of the prediction, as a share of the measured memory."""
        return self.predicted_gib / self.measured_gib - 1


def shape_of_model(path: Path, layers: int, sequence_length: int) -> TransformerShape:
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


def measured_rows(folder: Path) -> list[Measured]:
    """Return every row of the table whose model has a file, with the prediction of the closed form."""
    rows = []
    with (folder / "truth" / "simumax-b200.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if _model_of(folder, row["case"]) is not None:
                rows.append(_predicted(folder, row["case"], float(row["measured_alloc_gib"])))
    return rows


def _predicted(folder: Path, case: str, measured_gib: float) -> Measured:
    """Return the row of a case, which has a name such as ``llama3_70b_tp2_pp1_dp4_l12_mbc4_cef``."""
    degrees = dict(re.findall(r"_(tp|cp|pp|dp|ep|l|mbc|seq)(\d+)(?=_|$)", case))
    number = {name: int(value) for name, value in degrees.items()}
    shape = _shape_of_case(folder, case, number["l"], number.get("seq", 4096))
    assert shape is not None
    layout = Layout(
        tensor=number["tp"],
        context=number.get("cp", 1),
        context_kind=truth_times.CONTEXT_KIND,
        expert=number.get("ep", 1),
        pipeline=number["pp"],
        data=number["dp"],
        global_batch_size=number["mbc"] * number["dp"],
    )
    fullest = max(stage.total for stage in memory_of_stages(shape, layout))
    return Measured(case, shape.experts is None, layout.context, measured_gib, fullest / GIB)


def _shape_of_case(folder: Path, case: str, layers: int, sequence_length: int) -> TransformerShape | None:
    """Return the shape of a case; None where no file has its model."""
    model = _model_of(folder, case)
    return None if model is None else shape_of_model(model, layers, sequence_length)


def _model_of(folder: Path, case: str) -> Path | None:
    """Return the file of a case's model: the one with the longest name that it begins with."""
    files = {path.stem.replace("-", "_"): path for path in (folder / "models").glob("*.json")}
    files |= {name: folder / "models" / f"{stem}.json" for name, stem in PADDED.items()}
    names = [name for name, path in files.items() if case.startswith(f"{name}_") and path.exists()]
    return files[max(names, key=len)] if names else None


class Verdict(NamedTuple):
    """A product of degrees: Megatron's ``verdict``, and the rules broken here, by when Megatron checks them."""

    verdict: str
    at_start: tuple[str, ...]
    later: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """True if both accept, or both refuse for the same reason.

        The file's verdicts are given before building.
        """
        if self.verdict == "ok":
            return not self.at_start
        return any(words in self.verdict and rule in self.at_start for words, rule in VERDICT_WORDS.items())


def verdicts(folder: Path) -> list[Verdict]:
    """Return every row of the file of verdicts."""
    lines = (folder / "trainers" / "megatron-legality.jsonl").read_text(encoding="utf-8").splitlines()
    return [_verdict(json.loads(line)) for line in lines]


def _verdict(row: dict[str, Any]) -> Verdict:
    """Return the verdict of a row.

    The file has no vocabulary or width of a head, which no rule here needs; Megatron pads the vocabulary.
    """
    experts = None if row["experts"] is None else Experts(number=row["experts"], per_token=1, ffn=row["ffn"])
    shape = TransformerShape(
        name=row["model"],
        layers=row["layers"],
        hidden=row["hidden"],
        heads=row["heads"],
        kv_heads=row["kv_heads"],
        head_width=max(1, row["hidden"] // row["heads"]),
        ffn=row["ffn"],
        gated=True,
        vocabulary=row["hidden"],
        sequence_length=row["sequence"],
        experts=experts,
    )
    group = row["tp"] * row["cp"] * row["pp"]
    layout = Layout(
        tensor=row["tp"],
        context=row["cp"],
        expert=row["ep"],
        expert_tensor=1 if experts is None else row["etp"] or row["tp"],
        pipeline=row["pp"],
        data=0 if row["gpus"] % group else row["gpus"] // group,
        virtual_stages=row["vpp"] or 1,
        micro_batch_size=row["mbs"],
        global_batch_size=row["gbs"],
        sequence_parallel=row["sp"],
        ends_as_layers=False,
    )
    broken_rules = broken(shape, layout, row["gpus"])
    at_start = tuple(one.rule for one in broken_rules if one.moment == "start")
    return Verdict(row["result"], at_start, tuple(one.rule for one in broken_rules if one.moment != "start"))


def main(arguments: list[str]) -> int:
    """Print the tables; return 1 where a dense row is off, a difference has no name or a target is missed."""
    if len(arguments) != 1:
        print("truth: needs the folder of measurements, which is not in the repository: scripts/bench-truth FOLDER")
        return 64 if arguments else 0
    folder = Path(arguments[0])
    truth = folder / "truth"
    sections: tuple[tuple[Path, Callable[[], int]], ...] = (
        (truth / "simumax-b200.csv", lambda: _memory(folder)),
        (folder / "trainers" / "megatron-legality.jsonl", lambda: _legality(folder)),
        (truth / "vtrain-one-node.csv", lambda: truth_times.report(folder, partial(_shape_of_case, folder))),
        (truth / "mlperf-training.csv", lambda: truth_mlperf.report(truth / "mlperf-training.csv")),
        (truth / "megatron-bridge.csv", lambda: _bridge(truth / "megatron-bridge.csv")),
        (truth / "sailor.csv", lambda: truth_sailor.report(truth / "sailor.csv")),
        (truth / "published-2026.csv", lambda: truth_published.report(truth)),
    )
    missed = 0
    for file, section in sections:
        if file.exists():
            missed += section()
        else:
            print(f"{file.name}: not in {folder}, left out")
    return int(missed > 0)


def _memory(folder: Path) -> int:
    """Print the memory of SimuMax's rows; return how many are off."""
    wrong = 0
    print(f"{'memory of the fullest GPU':55} {'measured':>9} {'predicted':>9} {'error':>8}")
    for row in measured_rows(folder):
        bound = MOST_EXPERTS_ERROR if not row.dense else MOST_ERROR if row.context == 1 else MOST_CONTEXT_ERROR
        missed = abs(row.error) > bound
        wrong += missed
        mark = "MISSED" if missed else "ok"
        print(f"{row.case:55} {row.measured_gib:9.2f} {row.predicted_gib:9.2f} {100 * row.error:+7.2f}% {mark}")
    return wrong


def _legality(folder: Path) -> int:
    """Print how many verdicts agree with Megatron-LM's; return how many do not."""
    wrong, results = 0, verdicts(folder)
    print(f"legality: {sum(one.agrees for one in results)} of {len(results)} verdicts agree with Megatron-LM's")
    for one in results:
        if not one.agrees:
            wrong += 1
            print(f"  Megatron says {one.verdict}, here {', '.join(one.at_start) or 'no rule'}")
    late = Counter(one.later for one in results if one.verdict == "ok" and one.later)
    for rules, number in late.items():
        print(f"  {number} that its checks let pass are refused here too: {', '.join(rules)}")
    return wrong


def _bridge(path: Path) -> int:
    """Print Megatron-Bridge's rows, and the layouts that its rows of one kind and precision calibrate."""
    missed = truth_bridge.report(path)
    measured = truth_bridge.measured_rows(path).get(truth_bridge.WANTED, {})
    if truth_bridge.SMALL in measured:
        missed += truth_pairs.report(truth_bridge.speed_of(measured))
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
