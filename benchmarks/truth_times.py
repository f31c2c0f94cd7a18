"""Step times of the closed forms against published measurements, after few numbers are calibrated.

SimuMax on B200: the share of the peak that products reach, from one row. vTrain on A100: that share and the least time
of an operation, from the rows with 12 layers; then the layouts that the closed form picks among the measured ones, and
their cost over the best (regret). Collectives reach what SimuMax measured on B200, on the links of the table of
devices.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any, NamedTuple

from truth_layouts import spearman
from uniform_steps import Links, Step

from penstock.facts.device_table import DeviceFacts, device_facts
from penstock.importers.cluster import hardware
from penstock.schemas.transformers.degrees import ContextKind
from penstock.schemas.transformers.shape import TransformerShape
from penstock.shapes.layout import Layout

CONTEXT_KIND: ContextKind = "all_to_all"
"""The kind of SimuMax's rows with context parallelism (its guide to reproducing them on B200, section 7)."""
MOST_ERROR = 0.12
MOST_CONTEXT_ERROR = 0.15
MOST_EXPERTS_ERROR = 0.15
ShapeOf = Callable[[str, int, int], TransformerShape | None]
"""A function that returns the model of a case with a number of layers and tokens of a sample.

None where the model is unknown.
"""
_FITTED_LAYERS = 12
_MANY, _ORDER, _ORDER_OF_FEW = 20, 0.9, 0.8
"""The number of layouts in a large group, and the least correlations of the order in large and small groups."""
_NODE = 8


class Timed(NamedTuple):
    """A step as measured and as predicted."""

    step: Step
    measured_ms: float
    group: tuple[int, ...] = ()
    """The group; rows of a group differ in their layout only."""

    @property
    def predicted_ms(self) -> float:
        """The prediction of the closed form."""
        return self.step.time_ns / 1e6

    @property
    def error(self) -> float:
        """The error of the prediction, as a share of the measured time."""
        return self.predicted_ms / self.measured_ms - 1

    def on(self, facts: DeviceFacts) -> Timed:
        """Return the same step on a device with other facts."""
        return self._replace(step=self.step._replace(facts=facts))


def reaching(facts: DeviceFacts, share: float, launch_ns: float | None = None) -> DeviceFacts:
    """Return a device whose large products reach this share of the peak.

    Its operations take at least ``launch_ns``.
    """
    launch = facts.launch_ns if launch_ns is None else round(launch_ns)
    return replace(facts, compute_efficiency=dict.fromkeys(facts.compute_efficiency, share), launch_ns=launch)


def simumax_rows(folder: Path, shape_of: ShapeOf) -> list[tuple[str, Timed]]:
    """Return all rows, the dense ones first."""
    primitives = json.loads((folder / "primitives" / "simumax-b200_bf16_ceperm.json").read_text(encoding="utf-8"))
    facts = device_facts("B200")
    links = _b200_links(primitives)
    rows = []
    with (folder / "truth" / "simumax-b200.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            case = row["case"]
            degrees = {name: int(value) for name, value in re.findall(r"_(tp|cp|pp|dp|ep|l|mbc|seq)(\d+)(?=_|$)", case)}
            number = {"cp": 1, "ep": 1, "seq": 4096} | degrees
            layout = Layout(
                tensor=number["tp"],
                context=number["cp"],
                context_kind=CONTEXT_KIND,
                expert=number["ep"],
                pipeline=number["pp"],
                data=number["dp"],
                global_batch_size=number["mbc"] * number["dp"],
            )
            if (shape := shape_of(case, number["l"], number["seq"])) is None:
                continue
            step = Step(shape, layout, facts, links)
            rows.append((case, Timed(step, float(row["measured_ms"]))))
    return sorted(rows, key=lambda one: one[1].step.shape.experts is not None)


def _b200_links(primitives: dict[str, Any]) -> Links:
    """Return the reach of all-gathers and all-to-all.

    Their time without bytes is divided among the hops around eight GPUs.
    """
    network = primitives["networks"]["high_intra_node"]

    def reached(operation: str) -> tuple[int, int]:
        entry = network["op"][operation]
        hop_us = entry["latency_us"] + entry["fixed_latency_us"] / (_NODE - 1)
        return round(entry["efficient_factor"] * network["bandwidth"]["gbps"] * 1e9), round(hop_us * 1000)

    inside = reached("all_gather")
    return Links(inside, inside, _NODE, reached("all2all"))


def calibrated(row: Timed) -> float:
    """Return the share of the peak at which the predicted time of a row equals the measured time, by halving."""
    low, high = 0.05, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        slow = row.on(reaching(row.step.facts, middle)).error > 0
        low, high = (middle, high) if slow else (low, middle)
    return low


def vtrain_rows(path: Path, reach: float) -> list[Timed]:
    """Return GPTs on nodes of eight A100: fp16, full recomputation, no sequence parallelism, 1F1B (its README)."""
    node = hardware.usual("A100")
    inside = (round(reach * node.fabric_bytes_per_s.value), node.fabric_latency_ns.value)
    nic = node.node_nic_bytes_per_s(_NODE)
    assert nic is not None
    links = Links(inside, (nic // _NODE, node.nic_latency_ns.value), _NODE)
    with path.open(encoding="utf-8") as file:
        return [_vtrain_row([*row.values()], links) for row in csv.DictReader(file)]


def _vtrain_row(values: Sequence[str], links: Links) -> Timed:
    *numbers, measured = values[-11:]
    gpus, batch, size, hidden, heads, layers, length, tensor, data, pipeline = (int(value) for value in numbers)
    shape = TransformerShape(
        name="gpt", layers=layers, hidden=hidden, heads=heads, kv_heads=heads, head_width=hidden // heads,
        ffn=4 * hidden, gated=False, vocabulary=51_200, sequence_length=length, norm="layer",
        attention_biases="all", ffn_biases=True, positions=length, tied=True,
    )  # fmt: skip
    layout = Layout(
        tensor=tensor, data=data, pipeline=pipeline, micro_batch_size=size, global_batch_size=batch,
        sequence_parallel=False, sharding="none",
    )  # fmt: skip
    step = Step(shape, layout, device_facts("A100"), links, "fp16", recompute=True, gradient_bytes=2)
    return Timed(step, float(measured), (gpus, batch, hidden, heads, layers, length))


def fitted(rows: Sequence[Timed]) -> DeviceFacts:
    """Return the share of the peak and the shortest operation with the least mean error.

    The search takes steps that become smaller.
    """
    facts = rows[0].step.facts

    def off(share: float, launch_ns: float) -> float:
        return fmean(abs(math.log1p(row.on(reaching(facts, share, launch_ns)).error)) for row in rows)

    best, factor = (0.4, 20_000.0), 2.0
    least = off(*best)
    while factor > 1.01:
        near = [(best[0] * x, best[1] * y) for x, y in ((factor, 1), (1 / factor, 1), (1, factor), (1, 1 / factor))]
        nearest = min((off(*each), each) for each in near if each[0] <= 1)
        if nearest[0] < least:
            least, best = nearest
        else:
            factor = math.sqrt(factor)
    return reaching(facts, *best)


class Regrets(NamedTuple):
    """The regrets of a rule: mean and 95th percentile of groups.

    A regret is the measured time of the layout that was picked over the best layout's time, less 1.
    """

    mean: float
    high: float

    @classmethod
    def of(cls, rows: Iterable[Timed], rule: Callable[[Timed], Any]) -> Regrets:
        """Return the regrets of picking in every group the row that is least by the rule."""
        groups: dict[tuple[int, ...], list[Timed]] = defaultdict(list)
        for row in rows:
            groups[row.group].append(row)
        each = [
            min(group, key=rule).measured_ms / min(row.measured_ms for row in group) - 1 for group in groups.values()
        ]
        return cls(fmean(each), quantiles(each, n=20, method="inclusive")[-1] if len(each) > 1 else each[0])


def least_tensor(row: Timed) -> tuple[int, int, int]:
    """Return the rank by a rule of thumb: least tensor degree, then fewest stages, then the largest micro-batch."""
    layout = row.step.layout
    return layout.tensor, layout.pipeline, -layout.micro_batch_size


def largest_micro_batch(row: Timed) -> tuple[int, int, int]:
    """Return the rank by a rule of thumb: largest micro-batch, then least tensor degree, then fewest stages."""
    layout = row.step.layout
    return -layout.micro_batch_size, layout.tensor, layout.pipeline


def report(folder: Path, shape_of: ShapeOf) -> int:
    """Print both tables; return the number of targets that are missed."""
    missed = _report_simumax(simumax_rows(folder, shape_of))
    primitives = json.loads((folder / "primitives" / "simumax-b200_bf16_ceperm.json").read_text(encoding="utf-8"))
    reach = primitives["networks"]["high_intra_node"]["op"]["all_reduce"]["efficient_factor"]
    rows = vtrain_rows(folder / "truth" / "vtrain-one-node.csv", reach)
    fitting = [row for row in rows if row.step.shape.layers == _FITTED_LAYERS]
    if not fitting:
        print(f"vTrain: no row of {_FITTED_LAYERS} layers, which the two numbers are fitted on: nothing to predict")
        return missed
    facts = fitted(fitting)
    missed += _report_one_node([row.on(facts) for row in rows if row.step.shape.layers != _FITTED_LAYERS], facts)
    return missed + _report_nodes(
        [row.on(facts) for row in vtrain_rows(folder / "truth" / "vtrain-multi-node.csv", reach)]
    )


def _mark(wrong: bool) -> str:
    return "MISSED" if wrong else "ok"


def _report_simumax(rows: Sequence[tuple[str, Timed]]) -> int:
    share = calibrated(rows[0][1])
    print(
        f"{'step, ms; the first row calibrates ' + format(share, '.3f') + ' of the peak':55} measured predicted  error"
    )
    missed = 0
    pairs: dict[str, list[Timed]] = defaultdict(list)
    for case, row in rows:
        timed = row.on(reaching(row.step.facts, share))
        dense, context = row.step.shape.experts is None, row.step.layout.context
        bound = MOST_EXPERTS_ERROR if not dense else MOST_CONTEXT_ERROR if context > 1 else MOST_ERROR
        wrong = abs(timed.error) > bound
        missed += wrong
        pairs[re.sub(r"_mbc\d+", "", case)].append(timed)
        print(f"{case:55} {timed.measured_ms:8.1f} {timed.predicted_ms:9.1f} {100 * timed.error:+6.1f}% {_mark(wrong)}")
    for case, pair in pairs.items():
        if len(pair) == 2:
            print(f"  {case}: {_apart(pair)}")
    return missed


def _apart(pair: Sequence[Timed]) -> str:
    """Compare two steps with other numbers of micro-batches.

    Returns the time of one more micro-batch, and the rest of a step.
    """
    few, many = ((row.step.layout.micro_batches or 0) for row in pair)

    def parts(times: Sequence[float]) -> tuple[float, float]:
        each = (times[1] - times[0]) / (many - few)
        return each, times[0] - few * each

    measured, predicted = parts([row.measured_ms for row in pair]), parts([row.predicted_ms for row in pair])
    return (
        f"one more micro-batch {measured[0]:.1f} ms, predicted {predicted[0]:.1f}; the rest of a step "
        f"{measured[1]:.1f}, predicted {predicted[1]:.1f}"
    )


def _report_one_node(rows: Sequence[Timed], facts: DeviceFacts) -> int:
    regrets = Regrets.of(rows, lambda row: row.predicted_ms)
    rules = [Regrets.of(rows, rule) for rule in (least_tensor, largest_micro_batch)]
    wrong = regrets.mean > 0.04 or regrets.high > 0.12 or any(regrets >= rule for rule in rules)
    error = fmean(abs(row.error) for row in rows)
    share, launch = facts.compute_efficiency["fp16"], facts.launch_ns / 1000
    print(f"vTrain, one node, {len(rows)} layouts of 16, 20 and 24 layers; fitted on 12: {share:.3f} of the peak,")
    print(f"  {launch:.0f} µs an operation at least; mean error {error:.1%}")
    for name, one in zip(("closed form", "least tensor degree", "largest micro-batch"), (regrets, *rules), strict=True):
        print(f"  regret of {name:21} mean {one.mean:6.1%}, 95th percentile {one.high:6.1%}")
    print(f"  wanted: 4 % and 12 %, less than both rules: {_mark(wrong)}")
    return int(wrong)


def _report_nodes(rows: Sequence[Timed]) -> int:
    groups: dict[tuple[int, ...], list[Timed]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    missed = 0
    for group in sorted(groups.values(), key=len, reverse=True):
        wanted = _ORDER if len(group) > _MANY else _ORDER_OF_FEW
        regret = Regrets.of(group, lambda row: row.predicted_ms).mean
        order = spearman([row.predicted_ms for row in group], [row.measured_ms for row in group])
        wrong = regret > 0.05 or order < wanted
        missed += wrong
        error = fmean(abs(row.error) for row in group)
        print(
            f"vTrain, {group[0].group[0]} GPUs, {len(group)} layouts, same two numbers: regret {regret:.1%} "
            f"(wanted 5 %), order {order:.2f} (wanted {wanted}), mean error {error:.0%}: {_mark(wrong)}"
        )
    return missed
