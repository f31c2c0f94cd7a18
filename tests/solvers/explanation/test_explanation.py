"""Changes, what-ifs, sensitivities and layouts: every row equals another simulation of the changed request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from problems import chain, early_backward, make_network, make_problem, straight

from penstock.schemas.errors import InvalidDocument, UnsupportedRequest
from penstock.solvers.explanation.binding import binding, sensitivities
from penstock.solvers.explanation.changes import change, default_changes, link_of
from penstock.solvers.explanation.critical_path import path_of_run
from penstock.solvers.explanation.hints import hints
from penstock.solvers.explanation.idle import idle_split
from penstock.solvers.explanation.other_layout import Layout, allocation_of, compare_layout
from penstock.solvers.explanation.run import JudgedRun
from penstock.solvers.explanation.what_if import Replan, Row, headroom, retime, what_if
from penstock.solvers.judge.simulate import makespan_ns, simulate
from penstock.solvers.model.allocation import Allocation, single_pipeline
from penstock.solvers.model.problem import Pin, Problem
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.schedules.early_backward import early_backward as reordered
from penstock.solvers.solve.driver import replanned_by, solve

COSTS = [10, 20, 30, 40]


def small(**how: object) -> Problem:
    defaults: dict[str, object] = {
        "boundary_bytes": 8, "parameter_bytes": 16, "stash_bytes": 10, "update_ns": 1, "nodes": (2, 2),
        "global_batch_size": 8, "latency_ns": 2, "shared": True,
    }  # fmt: skip
    return make_problem(COSTS, **{**defaults, **how})  # type: ignore[arg-type]


def judged(problem: Problem, allocation: Allocation | None = None) -> JudgedPlan:
    allocation = allocation or chain([(2, [0, 1]), (2, [2, 3])], 4)
    orders = early_backward(allocation)
    return JudgedPlan.of("test", allocation, orders, simulate(problem, allocation, orders))


def rows_of(problem: Problem, plan: JudgedPlan, changes: Sequence[str], replan: Replan | None = None) -> Iterator[Row]:
    """Return the rows of the named changes."""
    return what_if(problem, plan, [change(problem, plan, text) for text in changes], replan)


@pytest.mark.parametrize("shared", [False, True])
def test_what_ifs_are_what_another_simulation_gives(shared: bool) -> None:
    """The changed problems are built here from scratch."""
    plan = judged(small(shared=shared))
    changes = ["bandwidth=2", "bandwidth=1/2", "latency=0", "memory=2", "speed=2", "devices=+2"]
    network = {"inside_bytes_per_s": 2 * 10**9, "between_bytes_per_s": 2 * 10**9}
    slow = {"inside_bytes_per_s": 10**9 // 2, "between_bytes_per_s": 10**9 // 2}
    same = (
        small(shared=shared, **network), small(shared=shared, **slow), small(shared=shared, latency_ns=0),
        small(shared=shared, memory_bytes=2**41), small(shared=shared, kinds=["fast"] * 4, speed={"fast": 2.0}),
        small(shared=shared, nodes=(2, 2, 2)),
    )  # fmt: skip
    rows = list(rows_of(small(shared=shared), plan, changes))
    assert [row.name for row in rows] == ["", *changes]
    for row, problem in zip(rows[1:], same, strict=True):
        same_ns = makespan_ns(problem, plan.allocation, plan.schedule)
        assert row.plan is not None
        assert row.plan.value_ns == makespan_ns(problem, row.plan.allocation, row.plan.schedule)
        assert row.plan.value_ns <= same_ns
        assert row.how == ("re-timed" if row.plan.value_ns == same_ns else "re-drafted")
        peak = max(use.memory.total for use in row.plan.timeline.uses.values())
        assert row.headroom_bytes == problem.devices[0].memory_bytes - peak


def test_fewer_devices_and_other_micro_batches_are_planned_anew() -> None:
    problem = make_problem([100] * 4, boundary_bytes=1, nodes=(1, 1), global_batch_size=8)
    plan = judged(problem, chain([(2, [0]), (2, [1])], 4))
    changes = ["devices=-1", "devices=+2", "micro-batches=2"]
    fewer, more, batches = list(rows_of(problem, plan, changes, replanned_by("relax", 10)))[1:]
    assert (fewer.how, more.how, batches.how) == ("re-planned", "re-planned", "re-drafted")
    assert fewer.plan is not None
    assert more.plan is not None
    assert batches.plan is not None
    assert {d for stage in fewer.plan.allocation.stages for d in stage.devices} == {0}
    assert fewer.plan.value_ns > plan.value_ns > more.plan.value_ns
    assert batches.plan.allocation.num_micro_batches == 8
    assert batches.plan.allocation.stages == plan.allocation.stages
    assert [row.how for row in rows_of(problem, plan, ["devices=-1"])] == ["as it is", "none"]


def test_too_little_memory_says_which_stage_lacks_how_much() -> None:
    problem = small(memory_bytes=256)
    plan = judged(problem)
    row = list(rows_of(problem, plan, ["memory=1/8"]))[1]
    assert (row.how, row.plan) == ("none", None)
    worst = max(plan.timeline.uses.values(), key=lambda use: use.memory.total).memory.total
    assert f"need {worst} B on " in row.why
    assert f"{worst - 32} bytes are missing" in row.why


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("bandwith=2", InvalidDocument, "is not a known change"),
        ("bandwidth", InvalidDocument, "is not a known change"),
        ("bandwidth=0", InvalidDocument, "not between"),
        ("bandwidth=-1", InvalidDocument, "not a factor"),
        ("bandwidth=1/0", InvalidDocument, "not a factor"),
        ("memory=1e99999999", InvalidDocument, "not a factor"),
        ("speed=nan", InvalidDocument, "not a factor"),
        ("devices=0", InvalidDocument, "has to add or remove between 1 and 10000 devices"),
        ("devices=many", InvalidDocument, "neither a number nor"),
        ("devices=-4", UnsupportedRequest, "cannot be removed"),
        ("micro-batches=1/3", UnsupportedRequest, "cannot be formed"),
        ("micro-batches=4", UnsupportedRequest, "cannot be formed"),
        ("recompute=maybe", InvalidDocument, "not known"),
    ],
)
def test_changes_that_are_none_are_refused(text: str, error: type[Exception], words: str) -> None:
    problem = small()
    with pytest.raises(error, match=words):
        change(problem, judged(problem), text)


def test_the_default_changes_are_those_that_can_be() -> None:
    problem = small()
    assert [each.name for each in default_changes(problem, judged(problem))][5:9] == [
        "devices=-2", "devices=+2", "micro-batches=1/2", "micro-batches=2",
    ]  # fmt: skip
    alone = small(nodes=(4,), shared=False)
    matrix = np.full((4, 4), 10**9) * ~np.eye(4, dtype=bool)
    wired = replace(alone, network=replace(alone.network, matrix_bytes_per_s=matrix))
    named = [each.name for each in default_changes(wired, judged(wired))]
    assert not any(name.startswith("devices") for name in named)


@pytest.mark.parametrize("nodes", [(2, 2), (4,), (1, 3)])
def test_devices_that_come_can_go_again(nodes: tuple[int, ...]) -> None:
    """One device or a node of devices; every remaining pair has its earlier route."""
    problem = small(nodes=nodes)
    plan = judged(problem)
    for count in {1, nodes[-1]}:
        wider = change(problem, plan, f"devices=+{count}").problem
        assert wider.num_devices == 4 + count
        assert all(wider.network.bandwidth(0, d) > 0 for d in range(1, wider.num_devices))
        back = change(wider, plan, f"devices=-{count}").problem
        assert [d.name for d in back.devices] == [d.name for d in problem.devices]
        assert back.network.node_names == problem.network.node_names
        assert back.network.cables == problem.network.cables
        assert makespan_ns(back, plan.allocation, plan.schedule) == plan.value_ns


def test_a_kind_of_devices_can_be_left_out() -> None:
    """The rest is the cluster that has never had them, wherever they were, and routes through their node stay."""
    fast = small(nodes=(2, 2, 2), kinds=["cpu", "cpu", "slow", "slow", "cpu", "cpu"], speed={"slow": 0.1})
    plan = judged(fast, chain([(2, [0, 1]), (2, [2, 3])], 4))
    (name,) = {each.name for each in default_changes(fast, plan) if each.name == "devices=-slow"}
    rest = change(fast, plan, name).problem
    alone = small()
    assert [device.name for device in rest.devices] == [fast.devices[d].name for d in (0, 1, 4, 5)]
    mine, other = judged(rest), judged(alone)
    assert mine.value_ns == other.value_ns
    assert not [each for each in default_changes(alone, other) if "cpu" in each.name]
    with pytest.raises(InvalidDocument, match="the kinds are cpu, slow"):
        change(fast, plan, "devices=-slo")
    with pytest.raises(UnsupportedRequest, match="devices=-cpu would remove all 4 devices"):
        change(alone, other, "devices=-cpu")


@pytest.mark.parametrize("form", ["pairs", "ports", "bus"])
def test_every_resource_is_of_a_link(form: str) -> None:
    network = make_network((2, 2), form=form)  # type: ignore[arg-type]
    for u in range(4):
        for v in range(4):
            if u != v:
                route = network.route(u, v)
                assert route is not None
                names = {link_of(network, resource) for resource in route.resources}
                assert names == ({f"n{u // 2}"} if u // 2 == v // 2 else {"n0 – switch", "n1 – switch"})


def test_sensitivities_are_other_simulations() -> None:
    """A stage in nine tenths of its time; both cables, transfers of nothing, gradients of nothing, no latency."""
    problem = small()
    plan = judged(problem)
    run = JudgedRun(problem, plan)
    times = {each.sentence: each.time_ns for each in sensitivities(run, path_of_run(run))}
    first = make_problem(
        [9, 18, 30, 40], [18, 36, 60, 80], 8, 16, update_ns=1, nodes=(2, 2), global_batch_size=8, latency_ns=2,
        shared=True, weight_ns=[9, 18, 30, 40],
    )  # fmt: skip
    for sentence, changed in {
        "stage 0 computes in 10 % less time": first,
        "transfers take no time": small(boundary_bytes=0),
        "all-reduces take no time": small(trainable_bytes=0),
        "links have no latency": small(latency_ns=0),
        "n0 is twice as wide": None,
        "n0 – switch is twice as wide": None,
    }.items():
        assert sentence in times or changed is None
        if changed is not None:
            assert times[sentence] == makespan_ns(changed, plan.allocation, plan.schedule), sentence
    links = [name for name in times if name.endswith("twice as wide")]
    assert links
    assert all(times[name] <= plan.value_ns for name in links)


def test_what_binds() -> None:
    """A heavy stage, a slow link, and memory for one micro-batch in flight where three would hide the way back."""

    def sentence(problem: Problem, plan: JudgedPlan) -> str:
        run = JudgedRun(problem, plan)
        return binding(problem, plan, path_of_run(run), idle_split(run)).sentence

    heavy = make_problem([10, 90], nodes=(2,), global_batch_size=4)
    assert "stage 1 (layers 1–1) binds" in sentence(heavy, judged(heavy, straight(heavy, 4)))
    mixed = make_problem([100], nodes=(2,), global_batch_size=4, kinds=["cpu", "old"], speed={"old": 0.25})
    waits = sentence(mixed, judged(mixed, chain([(1, [0, 1])], 2)))
    assert "in which its cpu wait for its old: for one sample they compute in 25 % of the time" in waits
    assert "wait for" not in sentence(mixed, judged(mixed, chain([(1, [1])], 2)))
    slow = make_problem([10, 10], boundary_bytes=500, nodes=(2,), global_batch_size=4)
    assert "the link between stages 0 and 1 binds" in sentence(slow, judged(slow, straight(slow, 4)))
    tight = make_problem([10, 10], stash_bytes=10, nodes=(2,), global_batch_size=4, memory_bytes=19)
    allocation = straight(tight, 4)
    orders = reordered(tight, allocation, warmup=(1, 1))
    plan = JudgedPlan.of("test", allocation, orders, simulate(tight, allocation, orders))
    assert "memory of n0/0 (stage 0) binds" in sentence(tight, plan)
    sentences = hints(tight, plan, replanned_by("relax", 4))
    assert "memory of n0/0" in sentences[0]
    assert "half as much memory again" in sentences[1]


def test_quicker_devices_wait_for_slower_ones_of_their_stage() -> None:
    """A faster device computes for a quarter of each 100 + 200 ns, and then waits."""
    problem = make_problem([100], nodes=(2,), global_batch_size=4, kinds=["new", "cpu"], speed={"new": 4.0})
    plan = judged(problem, chain([(1, [0, 1])], 2))
    idle = idle_split(JudgedRun(problem, plan))
    assert all(each.busy_ns + each.idle_ns == plan.value_ns for each in idle)
    assert {each.gpus[0].kind: (each.busy_ns, each.slower_ns) for each in idle} == {"new": (150, 450), "cpu": (600, 0)}
    sentences = hints(problem, plan, replanned_by("relax", 4), plan.value_ns // 3)
    assert any("is waiting for slower devices of the same stage" in part for part in sentences), sentences


def test_low_use_of_the_gpus_is_said_of_any_planners_plan() -> None:
    """A new device has four times the peak: both use 20 of 600 ns, and it waits for 450 where the other never waits."""
    problem = make_problem([100], nodes=(2,), global_batch_size=4, kinds=["new", "cpu"], speed={"new": 4.0})
    problem = replace(problem, peak_ns={"new": 6.25, "cpu": 25.0})
    plan = judged(problem, chain([(1, [0, 1])], 2))
    assert problem.peak_share(problem.devices, plan.value_ns) == pytest.approx(20 / 600)
    waits = (4 * 450 / 5) / (600 - 20)
    (sentence,) = hints(problem, plan, None)
    assert (
        sentence == f"MFU is 3.3 %, and {100 * waits:.0f} % of the rest is waiting for slower devices of the same stage"
    )
    assert sentence in hints(problem, plan, replanned_by("relax", 4), plan.value_ns // 3)
    assert hints(replace(problem, peak_ns={"new": 19.0, "cpu": 76.0}), plan, None) == []
    assert hints(replace(problem, peak_ns={"new": 6.25}), plan, None) == []
    slow = solve(replace(problem, peak_ns={"new": 1.0, "cpu": 4.0}), "dapple")
    assert any(clause.startswith("MFU is 1.3 %, and") for clause in slow.why)


@pytest.mark.tier("ci")
def test_auto_says_what_binds_and_what_would_help_most() -> None:
    problem = make_problem([100, 100], boundary_bytes=40, nodes=(1, 1), global_batch_size=2, shared=True)
    result = solve(problem, "auto", max_plans=3)
    assert result.best is not None
    sentences = hints(problem, result.best, replanned_by("relax", 4))
    assert "; ".join(sentences) in result.sentence
    assert "binds" in sentences[0]
    assert "binds" not in solve(problem, "dapple").sentence
    assert hints(problem, result.best, replanned_by("relax", 4)) == sentences


def test_far_above_the_bound_the_largest_loss_is_words() -> None:
    """One device of three works; in a line of three each waits for its turn, half of that in the fill and the drain."""

    def words(problem: Problem, allocation: Allocation, bound_ns: int) -> str:
        plan = judged(problem, allocation)
        return "; ".join(hints(problem, plan, replanned_by("relax", 4), bound_ns))

    alone = make_problem([100], nodes=(3,), global_batch_size=1)
    unused = words(alone, chain([(1, [0])], 1), judged(alone, chain([(1, [0])], 1)).value_ns // 3)
    assert "100 % of what it is above the bound is devices that the plan does not use" in unused
    line = make_problem([10, 10, 10], nodes=(3,), global_batch_size=1)
    third = judged(line, straight(line, 1)).value_ns // 3
    assert "50 % of what it is above the bound is filling and draining pipelines" in words(
        line, straight(line, 1), third
    )
    assert "above the bound" not in words(line, straight(line, 1), 2 * third)


# ---- layouts ---------------------------------------------------------------------------------------------------------


def test_a_layout_is_judged_beside_the_plan() -> None:
    """Differences of the parts of the paths add up to the difference of the times."""
    problem = small()
    ours = judged(problem)
    for layout in (Layout(("1",)), Layout(("1", "2", "3")), Layout(("3",), replicas=(1, 3)), Layout(())):
        compared = compare_layout(problem, ours, layout)
        theirs = compared.reordered.plan
        assert theirs is not None
        assert compared.bound is not None
        assert compared.reordered.fits
        assert theirs.value_ns == makespan_ns(problem, theirs.allocation, theirs.schedule) >= compared.bound.bound_ns
        assert sum(each.more_ns for each in compared.differences) == theirs.value_ns - ours.value_ns
        assert ("longer" in compared.sentence) == (theirs.value_ns > ours.value_ns)


def test_a_layout_is_judged_at_its_best_number_of_micro_batches() -> None:
    """A pipeline of four is compared with all numbers whose sizes were measured, not with the plan's two alone."""
    problem = small(micro_batch_sizes=(1, 2, 4, 8))
    ours = judged(problem, chain([(4, [0, 1])], 2))
    cuts = ("1", "2", "3")
    times = {}
    for number in (1, 2, 4, 8):
        at = compare_layout(problem, ours, Layout(cuts, num_micro_batches=number))
        assert at.reordered.plan is not None
        times[number] = (at.reordered.plan.value_ns, at.sentence)
    best = min(times, key=lambda number: times[number][0])
    assert best != 2
    compared = compare_layout(problem, ours, Layout(cuts))
    assert compared.reordered.plan is not None
    assert compared.reordered.plan.value_ns == times[best][0]
    named = f"with {best} micro-batches, which suit it best: {times[best][1]}; with our 2: {times[2][1]}"
    assert compared.sentence == named
    same = compare_layout(problem, judged(problem, chain([(4, [0, 1])], best)), Layout(cuts))
    assert same.sentence.endswith(f"; of 4 numbers of micro-batches, our {best} suits it best")


def test_the_plans_own_layout_takes_as_long() -> None:
    problem = small()
    allocation = chain([(2, [0, 1]), (2, [2, 3])], 4)
    orders = reordered(problem, allocation)
    ours = JudgedPlan.of("test", allocation, orders, simulate(problem, allocation, orders))
    compared = compare_layout(problem, ours, Layout(("2",), devices=(("n0/0", "n0/1"), ("n1/0", "n1/1"))))
    assert compared.reordered.plan is not None
    assert compared.reordered.plan.allocation == allocation
    assert compared.reordered.plan.value_ns <= ours.value_ns


def test_a_layout_that_does_not_fit_names_stage_and_bytes() -> None:
    problem = small(memory_bytes=200)
    compared = compare_layout(problem, judged(problem), Layout(("3",), replicas=(1, 1), num_micro_batches=1))
    short = compared.reordered.shortage
    assert short is not None
    assert not compared.reordered.fits
    assert short.missing_bytes == short.needed_bytes - 200
    assert f"stage 0 (layers 0–2) needs {short.needed_bytes} B on n0/0, which has 200 B: " in compared.sentence
    assert "with enough memory it takes" in compared.sentence


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(("2", "2")), "stage 2 would begin with layer 2, stage 1 with layer 2"),
        (Layout(("0",)), "stage 1 would begin with layer 0"),
        (Layout(("4",)), "there is no layer 4; the last one is 3"),
        (Layout(("layer9",)), "no layer has the name 'layer9'"),
        (Layout(("1", "2"), replicas=(1, 1)), "2 replica counts are given for 3 stages"),
        (Layout(("1",), replicas=(3, 3)), "are impossible"),
        (Layout(("1",), devices=(("n0/0",),)), "devices of 1 stages are given"),
        (Layout(("1",), devices=(("n0/0",), ("n0/0",))), "given twice"),
        (Layout(("1",), devices=(("n0/0",), ("n7/0",))), "no device 'n7/0'"),
        (Layout(("1",), num_micro_batches=9), "cannot be split into 9 micro-batches"),
    ],
)
def test_layouts_that_are_none_are_refused(layout: Layout, words: str) -> None:
    problem = small()
    with pytest.raises(InvalidDocument) as caught:
        compare_layout(problem, judged(problem), layout)
    assert words in str(caught.value)


def test_more_stages_than_devices_and_forbidden_cuts_are_refused() -> None:
    problem = make_problem([1] * 6, nodes=(2,), cuttable=[True, True, False, True, True])
    ours = judged(problem, chain([(3, [0]), (3, [1])], 4))
    with pytest.raises(InvalidDocument, match="3 stages need 3 devices; there are 2"):
        compare_layout(problem, ours, Layout(("1", "2")))
    with pytest.raises(InvalidDocument, match="no cut between 'layer2' and 'layer3'"):
        compare_layout(problem, ours, Layout(("3",)))
    with pytest.raises(UnsupportedRequest, match="does not order the stages"):
        compare_layout(problem, ours, Layout(("1",), schedule="zb-v"))


def test_names_are_cuts_and_devices_are_shared_evenly() -> None:
    problem = make_problem([1] * 7, nodes=(7,))
    stages = allocation_of(problem, judged(problem, chain([(7, [0])], 4)), Layout(("layer2", "5"))).stages
    assert [(stage.first, stage.last, len(stage.devices)) for stage in stages] == [(0, 1, 3), (2, 4, 2), (5, 6, 2)]
    assert all(a.last + 1 == b.first for a, b in pairwise(stages))


def test_recomputation_is_retimed_in_the_plans_own_order() -> None:
    """One stage computes four forwards of 100 a second time."""
    problem = make_problem([10, 20, 30, 40], stash_bytes=10, nodes=(2,), global_batch_size=4)
    allocation = chain([(4, [0])], 4)
    plan = judged(problem, allocation)
    never, here = list(rows_of(problem, plan, ["recompute=never", "recompute=here"]))[1:]
    assert never.plan is not None
    assert here.plan is not None
    assert (never.plan.value_ns, never.how) == (plan.value_ns, "re-timed")
    assert (here.plan.value_ns, here.how) == (plan.value_ns + 4 * 100, "re-timed")


@pytest.mark.parametrize(("stages", "boundary", "segments"), [(1, 1, 4), (1, 100, 1), (2, 1, 2), (2, 9, 1)])
def test_stages_recompute_in_the_way_that_leaves_most_room(stages: int, boundary: int, segments: int) -> None:
    """Recomputation is layer by layer where layers' inputs are small next to their stashes, else of the whole stage."""
    problem = make_problem(
        [10] * 4, stash_bytes=10, boundary_bytes=boundary, nodes=(stages,), global_batch_size=4, memory_bytes=10**6
    )
    plan = judged(problem, chain([(4, [0])] if stages == 1 else [(2, [0]), (2, [1])], 4))
    changed = change(problem, plan, "recompute=everywhere").allocation
    assert changed is not None
    assert len(changed.stages[0].recompute) == segments
    whole = [replace(stage, recompute=((stage.first, stage.last),)) for stage in changed.stages]
    layers = [
        replace(stage, recompute=tuple((layer, layer) for layer in range(stage.first, stage.last + 1)))
        for stage in whole
    ]
    ways = [changed, *(single_pipeline(tuple(way), 4) for way in (whole, layers))]
    room, *rooms = [headroom(problem, retime(problem, plan, way)) for way in ways]
    assert room == max(rooms) > min(rooms)


def test_a_layout_that_breaks_a_pin_is_told_so() -> None:
    problem = replace(small(), pins=(Pin(0, 1, frozenset({3})),))
    assert "breaks a pin" in compare_layout(problem, judged(problem), Layout(("2",))).sentence


def test_a_plan_is_its_own_retiming() -> None:
    problem = small()
    plan = judged(problem)
    assert retime(problem, plan).value_ns == plan.value_ns
    twice = retime(change(problem, plan, "speed=2").problem, plan)
    assert Fraction(twice.value_ns, plan.value_ns) >= Fraction(1, 2)
