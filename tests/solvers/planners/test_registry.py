"""The tables of algorithms: their descriptions, and refusals of unknown names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import get_args

import pytest
from problems import make_problem

from penstock.schemas.errors import InvalidDocument, InvalidPlan, UnsupportedRequest
from penstock.solvers.grid.block_partition import block_partition
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.micro_batches import candidates
from penstock.solvers.model.options import Option, checked
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.model.update_rules import UpdateRule
from penstock.solvers.planners.catalogue import PLANNERS, Planner, refuse_untried, resolve
from penstock.solvers.planners.proposal import Proposal
from penstock.solvers.planners.setting import Setting
from penstock.solvers.planners.simple.dp import data_parallel
from penstock.solvers.schedules.catalogue import SCHEDULES, Parts, ScheduleRow
from penstock.solvers.schedules.interleaved import looped_bfs
from penstock.solvers.schedules.support.candidates import candidate_schedules
from penstock.solvers.schedules.v_shape import zb_v
from penstock.solvers.schedules.zero_bubble import zb_h1
from penstock.solvers.solve.driver import solve
from penstock.solvers.solve.tasks import tasks_for

pytestmark = pytest.mark.tier("ci")

OPTIONS = (
    Option("by", "time", "help", choices=("time", "layers")),
    Option("stages", 0, "help", low=0, high=9),
    Option("slack", 0.5, "help"),
    Option("strict", False, "help"),
)


def test_tables_describe_themselves() -> None:
    assert next(iter(PLANNERS)) == "auto"
    for name, planner in PLANNERS.items():
        assert planner.name == name
        assert planner.cites
        assert planner.help
        assert planner.supports & set(get_args(UpdateRule))
        assert set(planner.accepts) <= set(SCHEDULES)
        assert all(SCHEDULES[schedule].supports & planner.supports for schedule in planner.accepts)
    for entry in SCHEDULES.values():
        assert entry.cites
        assert entry.help
        assert callable(entry.build)
    settings = (
        *(row.parameters for row in SCHEDULES.values()),
        *(planner.options for planner in PLANNERS.values()),
    )
    for options in settings:
        assert len({option.name for option in options}) == len(options)
        assert all(option.help and option.fault(option.default) is None for option in options)


def test_every_update_rule_has_a_planner_and_every_schedule_too() -> None:
    assert {rule for planner in PLANNERS.values() for rule in planner.supports} >= set(get_args(UpdateRule))
    alone = {schedule for name, planner in PLANNERS.items() if name != "auto" for schedule in planner.accepts}
    assert alone == set(SCHEDULES)


def test_what_needs_another_update_rule_is_refused() -> None:
    problem = make_problem([1, 1])
    with pytest.raises(UnsupportedRequest, match="double_buffered only; the request allows synchronous") as refused:
        solve(problem, "madpipe")
    assert "--update-rule double_buffered" in (refused.value.remedy or "")
    with pytest.raises(UnsupportedRequest, match="'eager' is for the update rule weight_stashing") as refused:
        solve(problem, "pipedream", schedule="eager")
    assert "--update-rule weight_stashing" in (refused.value.remedy or "")


def test_unknown_planners_name_the_near_ones() -> None:
    assert resolve("dapple") is PLANNERS["dapple"]
    with pytest.raises(UnsupportedRequest, match="no planner 'dapples'; there are auto, dp") as refused:
        resolve("dapples")
    assert refused.value.remedy == "did you mean 'dapple'?"
    with pytest.raises(UnsupportedRequest) as refused:
        resolve("zzz")
    assert refused.value.remedy is None


@pytest.mark.tier("quick")
def test_option_types() -> None:
    assert [option.type for option in OPTIONS] == ["string", "integer", "number", "boolean"]
    assert checked("x", OPTIONS, {"stages": 3, "slack": 1}) == {"by": "time", "stages": 3, "slack": 1, "strict": False}


@pytest.mark.tier("quick")
@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"by": "size"}, "'size' is none of 'time', 'layers'"),
        ({"by": 1}, "1 is not of type string"),
        ({"stages": True}, "True is not of type integer"),
        ({"stages": 2.5}, "2.5 is not of type integer"),
        ({"stages": -1}, "-1 is below 0"),
        ({"stages": 10}, "10 is above 9"),
        ({"slack": "much"}, "'much' is not of type number"),
        ({"strict": 1}, "1 is not of type boolean"),
    ],
)
def test_wrong_values_are_refused_with_their_place(values: dict[str, object], fault: str) -> None:
    with pytest.raises(InvalidDocument) as refused:
        checked("x", OPTIONS, values)
    (refusal,) = refused.value.faults
    assert (refusal.pointer, refusal.detail) == (f"/options/{next(iter(values))}", fault)


def test_unknown_options_are_refused_before_anything_is_solved() -> None:
    problem = make_problem([1, 1])
    with pytest.raises(UnsupportedRequest, match="'dp' has no option 'overlp'; it has overlap") as refused:
        solve(problem, "dp", options={"overlp": "yes"})
    assert refused.value.remedy == "did you mean 'overlap'?"
    with pytest.raises(InvalidDocument):
        solve(problem, "dapple", options={"paper": 0})


@pytest.mark.parametrize(("paper", "warmup", "value_ns"), [(True, (2, 1), 278), (False, (3, 1), 272)])
def test_dapple_chooses_the_warm_up_by_the_ratio_as_the_paper_does(
    paper: bool, warmup: tuple[int, ...], value_ns: int
) -> None:
    """Weights so large that two stages are best; the deeper warm-up, against which the ratio advises, is faster."""
    problem = make_problem([5] * 4, boundary_bytes=1, parameter_bytes=300, nodes=(2,), global_batch_size=8)
    best = solve(problem, "dapple", options={"paper": paper}).best
    assert best is not None
    assert isinstance(best.schedule, Orders)
    assert (best.schedule.warmup, best.value_ns) == (warmup, value_ns)
    assert [stage.devices for stage in best.allocation.stages] == [(0,), (1,)]


def test_a_schedule_that_does_not_exist_is_refused_wherever_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name may be in a planner's row or in a proposal, in ``auto`` too; it never becomes another schedule."""
    problem = make_problem([3, 3, 3, 3])

    def proposals(setting: Setting, options: Mapping[str, object]) -> Iterator[Proposal]:
        yield Proposal(data_parallel(problem, candidates(problem)[0]), ("gpipes",))

    with pytest.raises(UnsupportedRequest, match="no schedule 'gpipes'; there are early-backward, pe") as refused:
        Planner("named", proposals, "nobody", "wrong", ("gpipes",))
    assert refused.value.remedy == "did you mean 'gpipe'?"
    monkeypatch.setitem(PLANNERS, "proposing", Planner("proposing", proposals, "nobody", "wrong"))

    def bare(setting: Setting, options: Mapping[str, object]) -> Iterator[Proposal]:
        yield Proposal(data_parallel(problem, candidates(problem)[0]), ("zb-h1",))

    monkeypatch.setitem(PLANNERS, "bare", Planner("bare", bare, "nobody", "wrong", ("zb-h1",)))
    with pytest.raises(InvalidPlan, match="'bare' proposes schedule 'zb-h1', which does not order arbitrary stages"):
        solve(problem, "bare")
    others = ",".join(name for name in PLANNERS if name not in ("auto", "proposing"))
    for name, options in (("proposing", {}), ("auto", {"exclude": others})):
        with pytest.raises(InvalidPlan, match="'proposing' proposes what there is not: no schedule 'gpipes'; there"):
            solve(problem, name, options=options)


def test_a_schedule_that_does_not_order_some_stages_is_left_out_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request for the schedule by name gets the reason; beside other schedules nothing is lost."""
    problem = make_problem([3, 3, 3, 3])

    def picky(problem: Problem, allocation: Allocation) -> Orders:
        raise UnsupportedRequest("it takes an odd number of stages")

    usual = solve(problem, "auto").best
    monkeypatch.setitem(SCHEDULES, "picky", ScheduleRow("picky", picky, "nobody", "none", tried_with=("dapple",)))
    assert usual is not None
    for name in ("auto", "dapple"):
        assert "picky" in PLANNERS[name].accepts
        result = solve(problem, name, schedule="picky")
        assert result.best is None
        assert "it takes an odd number of stages" in result.sentence
    beside = solve(problem, "auto").best
    assert beside is not None
    assert (beside.value_ns, beside.allocation) == (usual.value_ns, usual.allocation)


@pytest.mark.tier("quick")
def test_only_schedules_for_any_stages_are_drafted() -> None:
    problem = make_problem([3, 3, 3, 3])
    allocation = block_partition(problem, candidates(problem)[0], 2)
    seen = 0
    for row in SCHEDULES.values():
        orders = [
            candidate.orders(problem, allocation)
            for candidate in candidate_schedules(problem, allocation, row.name, "best")
        ]
        assert bool(orders) == row.for_any_stages
        assert all(each.name.startswith(row.orders_of or row.name) for each in orders)
        seen += len(orders)
    assert seen > 8
    with pytest.raises(UnsupportedRequest, match="no schedule 'zero-bubbel'"):
        candidate_schedules(problem, allocation, "zero-bubbel", "best")


def test_a_schedule_with_split_backwards_is_no_reason_to_spare_a_planner() -> None:
    """A bound on whole backwards does not cover such a schedule's plans of the planner's stages."""
    problem = make_problem([3, 3, 3, 3])

    def options_of_tasks() -> dict[str, object]:
        tasks = tasks_for(Setting(problem), [PLANNERS["dapple"], PLANNERS["spp"]])
        return {task.name: task.makes for task in tasks}

    before = options_of_tasks()
    assert before["dapple"] is not None
    split = ScheduleRow("split", zb_h1, "nobody", "none", split=True, tried_with=("dapple",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SCHEDULES, "split", split)
        after = options_of_tasks()
    assert after["dapple"] is None
    assert after["spp"] == before["spp"]


@pytest.mark.tier("quick")
def test_a_schedule_names_planners_that_try_it(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = (
        ("any", "dappel", "no planner 'dappel'; there are auto"),
        (
            "any",
            "zero-bubble",
            "never tries schedule 'new' for parts 'any'; it tries schedules for line, v, own",
        ),
        ("v", "dapple", "'dapple' never tries schedule 'new' for parts 'v'; it tries schedules for any"),
        ("any", "madpipe", "it tries schedules for no parts"),
    )
    refuse_untried()
    for parts, planner, words in wrong:
        row = ScheduleRow("new", zb_h1, "nobody", "none", parts=parts, tried_with=(planner,))
        monkeypatch.setitem(SCHEDULES, "new", row)
        with pytest.raises(UnsupportedRequest, match=words):
            refuse_untried()


@pytest.mark.cases(2)
@pytest.mark.parametrize(("parts", "planner"), [("line", "zero-bubble"), ("v", "zero-bubble"), ("loop", "interleaved")])
def test_planners_of_parts_try_what_names_them(parts: Parts, planner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner that lays out parts tries a new schedule for them unasked, and it may be requested."""
    build = {"line": zb_h1, "v": zb_v, "loop": looped_bfs}[parts]
    built: list[Allocation] = []

    def another(problem: Problem, allocation: Allocation) -> Orders:
        built.append(allocation)
        return replace(build(problem, allocation), name="another")

    row = ScheduleRow("another", another, "nobody", "none", parts=parts, tried_with=(planner,))
    monkeypatch.setitem(SCHEDULES, "another", row)
    problem = make_problem([3, 5, 4, 6], boundary_bytes=1, nodes=(2,))
    assert solve(problem, planner).best is not None
    assert built
    plan = solve(problem, planner, schedule="another").best
    assert plan is not None
    assert plan.schedule.name == "another"
