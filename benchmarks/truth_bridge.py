"""Megatron-Bridge's performance tables: the 70B row of a (kind, precision) calibrates it and predicts its 405B row.

One number is calibrated: the speed of all kernels relative to the table of devices in bf16. Megatron-Bridge's recipes
sum gradients of 16 bits (``grad_reduce_in_fp32 = False`` in ``scripts/performance/configs/llama``), and so do the
plans here. They overlap collectives of tensor parallelism with products (``tp_comm_overlap``, off for NVFP4); plans
hide none. For H100 a node has 8 GPUs; GB200's are in NVLink domains of 72, of which the tables use 64.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

from truth_layouts import Run, calibrated, judged, mark

from penstock.examples.catalogue import shape
from penstock.schemas.errors import PenstockError

SMALL, LARGE = "LLAMA3_70B", "LLAMA3.1_405B"
_SHAPES = {SMALL: "llama-3-70b", LARGE: "llama-3.1-405b"}
_NOT_SAID = ("", "0", "n/a")
MOST_ERROR = 0.15
WANTED = ("H100", "FP8")


class Measured(NamedTuple):
    """A row of the tables; ``fully_sharded``: by FSDP, which plans do not have."""

    run: Run
    seconds: float
    release: str
    fully_sharded: bool

    @property
    def pace(self) -> float:
        """The tokens a second and GPU."""
        return self.run.tokens / self.run.gpus / self.seconds


def measured_rows(path: Path) -> dict[tuple[str, str], dict[str, Measured]]:
    """Return, by kind and precision, the newest row of each of the two models."""
    newest: dict[tuple[str, str], dict[str, Measured]] = {}
    with path.open(encoding="utf-8") as file:
        for row in sorted(csv.DictReader(file), key=lambda row: tuple(map(int, row["release"].split(".")))):
            if row["model"] in _SHAPES and row["phase"].startswith("Pre-Training"):
                measured = _row(row)
                newest.setdefault((measured.run.kind, row["Precision"]), {})[row["model"]] = measured
    return newest


def _row(row: dict[str, str]) -> Measured:
    kind, gpus = row["System"].removeprefix("DGX-"), int(row["#-GPUs"])
    size = min(gpus, 64) if kind.startswith("GB") else 8
    model = shape(_SHAPES[row["model"]]).model_copy(update={"sequence_length": int(row["Sequence Length"])})
    run = Run(
        model, gpus // size, size, kind, int(row["GBS"]), _degree(row["TP"]), _degree(row["PP"]),
        _degree(row["VP"]), _degree(row["CP"]), int(row["MBS"]),
    )  # fmt: skip
    return Measured(run, run.seconds(float(row["Tokens / sec / GPU"])), row["release"], row["FSDP"] not in _NOT_SAID)


def _degree(text: str) -> int:
    return 1 if text in _NOT_SAID else int(text)


def speed_of(rows: dict[str, Measured]) -> float:
    """Return the speed that the smaller model's row calibrates."""
    return calibrated(rows[SMALL].run, rows[SMALL].seconds)


def report(path: Path) -> int:
    """Print the table; return the number of targets that are missed."""
    missed = 0
    print(f"Megatron-Bridge, {LARGE} predicted from {SMALL}; tokens a second and GPU")
    print(f"{'kind':6} {'precision':9} {'release':9} {'measured':>8} {'predicted':>9} {'error':>7}  hidden")
    for (kind, precision), rows in measured_rows(path).items():
        if rows.keys() != _SHAPES.keys():
            continue
        large = rows[LARGE]
        head = f"{kind:6} {precision:9} {large.release:9} {large.pace:8.0f}"
        if any(row.fully_sharded for row in rows.values()):
            print(f"{head}  not predicted: a row shards parameters (FSDP), which this formula has not")
            continue
        try:
            missed += _reported(head, rows, wanted=(kind, precision) == WANTED)
        except PenstockError as error:
            print(f"{head}  not predicted: {error}")
    print("  hidden: the error if all collectives of tensor parallelism were hidden, in both rows")
    return missed


def _reported(head: str, rows: dict[str, Measured], *, wanted: bool) -> int:
    speed, large = speed_of(rows), rows[LARGE]
    prediction = judged(large.run, speed)
    error = large.seconds / prediction.seconds - 1
    wrong = wanted and abs(error) > MOST_ERROR
    other = {name: row._replace(run=row.run._replace(hidden=frozenset({"tensor"}))) for name, row in rows.items()}
    hidden = large.seconds / judged(other[LARGE].run, speed_of(other)).seconds - 1
    pace = large.pace * (1 + error)
    print(f"{head} {pace:9.0f} {error:+7.1%} {hidden:+7.1%} {mark(wrong) if wanted else ''}".rstrip())
    small = rows[SMALL].run
    print(f"       {small.layout} on {small.gpus} calibrates {speed:.2f} × bf16's kernels; {large.run.layout}")
    if prediction.missing_bytes:
        print(f"       in 16 bits it would lack {prediction.missing_bytes / 2**30:.1f} GiB")
    return int(wrong)
