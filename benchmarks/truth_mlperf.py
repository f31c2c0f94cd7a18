"""MLPerf Training, llama-3.1-405b on H100: step times by number of GPUs, computation calibrated on the smallest run.

The runs differ in replicas and micro-batches only (TP 8, CP 2, PP 8, VP 8), so a step is a period per micro-batch and
a rest: filling and draining the pipeline, reductions, update. Overlaps are not fitted to the rows: the submission
(mlcommons/training_results_v5.0, NVIDIA's ``llama31_405b``, ``config_common.sh`` and the training script) sets
``OVERLAP_GRAD_REDUCE``, ``OVERLAP_PARAM_GATHER``, ``OVERLAP_P2P_COMM`` and ``grad_reduce_in_fp32=False``, which
`truth_layouts` explains. Embedding and loss count as a layer each (``ASYM_PP_EMBED``, ``ASYM_PP_LOSS``), so that 126
layers fill 64 virtual stages.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, linear_regression
from typing import NamedTuple

from truth_layouts import Run, calibrated, judged, mark

from penstock.examples.catalogue import shape
from penstock.schemas.request import NetworkModel

EACH, MEAN = 0.06, 0.04
_LEAST_ROWS = 2
"""The least number of rows; one calibrates."""
SHARED = NetworkModel()


class Measured(NamedTuple):
    """A submitted run, and the median time of its steps."""

    run: Run
    micro_batches: int
    seconds: float


def measured_rows(path: Path) -> list[Measured]:
    """Return the runs of the largest Llama on H100, fewest GPUs first."""
    with path.open(encoding="utf-8") as file:
        rows = [
            _row(row)
            for row in csv.DictReader(file)
            if row["benchmark"] == "llama31_405b" and "H100" in row["gpu"] and row.get("tp")
        ]
    return sorted(rows, key=lambda row: row.run.gpus)


def _row(row: dict[str, str]) -> Measured:
    model = shape("llama-3.1-405b").model_copy(update={"sequence_length": int(row["sequence"])})
    run = Run(
        model, int(row["gpus"]) // 8, 8, "H100", int(row["gbs"]), int(row["tp"]), int(row["pp"]), int(row["vp"]),
        int(row["cp"]),
    )  # fmt: skip
    return Measured(run, int(float(row["ga"])), float(row["median_step_s"]))


def report(path: Path) -> int:
    """Print the table; return the number of targets that are missed."""
    rows = measured_rows(path)
    if len(rows) < _LEAST_ROWS:
        print(f"MLPerf: {path.name} has {len(rows)} runs of the 405B on H100 with their degrees: nothing to predict")
        return 0
    speed = calibrated(rows[0].run, rows[0].seconds)
    print(f"MLPerf Training v5.0, 405B on H100, FP8; {rows[0].run.gpus} GPUs calibrate {speed:.3f} × bf16's kernels")
    print(f"{'GPUs':>6} {'micro-batches':>13} {'measured':>9} {'predicted':>9} {'error':>7}")
    predicted, errors = [], []
    for row in rows:
        predicted.append(judged(row.run, speed).seconds)
        error = predicted[-1] / row.seconds - 1
        note = "calibrates"
        if row is not rows[0]:
            errors.append(abs(error))
            note = mark(abs(error) > EACH)
        print(
            f"{row.run.gpus:6} {row.micro_batches:13} {row.seconds:7.3f} s {predicted[-1]:7.3f} s {error:+7.1%} {note}"
        )
    missed = sum(error > EACH for error in errors) + (fmean(errors) > MEAN)
    print(f"  mean error {fmean(errors):.1%} (wanted {MEAN:.0%}, each {EACH:.0%}): {mark(missed > 0)}")
    for name, times in (("measured", [row.seconds for row in rows]), ("predicted", predicted)):
        slope, intercept = _affine(rows, times)
        print(f"  {name:9} {slope:.4f} s a micro-batch + {intercept:.3f} s")
    last = rows[-1]
    queued = judged(last.run, calibrated(rows[0].run, rows[0].seconds, SHARED), SHARED).seconds / last.seconds - 1
    print(f"  where messages wait for reductions, as requests have it by default: {last.run.gpus} GPUs {queued:+.1%}")
    return missed


def _affine(rows: Sequence[Measured], times: Sequence[float]) -> tuple[float, float]:
    return linear_regression([row.micro_batches for row in rows], times)
