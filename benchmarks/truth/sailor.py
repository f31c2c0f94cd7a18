"""Sailor's measured plans of GPT-Neo 2.7B on GH200: the order of step times, on 16 nodes of four or more.

The file lacks sequence length and network, so times are printed and only their order is judged. The shape is from
EleutherAI/gpt-neo-2.7B's ``config.json`` with its 2,048 positions; every other layer attends to the last 256 tokens,
which here all attend to all. Layers of a plan count embedding and head. A GH200's processor and NVLink equal an
H100's; the network is taken from a node of H100.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

from penstock.convert import to_problem
from penstock.convert.trainers import within_of
from penstock.examples.catalogue import cluster
from penstock.layouts.drawn import Drawn, by_hand, ordered, placed, world_of
from penstock.schemas.request import PlanRequest
from penstock.schemas.transformers import degrees
from penstock.schemas.transformers.shape import TransformerShape
from penstock.shapes.profiled_degrees import DegreeOptions
from penstock.shapes.profiles import profile_of
from penstock.solvers.degrees.contract import contract
from penstock.solvers.model.degrees import Choice, Degrees

SHAPE = TransformerShape(
    name="gpt-neo-2.7b", layers=32, hidden=2560, heads=20, kv_heads=20, head_width=128, ffn=10_240, gated=False,
    vocabulary=50_257, sequence_length=2048, norm="layer", ffn_biases=True, positions=2048, tied=True,
)  # fmt: skip
NODE = 4
LEAST_NODES = 16


class Measured(NamedTuple):
    """A plan: layers of each stage, GPUs that share one, replicas; and the time of a step."""

    case: str
    layers: tuple[int, ...]
    tensor: int
    replicas: int
    micro_batch_size: int
    batch: int
    seconds: float

    @property
    def nodes(self) -> int:
        """The nodes, of four GPUs each."""
        return len(self.layers) * self.tensor * self.replicas // NODE


def measured_rows(path: Path) -> list[Measured]:
    """Return the plans on enough nodes whose stages hold the whole model, quickest first."""
    with path.open(encoding="utf-8") as file:
        rows = [_row(row) for row in csv.DictReader(file)]
    whole = [row for row in rows if sum(row.layers) == SHAPE.layers + 2 and row.nodes >= LEAST_NODES]
    return sorted(whole, key=lambda row: row.seconds)


def _row(row: dict[str, str]) -> Measured:
    return Measured(
        Path(row["case"]).stem.removeprefix("plan_config_"),
        tuple(map(int, row["layers"].split("/"))),
        int(row["tp"]),
        int(row["dp"].partition("/")[0]),
        int(row["mbs"]),
        int(row["gbs"]),
        float(row["measured_s"]),
    )


def step_s(row: Measured) -> float:
    """Return the seconds of a step with these stages, 1F1B."""
    options = DegreeOptions(tensor=(row.tensor,), context=(1,))
    profile = profile_of(SHAPE, "megatron", ("H100",), micro_batch_sizes=(row.micro_batch_size,), degrees=options)
    request = PlanRequest(
        profile=profile,
        topology=cluster(f"{row.nodes}x{NODE}xH100"),
        global_batch_size=row.batch,
        degrees=degrees.Degrees(tensor=row.tensor),
        sharding="none",
    )
    cells = contract(to_problem(request), Choice(Degrees(tensor=row.tensor), "none"))
    edges = accumulate(row.layers, initial=0)
    stages = tuple((first, end - 1) for first, end in pairwise(edges))
    drawn = Drawn(stages, len(stages), "early-backward", rows=row.micro_batch_size)
    within = within_of("megatron", profile)
    allocation = placed(cells, within, drawn, world_of(cells, "", None))
    plan, _faults = by_hand(cells, allocation, ordered(cells, within, drawn, allocation), overlap=True)
    return plan.timeline.time_per_global_batch_ns / 1e9


def report(path: Path) -> int:
    """Print the table; return 1 where the predicted order is another one."""
    rows = measured_rows(path) if path.exists() else []
    if not rows:
        print(f"Sailor: {path.name} has no plan of GPT-Neo 2.7B on {LEAST_NODES} nodes or more: nothing to predict")
        return 0
    predicted = [step_s(row) for row in rows]
    print(f"Sailor, GPT-Neo 2.7B on GH200, from {LEAST_NODES} nodes on; only the order is known")
    print(f"{'plan':10} {'layers':>17} replicas measured predicted")
    for row, seconds in zip(rows, predicted, strict=True):
        layers = "/".join(map(str, row.layers))
        print(f"{row.case:10} {layers:>17} {row.replicas:8} {row.seconds:6.3f} s {seconds:7.3f} s")
    wrong = predicted != sorted(predicted)
    order = spearman(predicted, [row.seconds for row in rows])
    print(f"  order: Spearman {order:.2f} (wanted: the same order): {'MISSED' if wrong else 'ok'}")
    return int(wrong)


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the correlation of the orders of two lists of the same things, which have no equal values."""
    orders = []
    for values in (one, other):
        order = sorted(range(len(values)), key=values.__getitem__)
        orders.append({item: place for place, item in enumerate(order)})
    squares = sum((orders[0][item] - orders[1][item]) ** 2 for item in range(len(one)))
    return 1 - 6 * squares / (len(one) * (len(one) ** 2 - 1))
