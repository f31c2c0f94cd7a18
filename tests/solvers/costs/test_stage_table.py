"""``costs.stage_table`` and ``costs.device_line`` give for every stage what ``costs`` gives for that stage alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from problems import make_problem

from penstock.solvers.costs.collectives import all_reduce_ns
from penstock.solvers.costs.memory import activation_bytes, static_bytes, transient_bytes, weight_bytes
from penstock.solvers.costs.stage import stage_costs, update_ns
from penstock.solvers.costs.tables.device_line import affine_all_reduce, affine_transfer
from penstock.solvers.costs.tables.stage_table import StageTable, cut_places, layer_sums
from penstock.solvers.costs.transfer import transfer
from penstock.solvers.model.allocation import Stage, single_pipeline
from penstock.solvers.model.micro_batches import largest_slice
from penstock.solvers.model.problem import Problem

ROWS = 6


def _problem(seed: int, **changes: Any) -> Problem:
    draw = np.random.default_rng(seed)
    settings: dict[str, Any] = {
        "boundary_bytes": draw.integers(0, 90, 4).tolist(),
        "backward_bytes": draw.integers(0, 90, 4).tolist(),
        "parameter_bytes": (parameters := draw.integers(9, 900, 5)).tolist(),
        "trainable_bytes": (parameters // draw.integers(1, 3, 5)).tolist(),
        "stash_bytes": draw.integers(0, 500, 5).tolist(),
        "workspace_bytes": draw.integers(0, 500, 5).tolist(),
        "update_ns": draw.integers(0, 50, 5).tolist(),
        "state_factor": 3,
        "cuttable": [True, False, True, True],
        "kinds": ["cpu", "old", "cpu", "old"],
        "speed": {"old": 0.7},
        "nodes": (2, 2),
        "shared_parameters": (("tied", (3, 0), 7), ("both", (1, 2), 5)),
    }
    return make_problem(draw.integers(1, 1000, 5).tolist(), **(settings | changes))


VARIANTS: list[dict[str, Any]] = [{}, {"shard_states": True}, {"count_buffers": False}]


@pytest.mark.parametrize("changes", VARIANTS)
@pytest.mark.parametrize("devices", [(0,), (1,), (0, 1), (0, 1, 2)])
def test_a_table_has_what_each_stage_costs_alone(devices: tuple[int, ...], changes: dict[str, Any]) -> None:
    problem = _problem(len(devices), **changes)
    places = cut_places(problem)
    kinds = sorted({problem.devices[d].kind for d in devices})
    table = StageTable(problem, kinds, largest_slice(ROWS, len(devices)), places, len(devices))
    for i, j in combinations(range(len(places)), 2):
        stage = Stage(int(places[i]), int(places[j]) - 1, devices)
        again = replace(stage, recompute=((stage.first, stage.last),))
        alone = stage_costs(problem, stage, ROWS)
        assert alone[:2] == (table.forward_ns[i, j], table.backward_ns[i, j])
        assert (alone.kept_bytes, alone.workspace_bytes) == (table.kept_bytes[i, j], table.workspace_bytes[i, j])
        assert update_ns(problem, stage) == table.update_ns[i, j]
        assert static_bytes(problem, stage).total == table.static.total[i, j]
        needs = tuple(int(each[i, j]) for each in (table.static.parameters, table.static.trainable, table.static.owned))
        assert weight_bytes(problem, stage) == needs
        for number, one in enumerate((stage, again)):
            needs = static_bytes(problem, one).total + transient_bytes(problem, one, ROWS)
            assert table.flight_bytes(bool(number))[i, j] == activation_bytes(problem, one, ROWS)
            if len(kinds) == 1:
                assert table.held_bytes(bool(number))[i, j] == needs
            else:
                assert table.held_bytes(bool(number))[i, j] >= needs


def test_a_plan_rounds_up_and_a_bound_down() -> None:
    problem = _problem(3)
    kinds, places = ("cpu", "old"), np.arange(problem.num_layers + 1)
    table = StageTable(problem, kinds, ROWS, places)
    most, least = layer_sums(problem, kinds, ROWS), layer_sums(problem, kinds, ROWS, "down")
    for i, j in combinations(places.tolist(), 2):
        each = [stage_costs(problem, Stage(i, j - 1, (device,)), ROWS).backward_ns for device in (0, 1)]
        assert least.backward_ns[j] - least.backward_ns[i] <= min(each)
        assert most.backward_ns[j] - most.backward_ns[i] >= table.backward_ns[i, j] == max(each)


@pytest.mark.parametrize(("devices", "size"), list(product([(0, 1), (0, 2), (0, 1, 2, 3)], [1, 1000, 10**7, 10**9])))
@pytest.mark.parametrize("changes", [{}, {"latency_ns": 500}, {"transfer": "nic", "inside_bytes_per_s": 7 * 10**9}])
def test_affine_costs_are_within_rounding(devices: tuple[int, ...], size: int, changes: dict[str, Any]) -> None:
    problem = _problem(5, boundary_bytes=[1, 1, size, 1], global_batch_size=ROWS, **changes)
    line = affine_all_reduce(problem, devices)
    assert abs(line.fixed_ns + line.ns_per_byte * size - all_reduce_ns(problem, size, devices)) <= 3
    source, target = devices[:1], devices[1:2]
    line = affine_transfer(problem, source, target)
    pair = single_pipeline((Stage(0, 2, source), Stage(3, 4, target)), 1)
    sent = transfer(problem, pair, 0, ROWS, 0)
    assert sent is not None
    assert abs(line.fixed_ns + line.ns_per_byte * sent.bytes - sent.duration_ns) <= 3
