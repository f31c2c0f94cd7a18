"""The convergence of every update rule: epochs and seconds to a target, on two small tasks, three seeds.

``python benchmarks/convergence/run.py [--seeds N] [--processes N] [--rank-epochs N]`` prints a Markdown table per task.

Curves come from plain single-process trainers, which ranks are equal to by test. One seed of each rule is trained on
ranks too, for its seconds per epoch, and the distance of its losses from the curve is printed. The distance of a rule
is the mean over steps and seeds of the difference between its loss of a global batch and synchronous training's (after
WPipe, figure 7; PipeDream trains each batch as one micro-batch). Nothing here passes or fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from multiprocessing import get_context
from statistics import mean, pstdev

from curves import RULES, Curve, train
from on_ranks import measure
from tasks import TASKS


def main(arguments: Sequence[str]) -> int:
    """Compute curves in processes, then train on ranks, one rule after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rank-epochs", type=int, default=1, help="epochs of each rule on ranks; 0: none")
    options = parser.parse_args(arguments)
    trainings = [(task, rule, seed) for task in TASKS for rule in RULES for seed in range(options.seeds)]
    with get_context("spawn").Pool(options.processes) as pool:
        curves = pool.starmap(train, trainings, chunksize=1)
    for task in TASKS:
        _print_task(task, [curve for curve in curves if curve.task == task], options.rank_epochs)
    return 0


def _print_task(name: str, curves: Sequence[Curve], rank_epochs: int) -> None:
    task = TASKS[name]
    print(f"\n### {name}: {task.measure} at most {task.target:g}, {task.batches_per_epoch} batches per epoch\n")
    print("| update rule | epochs to target | best | distance to synchronous | s per epoch (ranks) | s to target |")
    print("|---|---|---|---|---|---|", flush=True)
    base = {curve.seed: curve.losses for curve in curves if curve.rule == "synchronous"}
    for rule in RULES:
        of_rule = [curve for curve in curves if curve.rule == rule]
        epochs = [curve.epochs for curve in of_rule if curve.epochs is not None]
        reached = _spread(epochs) if epochs else "-"
        if len(epochs) < len(of_rule):
            reached += f" ({len(epochs)} of {len(of_rule)} reached it within {task.epochs})"
        best = _spread([min(curve.measures) for curve in of_rule])
        distance = _spread([_distance(curve.losses, base[curve.seed]) for curve in of_rule])
        seconds, total = "", ""
        if rank_epochs:
            report = measure(name, rule, of_rule[0], rank_epochs)
            seconds = f"{report.seconds_per_epoch:.2f} ({report.num_ranks} ranks, losses {report.apart:.1e} apart)"
            total = f"{report.seconds_per_epoch * mean(epochs):.1f}" if epochs else "-"
        print(f"| {rule} | {reached} | {best} | {distance} | {seconds} | {total} |", flush=True)


def _spread(values: Iterable[float]) -> str:
    """Return mean and standard deviation as text."""
    numbers = list(values)
    return f"{mean(numbers):.3g} ± {pstdev(numbers):.2g}"


def _distance(losses: Sequence[float], synchronous: Sequence[float]) -> float:
    """Return the mean distance step by step; a step of several global batches is compared with their mean."""
    batches = len(synchronous) // len(losses)
    wanted = [mean(synchronous[i * batches : (i + 1) * batches]) for i in range(len(losses))]
    return mean(abs(a - b) for a, b in zip(losses, wanted, strict=True))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
