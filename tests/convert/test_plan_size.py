"""A large plan stays small: 1,024 rows of 4,096 micro-batches in less than 1 MB of canonical JSON."""

import pytest

from penstock.convert import from_plan, to_plan, to_problem
from penstock.schemas.plan import Plan
from penstock.schemas.request import PlanRequest
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Stage, single_pipeline
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.schedules.early_backward import early_backward

STAGES, MICRO_BATCHES = 1024, 4096


@pytest.mark.tier("nightly")
def test_a_plan_of_1024_rows_and_4096_micro_batches_is_below_1_mb() -> None:
    tensor = {"name": "x", "bytes_per_sample": 4, "gradient_bytes_per_sample": 4}
    layer = {"forward_ns": 100, "backward_ns": 200, "stash_bytes": 8}
    request = PlanRequest.parse(
        {
            "profile": {
                "name": "deep",
                "layers": [{"name": f"l{i}", "parameter_bytes": 10} for i in range(STAGES)],
                "boundaries": [[tensor]] * (STAGES - 1),
                "measurements": [{"device_kind": "V100", "micro_batch_size": 1, "layers": [layer] * STAGES}],
                "source": {"method": "imported", "expected_error": 0.1},
            },
            "topology": {
                "name": "c",
                "uniform": {
                    "nodes": STAGES // 8,
                    "devices_per_node": 8,
                    "kind": "V100",
                    "memory_bytes": 10**9,
                    "fabric": {"bandwidth_bytes_per_s": 10**12},
                    "nic": {"bandwidth_bytes_per_s": 10**12},
                },
            },
            "global_batch_size": MICRO_BATCHES,
            "network": {"sharing": "private", "channel": "full"},
        }
    )
    problem = to_problem(request)
    allocation = single_pipeline(tuple(Stage(s, s, (s,)) for s in range(STAGES)), MICRO_BATCHES)
    orders = early_backward(problem, allocation, warmup=(8,) * STAGES)
    candidate = JudgedPlan.of("mine", allocation, orders, simulate(problem, allocation, orders))
    plan = to_plan(problem, request, candidate, ())
    text = plan.canonical_json()
    assert len(text) < 1_000_000
    again = Plan.parse_json(text)
    assert again == plan
    read, schedule = from_plan(again, problem)
    assert read == allocation
    kept = {device: row.operations.tobytes() for row in schedule.rows for device in row.devices}
    assert kept == {device: row.operations.tobytes() for row in orders.rows for device in row.devices}
