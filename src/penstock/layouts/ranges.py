"""Plain JSON of layer ranges, for a user's own trainer: each stage's layers and devices, and the order's name."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from penstock.importers.lines import Faults
from penstock.layouts.drawn import Drawn, Reading, wrong
from penstock.layouts.layout_text import ModelUnsaid, Source
from penstock.schemas.errors import Fault, InvalidDocument, UnsupportedRequest
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.schedules.early_backward import early_backward
from penstock.solvers.schedules.interleaved import group_of
from penstock.solvers.schedules.trainer_orders import TRAINED, order_of

KEYS = ("layers", "names", "devices", "recompute", "schedule", "group", "warmup", "num_micro_batches",
        "micro_batch_size", "global_batch_size", "plan")  # fmt: skip


def write(problem: Problem, allocation: Allocation, orders: Orders, plan_hash: str) -> str:
    """Write all stages of one pipeline. Raises UnsupportedRequest for several pipelines."""
    if len(allocation.pipelines) > 1:
        raise UnsupportedRequest(
            f"ranges of layers describe one pipeline; the plan has {len(allocation.pipelines)}",
            remedy="export the whole plan: penstock export PLAN --to plan",
        )
    stages = allocation.stages
    data = {
        "plan": plan_hash,
        "global_batch_size": problem.global_batch_size,
        "num_micro_batches": allocation.num_micro_batches,
        "micro_batch_size": -(-problem.global_batch_size // allocation.num_micro_batches),
        "schedule": orders.name,
        "group": group_of(allocation, orders) if orders.name == "interleaved" else None,
        "warmup": list(orders.warmup) or None,
        "layers": [[stage.first, stage.last] for stage in stages],
        "names": [[problem.layer_names[layer] for layer in range(s.first, s.last + 1)] for s in stages],
        "devices": [[problem.devices[d].name for d in stage.devices] for stage in stages],
        "recompute": [[list(segment) for segment in stage.recompute] for stage in stages],
    }
    lines = [f" {json.dumps(key)}: {_row(value)}" for key, value in data.items() if value is not None]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _row(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n" + ",\n".join(f"  {json.dumps(each, ensure_ascii=False)}" for each in value) + "\n ]"
    return json.dumps(value, ensure_ascii=False)


class RangesText(ModelUnsaid):
    """JSON of one pipeline's ranges."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        try:
            data = json.loads(source.text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise InvalidDocument(f"{source.name} is not valid JSON: {error}") from None
        if not isinstance(data, dict) or "layers" not in data:
            raise InvalidDocument(f"{source.name} has no layers", remedy='{"layers": [[0, 12], [13, 25]]}')
        self._data = data

    def batch(self, gpus: int | None = None) -> int | None:
        """Return the batch."""
        stated = self._data.get("global_batch_size")
        return stated if isinstance(stated, int) and stated > 0 else None

    def drawn(self, reading: Reading) -> Drawn:
        """Raise InvalidDocument: ranges are the stages of a plan, and of no trainer."""
        raise InvalidDocument(f"{self.source.name} has ranges of layers, which belong to no trainer")

    def stages(self, problem: Problem) -> tuple[Allocation, Orders]:
        """Return the stages on their devices, else on all as evenly as can be; under 1F1B where no order is named."""
        return _stages(self._data, self.source.name, problem)


def _stages(data: dict[str, Any], source: str, problem: Problem) -> tuple[Allocation, Orders]:
    faults = Faults(source)
    for name in sorted(set(data) - set(KEYS)):
        faults.add(None, f"a layout has no {name!r}; it has {', '.join(KEYS)}")
    ranges = _pairs(data["layers"], "layers", faults)
    faults.stop()
    for s, ((_a, last), (first, _b)) in enumerate(pairwise([(0, -1), *ranges])):
        if first != last + 1 or ranges[s][1] < first:
            faults.add(None, f"stage {s} holds layers {list(ranges[s])}, but layer {last + 1} is the next")
    if ranges[-1][1] != problem.num_layers - 1:
        faults.add(None, f"the stages end with layer {ranges[-1][1]}; the last one is {problem.num_layers - 1}")
    devices = _devices(data.get("devices"), len(ranges), problem, faults)
    again = data.get("recompute", [[]] * len(ranges))
    if not isinstance(again, list) or len(again) != len(ranges):
        faults.add(None, f"recompute says nothing of {len(ranges)} stages")
    faults.stop()
    recompute = [tuple(_pairs(each, "recompute", faults)) for each in again]
    number = _count(data, problem, faults)
    faults.stop()
    stages = tuple(
        Stage(first, last, stage_devices, "rows", segments)
        for (first, last), stage_devices, segments in zip(ranges, devices, recompute, strict=True)
    )
    allocation = single_pipeline(stages, number)
    return allocation, _order(problem, allocation, data)


def _pairs(value: Any, name: str, faults: Faults) -> list[tuple[int, int]]:
    if not isinstance(value, list) or (name == "layers" and not value):
        faults.add(None, f"{name} is no list of [first, last]")
        return []
    pairs = []
    for each in value:
        plain = isinstance(each, list) and len(each) == 2
        if not plain or any(isinstance(n, bool) or not isinstance(n, int) or not 0 <= n < 10**9 for n in each):
            faults.add(None, f"{name}: {json.dumps(each)[:60]} is no [first, last]")
        else:
            pairs.append((each[0], each[1]))
    return pairs


def _devices(value: Any, stages: int, problem: Problem, faults: Faults) -> list[tuple[int, ...]]:
    number_of = {device.name: d for d, device in enumerate(problem.devices)}
    if value is None:
        share, more = divmod(problem.num_devices, stages)
        if not share:
            faults.add(None, f"{stages} stages need {stages} devices; there are {problem.num_devices}")
        starts = [s * share + min(s, more) for s in range(stages + 1)]
        return [tuple(range(a, b)) for a, b in pairwise(starts)]
    if (
        not isinstance(value, list)
        or len(value) != stages
        or not all(isinstance(names, list) and names for names in value)
    ):
        faults.add(None, f"devices is no list of the device names of each of {stages} stages")
        return []
    unknown = [name for names in value for name in names if not isinstance(name, str) or name not in number_of]
    if unknown:
        faults.add(None, f"the topology has no device {unknown[0]!r}; one is called {problem.devices[0].name!r}")
        return []
    return [tuple(number_of[name] for name in names) for names in value]


def _count(data: dict[str, Any], problem: Problem, faults: Faults) -> int:
    whole = problem.global_batch_size
    for name in ("num_micro_batches", "micro_batch_size", "global_batch_size"):
        value = data.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= whole):
            faults.add(None, f"{name} is {value!r}, not a whole number from 1 to {whole}")
    faults.stop()
    if data.get("global_batch_size", whole) != whole:
        faults.add(None, f"global_batch_size is {data['global_batch_size']}, that of the request {whole}")
    number = data.get("num_micro_batches")
    return int(number if number is not None else -(-whole // data.get("micro_batch_size", whole)))


def _order(problem: Problem, allocation: Allocation, data: dict[str, Any]) -> Orders:
    looped = len({stage.devices for stage in allocation.stages}) < len(allocation.stages)
    name = data.get("schedule", "interleaved" if looped else "early-backward")
    warmup = data.get("warmup")
    if name == "early-backward" and warmup is not None:
        counts = isinstance(warmup, list) and all(isinstance(k, int) and not isinstance(k, bool) for k in warmup)
        if not counts:
            raise wrong("warmup is not a list of numbers", where="/warmup")
        return early_backward(problem, allocation, warmup=warmup)
    if name not in TRAINED:
        raise InvalidDocument(
            f"schedule {name!r} cannot be built from its name alone",
            faults=(Fault("/schedule", str(name)),),
            remedy=f"one of {', '.join(TRAINED)}, or the plan itself",
        )
    group = data.get("group")
    if group is not None and (isinstance(group, bool) or not isinstance(group, int) or group < 1):
        raise wrong(f"group is {group!r}, not a whole number of at least 1", where="/group")
    return order_of(problem, allocation, str(name), group)
