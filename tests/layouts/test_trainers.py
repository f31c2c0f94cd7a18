"""Layouts out and in: each trainer's words, their round trips, and what is wrong with wrong ones."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from penstock.convert import from_plan, to_plan, to_problem
from penstock.convert.layer_roles import Roles
from penstock.convert.trainers import TRAINERS
from penstock.examples import catalogue
from penstock.exporting.layouts import layout_text
from penstock.layouts.limits import faults
from penstock.layouts.megatron.layout_string import print_layout, read_layout
from penstock.questions.by_name import import_layout
from penstock.questions.layouts import plan_file
from penstock.questions.solve import solve
from penstock.schemas.api.layouts import LayoutImported, LayoutRequest
from penstock.schemas.errors import InvalidDocument, PenstockError, UnsupportedRequest
from penstock.schemas.plan import PlanFile
from penstock.schemas.request import PlanRequest
from penstock.solvers.bounds.schedule_bound import request_bound
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Stage, single_pipeline
from penstock.solvers.model.result import REQUEST_SCOPE, JudgedPlan
from penstock.solvers.schedules.interleaved import groups_go
from penstock.solvers.schedules.trainer_orders import ONE_STAGE, chunks_of, order_of, ranks_of_stages

pytestmark = pytest.mark.tier("ci")

GPT = catalogue.profile("gpt")  # an embedding, 8 transformer layers, a head
LAST = len(GPT.layers) - 1


@cache
def request(target: str | None = None, nodes: int = 1, batch: int = 16) -> PlanRequest:
    return PlanRequest.parse(
        {
            "schema_version": 1,
            "profile": GPT.model_dump(mode="json"),
            "topology": catalogue.cluster(f"{nodes}x4xV100").model_dump(mode="json"),
            "global_batch_size": batch,
            "target": target,
        }
    )


def imported(form: str, text: str, **more: Any) -> LayoutImported:
    fields = {"request": request(), "compare": False} | more
    return import_layout(LayoutRequest(format=form, layout=text, **fields), workers=1)


def stages_of(result: LayoutImported) -> list[tuple[int, int]]:
    return [stage.layers for stage in result.plan.pipelines[0].stages]


cuts = st.lists(st.integers(0, LAST - 1), max_size=LAST, unique=True).map(sorted)


@pytest.mark.tier("quick")
@given(cuts, st.integers(1, 4), st.integers(0, 3))
def test_layout_strings_are_read_back(cuts: list[int], first: int, behind: int) -> None:
    roles = Roles(first, LAST - 1 - behind, behind + 1, "")
    kept = [cut for cut in cuts if first - 1 <= cut <= roles.last]
    starts = [0, *(cut + 1 for cut in kept)]
    stages = tuple(zip(starts, [*(start - 1 for start in starts[1:]), LAST], strict=True))
    assert read_layout(print_layout(stages, roles), roles) == stages


@pytest.mark.tier("quick")
@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("Et*3|t*5L", [(0, 3), (4, 9)]),
        ("E|(tt|)*4L", [(0, 0), (1, 2), (3, 4), (5, 6), (7, 8), (9, 9)]),
        ("Et*2,|(t*2|)*2,ttL", [(0, 2), (3, 4), (5, 6), (7, 9)]),
        ("(Et|)*1(t|t)*3t|L", [(0, 1), (2, 2), (3, 4), (5, 6), (7, 8), (9, 9)]),
    ],
)
def test_layout_strings_mean_what_megatron_means(text: str, stages: list[tuple[int, int]]) -> None:
    assert list(read_layout(text, Roles(1, 8, 1, ""))) == stages


@pytest.mark.tier("quick")
@pytest.mark.parametrize(
    ("text", "column", "words"),
    [
        ("Ettx|tL", 4, "'x' is no letter"),
        ("Et t*7L", 3, "' ' is no letter"),
        ("E(tt|", 2, "a group is"),
        ("E(tt)L", 2, "a group is"),
        ("E((t)*2)*4L", 2, "no other group"),
        ("Et*8", 2, "the last letter is L"),
        ("t*8L", 1, "the first letter is E"),
        ("Et*4|Et*4L", 6, "occurs once"),
        ("EtLt*7L", 3, "occurs once"),
        ("Et*7L", 6, "7 transformer layers, the profile 8"),
        ("Et*9L", 2, "9 transformer layers, the profile 8"),
        ("E||t*8L", 3, "stage 1 is empty"),
        ("Et*0L", 3, "a repetition is"),
        ("Emt*8L", 2, "1 m, the profile none"),
        ("E(t*99999|)*99999L", 12, "more than 100000 letters"),
        ("", 1, "the first letter is E"),
    ],
)
def test_wrong_layout_strings_say_the_column(text: str, column: int, words: str) -> None:
    with pytest.raises(InvalidDocument) as caught:
        read_layout(text, Roles(1, 8, 1, ""))
    matching = [fault for fault in caught.value.faults if words in fault.detail]
    assert matching, caught.value
    assert matching[0].pointer == f"line 1, column {column}"


@dataclass(repr=False)
class Exported:
    """A plan that a trainer can express, and how the trainer's job is started."""

    target: str
    file: PlanFile
    world: dict[str, Any]


@st.composite
def plans(draw: st.DrawFn) -> Exported:
    """Draw any number of nodes, ranks, parts and micro-batches, and any order and recomputation of the trainer."""
    target = draw(st.sampled_from(sorted(TRAINERS)))
    plan_request = request(target, nodes=draw(st.sampled_from([1, 2])), batch=48)
    problem = to_problem(plan_request)
    assert problem.within is not None
    nodes = problem.nodes()
    names = draw(st.permutations(range(len(nodes))))
    each = draw(st.integers(1, 4))
    world = [device for node in names for device in nodes[node][:each]]
    ranks = draw(st.sampled_from([r for r in range(1, len(world) + 1) if len(world) % r == 0]))
    per = len(world) // ranks
    name = draw(st.sampled_from([name for name in problem.within.runs(ranks) if name in ONE_STAGE or ranks <= 5]))
    chunks = draw(st.sampled_from(list(chunks_of(name, 10 // ranks))))
    counts = [m for m in range(1, 49) if 48 % (m * per) == 0]
    number = draw(st.sampled_from([m for m in counts if name != "interleaved" or problem.within.group(ranks, m)]))
    group = problem.within.group(ranks, number) if name == "interleaved" else None
    if group is not None and not problem.within.rounds:
        group = draw(st.sampled_from([g for g in range(ranks, number + 1) if groups_go(ranks, number, g)]))
    cuts = sorted(draw(st.permutations(range(1, 10)))[: ranks * chunks - 1])
    bounds = [0, *cuts, 10]
    rank_of = ranks_of_stages(name, ranks, chunks)
    plain = [
        Stage(a, b - 1, tuple(world[r * per : (r + 1) * per]))
        for r, (a, b) in zip(rank_of, pairwise(bounds), strict=True)
    ]
    how = draw(st.sampled_from(list(problem.within.ways(plain))))
    stages = tuple(replace(stage, recompute=problem.within.segments(stage, how)) for stage in plain)
    allocation = single_pipeline(stages, number)
    overlap = draw(st.booleans()) if target == "megatron" else True
    orders = order_of(problem, allocation, name, group)
    timeline = simulate(problem, allocation, orders, overlap=overlap)
    judged = JudgedPlan.of("by-hand", allocation, orders, timeline, overlap)
    hosts = ",".join(problem.network.node_names[node] for node in names)
    file = PlanFile(plan=to_plan(problem, plan_request, judged, ()), request=plan_request)
    return Exported(target, file, {"nodes": hosts, "devices_per_node": each})


@settings(max_examples=30, phases=(Phase.explicit, Phase.generate))
@given(plans())
def test_what_is_exported_is_imported_as_the_same_plan(exported: Exported) -> None:
    file = exported.file
    text = layout_text(file, exported.target)
    back = imported(exported.target, text, request=file.request, **exported.world)
    for field in ("pipelines", "num_micro_batches", "overlap_all_reduce", "prediction"):
        assert getattr(back.plan, field) == getattr(file.plan, field), (field, text)
    assert back.plan.schedule.rows == file.plan.schedule.rows, text  # one order may have two names
    assert plan_file(back).plan.request_hash == file.plan.request_hash


def test_ranges_hold_any_single_pipeline() -> None:
    plan_request = request(nodes=2).model_copy(update={"planner": "dapple"})
    plan = solve(plan_request, workers=1).plan
    assert plan is not None
    text = layout_text(PlanFile(plan=plan, request=plan_request), "ranges")
    back = imported("ranges", text, request=plan_request)
    assert (back.plan.pipelines, back.plan.schedule, back.plan.prediction) == (
        plan.pipelines,
        plan.schedule,
        plan.prediction,
    )


@pytest.mark.parametrize("kept", [True, False])
def test_a_layout_that_breaks_a_pin_is_measured_by_bounds_that_ask_for_none(kept: bool) -> None:
    """All layers pinned to one of four devices, or to all; two stages on two devices each are quicker than one."""
    names = [f"node0/{d}" for d in range(4)]
    document = request().model_dump(mode="json") | {
        "pins": [{"layers": [0, 9], "devices": names if kept else names[:1]}]
    }
    text = '{"layers": [[0, 4], [5, 9]], "num_micro_batches": 4}'
    result = imported("ranges", text, request=PlanRequest.parse(document))
    value = result.plan.prediction.time_per_global_batch_ns
    whole = [each for each in result.plan.certificates if each.scope == REQUEST_SCOPE]
    assert whole
    assert all(each.bound_ns <= value for each in result.plan.certificates)
    assert [each.covers.covers().pins == {"kept", "broken"} for each in whole if each.covers] == [not kept]
    pinned = request_bound(to_problem(PlanRequest.parse(document))).bound_ns
    assert (pinned > value) == (not kept)


def even(target: str) -> PlanFile:
    """Plan two stages on two devices each, as the trainer would have them."""
    ranges = plan_file(imported("ranges", '{"layers": [[0, 4], [5, 9]], "num_micro_batches": 4}')).plan
    plan_request = request(target)
    plain = ranges.model_copy(update={"request_hash": plan_request.content_hash(), "certificates": ()})
    return PlanFile(plan=plain, request=plan_request)


def test_each_trainer_reads_its_file() -> None:
    shell = layout_text(even("megatron"), "megatron")
    done = subprocess.run(
        ["bash", "-euc", shell + '\nprintf "%s\\n" "${PIPELINE_ARGS[@]}"'], capture_output=True, text=True, check=True
    )
    words = done.stdout.split("\n")
    assert words[words.index("--num-layers") + 1] == "8"
    settings_of = tomllib.loads(layout_text(even("torchtitan"), "torchtitan", "0.2"))
    parts = settings_of["parallelism"]["module_fqns_per_model_part"]
    assert [name for part in parts for name in part] == [
        "tok_embeddings",
        *(f"layers.{i}" for i in range(8)),
        "norm",
        "output",
    ]
    assert settings_of["training"]["global_batch_size"] == 16
    python = ast.parse(layout_text(even("torchtitan"), "torchtitan"))
    assert [node.name for node in python.body if isinstance(node, ast.FunctionDef)] == ["planned"]
    module = ast.parse(layout_text(even("deepspeed"), "deepspeed"))
    assert "PlannedPipelineModule" in [node.name for node in module.body if isinstance(node, ast.ClassDef)]


@pytest.mark.tier("quick")
def test_a_plan_beyond_a_trainer_says_which_stage_and_offers_the_target() -> None:
    plan_request = request(nodes=2).model_copy(update={"planner": "dapple"})
    problem = to_problem(plan_request)
    stages = (Stage(0, 4, (0, 1, 2)), Stage(5, 9, (3,)))
    allocation = single_pipeline(stages, 4)
    orders = order_of(problem, allocation, "early-backward")
    judged = JudgedPlan.of("by-hand", allocation, orders, simulate(problem, allocation, orders))
    file = PlanFile(plan=to_plan(problem, plan_request, judged, ()), request=plan_request)
    with pytest.raises(UnsupportedRequest, match=r"stage 1 .* has 1 replica, stage 0 3") as caught:
        layout_text(file, "megatron")
    assert "--target megatron" in (caught.value.remedy or "")


@pytest.mark.parametrize(
    ("flags", "stages"),
    [
        ("--pipeline-model-parallel-size 4 --num-layers 8", [(0, 2), (3, 4), (5, 6), (7, 9)]),
        ("--pipeline-model-parallel-size=2 --num-layers-per-virtual-pipeline-stage 2",
         [(0, 2), (3, 4), (5, 6), (7, 9)]),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 4",
         [(0, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6), (7, 7), (8, 9)]),
        ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3", [(0, 3), (4, 9)]),
        ("--pipeline_model_parallel_size 4 --decoder-last-pipeline-num-layers 2 # even",
         [(0, 2), (3, 4), (5, 6), (7, 9)]),
        ("--num-layers 8", [(0, 9)]),
        ("--pipeline-model-parallel-size 2 \\\n  --pipeline-model-parallel-layout \"Et*5|t*3L\"", [(0, 5), (6, 9)]),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*5\\|t*3L", [(0, 5), (6, 9)]),
        ("MODEL_ARGS:\n  --pipeline-model-parallel-size: 2\n  --pipeline-model-parallel-layout: Et*5|t*3L",
         [(0, 5), (6, 9)]),
    ],
)  # fmt: skip
def test_megatron_cuts_evenly_unless_told(flags: str, stages: list[tuple[int, int]]) -> None:
    assert stages_of(imported("megatron", flags)) == stages


def test_flags_say_batch_recomputation_and_overlap() -> None:
    result = imported(
        "megatron",
        "--pipeline-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 16 --recompute-granularity full "
        "--recompute-method block --recompute-num-layers 2",
    )
    assert (result.plan.num_micro_batches, result.plan.overlap_all_reduce) == (4, False)
    assert [stage.recompute for stage in result.plan.pipelines[0].stages] == [((1, 1), (2, 2)), ((5, 5), (6, 6))]


@pytest.mark.parametrize(
    ("form", "text", "words"),
    [
        ("megatron", "--pipeline-model-parallel-size $PP", r"line 1, column 32: .*'\$PP', .*\$PP is not set above it"),
        ("megatron", "\n --num-layers 12", "line 2, column 15: --num-layers is 12; the profile has 8"),
        ("megatron", "--pipeline-model-parallel-size 3", "cannot be split evenly"),
        ("megatron", "--pipeline-model-parallel-size 16", "cannot be split evenly"),
        ("megatron", "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout 'Et*4|t*4L'",
         "2 stages cannot"),
        ("megatron", "--pipeline-model-parallel-size 2\n--pipeline-model-parallel-layout 'Et*4|txt*3L'",
         "line 2, column 41: 'x'"),
        ("megatron", "--pipeline-model-parallel-size 2 --micro-batch-size 5",
         "not a multiple of 5 samples × 2 replicas"),
        ("megatron", "--pipeline-model-parallel-size 2 --global-batch-size 32",
         "trains 32 samples a step, the request 16"),
        ("megatron", "--pipeline-model-parallel-size 8", "4 devices cannot be split into 8 pipeline ranks"),
        ("megatron", "--num-layers 8 --recompute-granularity full --recompute-method some",
         "needs --recompute-method uniform or block"),
        ("torchtitan", "a = [", "neither TOML nor JSON"),
        ("torchtitan", "a = 1", r"neither \[parallelism\] nor"),
        ("torchtitan", '[parallelism]\nmodule_fqns_per_model_part = [["layers.0"]]', "layer 0 .* is the next"),
        ("torchtitan", '[parallelism]\nmodule_fqns_per_model_part = [["tok_embeddings", "layer.0"]]',
         "no layer for 'layer.0'"),
        ("torchtitan", '{"parallelism": {"module_fqns_per_model_part": [["tok_embeddings"]]}}', "end with layer 0"),
        ("deepspeed", "PARTS = [0, 5", "line 1, column"),
        ("deepspeed", "PARTS = [0, 5, f()]", "not a plain list"),
        ("deepspeed", "x = 1", "neither parts nor num_stages"),
        ("deepspeed", '{"parts": [0, 5]}', "from 0 to 10"),
        ("deepspeed", '{"parts": [0, 5, 5, 10]}', "stage 1 would hold"),
        ("deepspeed", '{"num_stages": 20}', "10 layers can be 1 to 10 stages"),
        ("deepspeed", '{"num_stages": 2, "partition_method": "type:nothing"}', "finds no layer"),
        ("deepspeed", '{"num_stages": 2, "partition_method": "profile"}', "none of uniform"),
        ("ranges", '{"layers": [[0, 3], [5, 9]]}', "layer 4 is the next"),
        ("ranges", '{"layers": [[0, 3]]}', "end with layer 3"),
        ("ranges", '{"layers": [[0, 9]], "devices": [["node0/9"]]}', "no device 'node0/9'"),
        ("ranges", '{"layers": [[0, 9]], "schedule": "zb-h1"}', "cannot be built"),
        ("ranges", '{"layers": [[0, 9]], "colour": 1}', "has no 'colour'"),
        ("ranges", "[]", "has no layers"),
    ],
)  # fmt: skip
def test_wrong_layouts_say_what_is_wrong(form: str, text: str, words: str) -> None:
    with pytest.raises(InvalidDocument) as caught:
        imported(form, text)
    assert re.search(words, str(caught.value)), caught.value


@pytest.mark.tier("nightly")
@settings(max_examples=150)
@given(
    st.sampled_from(["megatron", "torchtitan", "deepspeed", "ranges"]),
    st.text(alphabet='EtmL|*()0123456789,-= \n"[]{}:partslayer_dev', max_size=60),
)
def test_no_text_makes_more_than_an_error_of_ours(form: str, text: str) -> None:
    try:
        imported(form, text or " ")
    except PenstockError as error:
        status = error.status
    else:
        status = 200
    assert status < 500


def test_deepspeeds_own_methods_cut_the_profile() -> None:
    even = imported(
        "deepspeed", '{"num_stages": 4, "partition_method": "uniform", "train_micro_batch_size_per_gpu": 2}'
    )
    assert stages_of(even) == [(0, 2), (3, 5), (6, 7), (8, 9)]
    blocks = imported("deepspeed", '{"num_stages": 2, "partition_method": "type:block"}')
    assert [sum(1 <= layer <= 8 for layer in range(a, b + 1)) for a, b in stages_of(blocks)] == [4, 4]
    assert stages_of(imported("deepspeed", '{"num_stages": 2, "partition_method": "parameters"}'))[0][0] == 0


def test_a_layout_that_lacks_memory_is_judged_all_the_same() -> None:
    small = json.loads(request().model_copy().text())
    small["topology"]["uniform"]["memory_bytes"] = 100_000_000
    result = imported("megatron", "--pipeline-model-parallel-size 2", request=PlanRequest.parse(small))
    assert not result.fits
    assert result.missing_bytes > 0
    assert any("does not fit" in sentence for sentence in result.sentences)


@pytest.mark.tier("nightly")
def test_rivals_are_within_the_limits_and_beyond() -> None:
    quick = request().model_copy(update={"options": {"exclude": "polish,closing,exact,relax"}, "recompute": "never"})
    flags = "--pipeline-model-parallel-size 4 --micro-batch-size 1"
    result = imported("megatron", flags, compare=True, request=quick)
    kept, free = result.rivals
    assert kept.time_ns is not None
    assert free.time_ns is not None
    assert kept.plan is not None
    assert kept.comparison is not None
    assert free.time_ns <= kept.time_ns <= result.plan.prediction.time_per_global_batch_ns  # type: ignore[union-attr]
    assert kept.saved == pytest.approx(1 - kept.time_ns / result.plan.prediction.time_per_global_batch_ns)  # type: ignore[union-attr]
    problem = to_problem(result.request)
    assert problem.within is not None
    assert faults(problem, *from_plan(kept.plan, problem), problem.within) == []
    assert layout_text(PlanFile(plan=kept.plan, request=result.request), "megatron")
