"""Plans with degrees as documents: what is written is read again, and what is no plan of its request is a fault."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from small_request import GATHER, with_degrees

from penstock.convert import from_plan, to_plan, to_problem
from penstock.planning.judge import judge
from penstock.planning.programs.lower import programs
from penstock.questions.solve import solve
from penstock.schemas.coverage import OVER_ALL, model_of
from penstock.schemas.errors import InvalidDocument, InvalidPlan
from penstock.schemas.plan import Plan, PlanFile
from penstock.schemas.request import PlanRequest
from penstock.schemas.transformers import degrees as wire_degrees
from penstock.solvers.bounds.coverage import allowed
from penstock.solvers.costs.stage import stage_costs
from penstock.solvers.degrees.contract import contract
from penstock.solvers.model import degrees as solver_degrees
from penstock.solvers.model.degrees import Choice, Degrees
from penstock.solvers.model.problem import Problem
from penstock.solvers.solve import driver

pytestmark = pytest.mark.tier("ci")


def planned(request: PlanRequest, planner: str = "dapple", choice: Choice = Choice(Degrees(tensor=2))) -> Plan:
    """Plan at a choice."""
    cells = contract(to_problem(request), choice)
    result = driver.solve(cells, planner, max_plans=6)
    assert result.best is not None
    return to_plan(cells, request, result.best, result.bounds)


def again(plan: Plan, **changes: Any) -> Plan:
    """Return the plan as it is stored, with changes."""
    return Plan.parse(json.loads(plan.canonical_json()) | changes)


def unjudged(plan: Plan, devices: list[list[str]]) -> Plan:
    """Return the plan with other GPUs in its stages, as if it were changed by hand."""
    data = json.loads(plan.canonical_json())
    stages = data["pipelines"][0]["stages"]
    assert len(stages) == len(devices)
    for stage, names in zip(stages, devices, strict=True):
        stage["devices"] = names
    rows = [{"devices": sorted({names[0] for names in devices}), "text": data["schedule"]["rows"][0]["text"]}]
    data["schedule"]["rows"] = rows if len(devices) == 1 else data["schedule"]["rows"]
    return Plan.parse({name: value for name, value in data.items() if name not in ("prediction", "certificates")})


@pytest.mark.parametrize("planner", ["dp", "gpipe", "dapple", "interleaved"])
@pytest.mark.parametrize("sharding", [None, "optimizer"])
def test_a_plan_is_read_as_it_was_written(planner: str, sharding: str | None) -> None:
    changes = {} if sharding is None else {"sharding": sharding}
    request = with_degrees(**changes)
    choice = Choice(Degrees(tensor=2), sharding)  # type: ignore[arg-type]
    cells = contract(to_problem(request), choice)
    best = driver.solve(cells, planner, max_plans=6).best
    assert best is not None
    plan = to_plan(cells, request, best, ())
    assert (plan.degrees is not None, plan.sharding) == (True, sharding)
    allocation, schedule = from_plan(again(plan), cells)
    assert allocation == best.allocation
    assert again(plan) == plan
    rows = {d: row.operations.tolist() for row in schedule.rows for d in row.devices}  # type: ignore[union-attr]
    expected = {d: row.operations.tolist() for row in best.schedule.rows for d in row.devices}  # type: ignore[union-attr]
    assert rows == expected


def test_a_stage_names_every_gpu_of_its_replicas() -> None:
    plan = planned(with_degrees(), "dp")
    (stage,) = plan.pipelines[0].stages
    assert stage.devices == ("a/0", "a/1", "b/0", "b/1")
    assert [row.devices for row in plan.schedule.rows] == [("a/0", "b/0")]
    assert plan.prediction is not None
    assert [each.device for each in plan.prediction.devices] == ["a/0", "b/0"]


@pytest.mark.parametrize(
    ("devices", "named"),
    [
        (["a/1", "a/0"], "a/1, a/0"),
        (["a/0"], "a/0"),
        (["a/1", "b/0"], "a/1, b/0"),
        (["a/0", "a/0"], "a/0, a/0"),
        (["a/0", "a/1", "b/0"], "b/0"),
        (["a/0", "b/0", "a/1", "b/1"], "a/0, b/0"),
        (["c/0", "c/1"], "c/0, c/1"),
    ],
)
def test_gpus_that_are_no_replica_are_a_fault(devices: list[str], named: str) -> None:
    """In another order, too few, of two replicas, twice the same, some left over, interleaved, unknown."""
    request = with_degrees()
    plan = unjudged(planned(request, "dp"), [devices])
    with pytest.raises(InvalidPlan) as raised:
        from_plan(plan, contract(to_problem(request), Choice(Degrees(tensor=2))))
    (fault,) = raised.value.faults
    assert fault.pointer == "/pipelines/0/stages/0/devices"
    assert fault.detail.endswith(f"needs 2 neighbouring GPUs in the topology's order, unlike {named}")
    judgement = judge(PlanFile(plan=plan, request=request))
    assert any(fault.pointer in each for each in judgement.faults)


# ---- a plan and the choices of its request ---------------------------------------------------------------------------


def faults(request: PlanRequest, plan: Plan) -> tuple[str, ...]:
    """Return the judge's faults."""
    return judge(PlanFile(plan=plan, request=request)).faults


def test_the_answer_to_a_request_has_no_fault() -> None:
    """Its first certificate covers every choice."""
    for changes in ({}, {"sharding": "auto"}, {"degrees": [{"tensor": 2}, {}], "sharding": ["optimizer", "none"]}):
        request = with_degrees(planner="dapple", termination={"max_plans": 6}, **changes)
        plan = solve(request).plan
        assert plan is not None
        assert faults(request, plan) == ()
        first = plan.certificates[0]
        assert first.scope == "all plans of this request"
        names = [f"{each} {OVER_ALL}" if each.in_one_stage else str(each) for each in to_problem(request).choices]
        assert first.covers.degrees == tuple(sorted(names))


def test_a_shared_stage_that_leaves_a_kind_over_is_still_one_of_all_gpus() -> None:
    """No GPU of the kind `fast` is in a cell: without them, cells would be others."""
    nodes = [
        {"name": name, "devices": [{"id": f"{name}/0", "kind": kind, "memory_bytes": 3000}]}
        for name, kind in (("a", "V100"), ("b", "fast"), ("c", "V100"), ("d", "V100"))
    ]
    links = [{"a": name, "b": "s", "bandwidth_bytes_per_s": 10} for name in "abcd"]
    kinds = [{"name": "fast", "scale_from": "V100", "speed": 2.0}]
    (variant,) = with_degrees().model_dump(mode="json", exclude_none=True)["profile"]["variants"]
    request = with_degrees(
        profile={"variants": [variant | {"degrees": {"context": 2}}]},
        topology={"nodes": nodes, "switches": ["s"], "links": links, "kinds": kinds},
        sharding="gradients",
        network={"overlap_all_reduce": True},
    )
    plan = planned(request, "dp", Choice(Degrees(context=2), "gradients"))
    assert faults(request, unjudged(plan, [["c/0", "d/0"]])) == ()


def test_a_plan_at_a_choice_that_is_not_allowed_is_a_fault() -> None:
    plan = planned(with_degrees())
    only = with_degrees(degrees={"tensor": 1})
    assert faults(only, plan) == ("The plan is at tensor 2; the request allows degrees of 1 with nothing sharded.",)
    silent = with_degrees(degrees=None)
    assert faults(silent, plan) == ("The plan is at tensor 2; the request allows degrees of 1 with nothing sharded.",)
    shared = with_degrees(sharding="optimizer")
    assert faults(shared, plan) == (
        "The plan is at tensor 2; the request allows tensor 1, optimizer sharded; tensor 2, optimizer sharded.",
    )
    without = again(planned(silent, choice=Choice()), degrees=None)
    (sentence,) = faults(with_degrees(), without)
    assert sentence == "The plan does not say its degrees; the request allows tensor 1; tensor 2."


@pytest.mark.tier("quick")
def test_degrees_that_the_profile_does_not_know_are_a_fault_of_the_request() -> None:
    with pytest.raises(InvalidDocument, match="has no costs at tensor 4") as raised:
        to_problem(with_degrees(degrees=[{"tensor": 4}, {"tensor": 2}]))
    assert [fault.pointer for fault in raised.value.faults] == ["/degrees"]
    assert "costs at: tensor 1, 2" in str(raised.value.remedy)


def covering(plan: Plan, *choices: str) -> Plan:
    """Return the plan with a first certificate that covers these choices alone."""
    first, *others = plan.certificates
    covers = first.covers.model_copy(update={"degrees": choices})
    altered = first.model_copy(update={"covers": covers, "model": model_of(first.scope, covers.covers())})
    return Plan.parse(json.loads(plan.model_copy(update={"certificates": (altered, *others)}).canonical_json()))


def answered() -> tuple[PlanRequest, Plan]:
    """Return a request that leaves the degrees open, and the plan that answers it."""
    request = with_degrees(planner="dapple", termination={"max_plans": 6})
    plan = solve(request).plan
    assert plan is not None
    assert plan.degrees is not None
    assert plan.degrees.tensor == 2
    return request, plan


def test_a_certificate_above_the_plans_time_is_no_document() -> None:
    _request, plan = answered()
    data = json.loads(plan.canonical_json())
    assert plan.prediction is not None
    data["certificates"][0]["bound_ns"] = plan.prediction.time_per_global_batch_ns + 1
    with pytest.raises(InvalidDocument, match="above the plan's own time"):
        Plan.parse(data)


def test_a_certificate_of_another_choice_is_a_fault() -> None:
    request, plan = answered()
    assert faults(request, covering(plan, "tensor 1", "tensor 2")) == ()
    (fault,) = faults(request, covering(plan, "tensor 1"))
    assert fault.startswith("Certificate 0 does not cover every plan of the request, as it says")


def test_a_certificate_of_one_choice_does_not_cover_the_request() -> None:
    request, plan = answered()
    (fault,) = faults(request, covering(plan, "tensor 2"))
    assert fault.startswith("Certificate 0 does not cover every plan of the request, as it says")


def test_a_plan_judged_again_has_no_certificate_beyond_its_choice() -> None:
    request, plan = answered()
    judgement = judge(PlanFile(plan=plan.model_copy(update={"prediction": None}), request=request))
    assert judgement.faults == ()
    for certificate in judgement.plan.certificates:
        whole = certificate.covers.degrees == ("tensor 1", "tensor 2")
        assert whole or certificate.scope != "all plans of this request"


# ---- recomputed modules ----------------------------------------------------------------------------------------------

NORM = {"module": "norm", "forward_ns": 1, "freed_bytes": 2, "collectives": [GATHER]}
MLP = {"module": "mlp", "forward_ns": 3, "freed_bytes": 1}


def with_modules(**changes: Any) -> PlanRequest:
    """Return the request with modules in its layers."""
    request = json.loads(with_degrees(**changes).canonical_json())
    for layer in request["profile"]["variants"][0]["measurements"][0]["layers"]:
        layer["modules"] = [NORM, MLP]
    return PlanRequest.parse(request)


def recomputing(plan: Plan, recompute: object) -> Plan:
    """Return the plan as a user's own plan whose stages recompute so."""
    data = json.loads(plan.canonical_json())
    for stage in data["pipelines"][0]["stages"]:
        stage["recompute"] = recompute
    return Plan.parse({name: value for name, value in data.items() if name not in ("prediction", "certificates")})


def test_modules_are_read_as_they_were_written_in_their_order() -> None:
    request = with_modules()
    cells = contract(to_problem(request), Choice(Degrees(tensor=2)))
    plan = recomputing(planned(request, "dp"), {"modules": ["norm", "mlp"]})
    allocation, _schedule = from_plan(plan, cells)
    assert [stage.modules for stage in allocation.stages] == [("mlp", "norm")]
    judgement = judge(PlanFile(plan=plan, request=request))
    assert judgement.faults == ()
    assert judgement.timeline is not None
    # Of four layers with 2 samples on each replica: B 12 and norm 1, mlp 3, and the gather of 6 bytes, exposed.
    (stage,) = allocation.stages
    costs = stage_costs(cells, stage, 4)
    gather = inner_gather_ns(cells)
    assert (costs.backward_ns, costs.recompute_ns) == (4 * 12, 4 * (1 + 3 + gather))
    assert (costs.kept_bytes, costs.workspace_bytes) == (4 * (4 - 3), 1 + 3)


def inner_gather_ns(cells: Problem) -> int:
    """Return the time of the gather, which the third layer's forward has once more than the others."""
    forward = cells.costs(cells.devices[0].kind, 2).forward_ns
    return int((forward[3] - forward[2]) - (forward[2] - forward[1]))


def test_modules_without_costs_are_a_fault() -> None:
    request = with_modules()
    plan = recomputing(planned(request, "dp"), {"modules": ["mlp", "attention"]})
    fault = judge(PlanFile(plan=plan, request=request)).faults[-1]
    assert "/pipelines/0/stages/0/recompute" in fault
    assert "no costs of recomputing attention at tensor 2; it has costs of recomputing mlp, norm" in fault
    single = planned(with_degrees(), "dp")
    fault = judge(PlanFile(plan=recomputing(single, {"modules": ["norm"]}), request=with_degrees())).faults[-1]
    assert "no costs of recomputing norm at tensor 2; it has costs for no module" in fault


@pytest.mark.parametrize("recompute", [{"modules": []}, {"modules": ["norm", "norm"]}, {"modules": ["core_attn"]}, {}])
def test_what_is_no_set_of_modules_is_refused(recompute: object) -> None:
    with pytest.raises(InvalidDocument):
        recomputing(planned(with_degrees(), "dp"), recompute)


def test_a_request_with_modules_covers_them() -> None:
    request = with_modules(planner="dapple", termination={"max_plans": 4})
    plan = solve(request).plan
    assert plan is not None
    assert faults(request, plan) == ()
    covers = plan.certificates[0].covers
    assert covers.recompute_modules == ("none", "some")
    never = with_modules(planner="dapple", termination={"max_plans": 4}, recompute="never")
    assert allowed(to_problem(never)).recompute_modules == {"none"}


def test_programs_name_the_modules_that_stages_recompute() -> None:
    request = with_modules()
    file = PlanFile(plan=recomputing(planned(request, "dp"), {"modules": ["norm"]}), request=request)
    assert {stage.modules for program in programs(file) for stage in program.stages} == {("norm",)}


@pytest.mark.tier("quick")
def test_documents_and_solvers_have_the_same_words() -> None:
    """Solvers import no documents, so they name modules, shardings and operations themselves."""
    for name in ("Module", "Sharding", "Operation"):
        assert get_args(getattr(solver_degrees, name)) == get_args(getattr(wire_degrees, name))
    assert solver_degrees.WITHIN == wire_degrees.WITHIN
