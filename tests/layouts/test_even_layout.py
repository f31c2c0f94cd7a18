"""Plain layouts against plans and rank tables that are written down, and what has no plain layout."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

import penstock
from penstock.convert.layer_roles import Roles
from penstock.examples import catalogue
from penstock.examples.shapes import SHAPES
from penstock.layouts.megatron.cuts import stages_of
from penstock.layouts.megatron.flags import Flags
from penstock.schemas.errors import InvalidDocument, PenstockError, UnsupportedRequest
from penstock.schemas.plan import Pipeline, Plan, PlanFile, PlanSchedule, ScheduleRow, Stage
from penstock.schemas.profile import ModelProfile
from penstock.schemas.program import KINDS, parse_row
from penstock.schemas.request import MemoryModel, PlanRequest
from penstock.shapes.layout import Layout, layers_of_stages, uneven_flags
from penstock.shapes.profiled_degrees import DegreeOptions
from penstock.shapes.profiles import profile_of


def _profile(layers: int, framework: str = "megatron") -> ModelProfile:
    shape = SHAPES["llama-3-8b"].model_copy(update={"layers": layers})
    return profile_of(shape, framework, ("H100",), micro_batch_sizes=(1, 2))  # type: ignore[arg-type]


SIX = _profile(6)


def _request(cluster: str = "2x8xH100", batch: int = 16, profile: ModelProfile = SIX, **more: object) -> PlanRequest:
    return PlanRequest.model_validate(
        {"profile": profile, "topology": catalogue.cluster(cluster), "global_batch_size": batch, **more}
    )


def test_without_tensor_parallelism_it_is_the_plan_written_by_hand() -> None:
    request = _request("1x4xH100", 16)
    rows = (
        ScheduleRow(devices=("node0/0", "node0/1"), text="F0 F1 B0 F2 B1 F3 B2 B3"),
        ScheduleRow(devices=("node0/2", "node0/3"), text="F0 B0 F1 B1 F2 B2 F3 B3"),
    )
    by_hand = Plan(
        request_hash=request.content_hash(),
        planner="by-hand",
        global_batch_size=16,
        micro_batch_size=4,
        num_micro_batches=4,
        pipelines=(
            Pipeline(
                stages=(
                    Stage(layers=(0, 3), devices=("node0/0", "node0/1")),
                    Stage(layers=(4, 7), devices=("node0/2", "node0/3")),
                ),
                micro_batches=(0, 3),
            ),
        ),
        update_rule="synchronous",
        schedule=PlanSchedule(name="early-backward", rows=rows, warmup=(2, 1)),
    )
    even = penstock.even_layout(request, pipeline=2, micro_batch_size=2)
    written = penstock.judge(PlanFile(plan=by_hand, request=request))
    assert written.faults == ()
    assert even.file.request == request
    assert even.file.plan.pipelines == by_hand.pipelines
    assert even.file.plan.prediction == written.plan.prediction


def _rank(stage: int, replica: int, lane: int, replicas: int, tensor: int) -> int:
    """Return the rank in Megatron's order tp-cp-ep-dp-pp without context and experts."""
    return (stage * replicas + replica) * tensor + lane


@pytest.mark.parametrize(("tensor", "pipeline", "replicas"), [(2, 2, 4), (4, 2, 2), (8, 2, 1), (2, 1, 8), (8, 1, 2)])
def test_ranks_count_as_those_of_megatron(tensor: int, pipeline: int, replicas: int) -> None:
    gpus = [f"node{node}/{gpu}" for node, gpu in product(range(2), range(8))]
    even = penstock.even_layout(_request(), tensor=tensor, pipeline=pipeline, sharding="optimizer")
    plan = even.file.plan
    assert (plan.micro_batch_size, plan.num_micro_batches) == (replicas, 16 // replicas)
    assert plan.degrees is not None
    assert (plan.degrees.tensor, plan.sharding) == (tensor, "optimizer")
    for number, stage in enumerate(plan.pipelines[0].stages):
        lanes = product(range(replicas), range(tensor))
        assert list(stage.devices) == [gpus[_rank(number, r, lane, replicas, tensor)] for r, lane in lanes]
    assert penstock.judge(even.file).faults == ()


def test_the_first_of_four_stages_is_written_down() -> None:
    even = penstock.even_layout(_request(), tensor=2, pipeline=4)
    stages = even.file.plan.pipelines[0].stages
    assert [stage.layers for stage in stages] == [(0, 1), (2, 3), (4, 5), (6, 7)]  # embedding and head are a layer each
    assert stages[0].devices == ("node0/0", "node0/1", "node0/2", "node0/3")
    assert stages[3].devices == ("node1/4", "node1/5", "node1/6", "node1/7")


def test_virtual_stages_are_dealt_in_turn_and_interleaved() -> None:
    even = penstock.even_layout(_request("1x4xH100", 8), tensor=2, pipeline=2, virtual_stages=3)
    plan = even.file.plan
    assert [stage.layers for stage in plan.pipelines[0].stages] == [(0, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 7)]
    assert [stage.devices[0] for stage in plan.pipelines[0].stages] == ["node0/0", "node0/2"] * 3
    assert plan.schedule.name == "interleaved"
    # Warm-up: 2 (p - r - 1) + (v - 1) p forwards, 6 and 4, in groups of p micro-batches through the parts.
    first, last = (_operations(row.text) for row in plan.schedule.rows)
    assert first[:9] == ["0F0", "0F1", "2F0", "2F1", "4F0", "4F1", "0F2", "4B0", "0F3"]
    assert last[:7] == ["1F0", "1F1", "3F0", "3F1", "5F0", "5B0", "5F1"]
    assert last[-2:] == ["1B6", "1B7"]


def _operations(text: str) -> list[str]:
    return [f"{stage}{KINDS[kind]}{micro_batch}" for kind, stage, micro_batch in parse_row(text)]


def test_one_gpu_runs_all_layers() -> None:
    even = penstock.even_layout(_request("1x1xH100", 4), micro_batch_size=2)
    plan = even.file.plan
    assert plan.pipelines[0].stages == (Stage(layers=(0, 7), devices=("node0/0",)),)
    assert plan.schedule.rows[0].text.split() == ["(F0", "B0)*2"]


def test_recomputation_is_of_every_transformer_layer_by_itself() -> None:
    request = _request("1x8xH100", 8)
    plain, again = (penstock.even_layout(request, pipeline=2, recompute=how) for how in ("none", "full"))
    assert [stage.recompute for stage in again.file.plan.pipelines[0].stages] == [
        ((1, 1), (2, 2), (3, 3)),
        ((4, 4), (5, 5), (6, 6)),
    ]
    assert plain.file.plan.prediction is not None
    assert again.file.plan.prediction is not None
    ratio = again.file.plan.prediction.time_per_global_batch_ns / plain.file.plan.prediction.time_per_global_batch_ns
    assert 1.15 < ratio < 4 / 3
    assert again.file.plan.prediction.peak_memory_bytes < plain.file.plan.prediction.peak_memory_bytes


def test_a_layout_that_does_not_fit_is_an_answer() -> None:
    request = _request("1x2xH100", 2, catalogue.profile("llama-3-8b"))
    even = penstock.even_layout(request)
    assert not even.fits
    assert even.file.plan.prediction is not None
    device = even.file.plan.prediction.devices[0]
    assert even.missing_bytes == device.peak_memory_bytes - device.memory_bytes
    assert penstock.even_layout(_request("1x2xH100", 2)).fits


def test_the_request_stays_where_it_allows_the_layout() -> None:
    left_open = _request(degrees="auto", sharding="auto")
    assert penstock.even_layout(left_open, tensor=4, sharding="none").file.request == left_open
    other = penstock.even_layout(_request(), tensor=4, sharding="none").file
    assert other.request != _request()
    assert other.plan.request_hash == other.request.content_hash()
    assert penstock.judge(other).faults == ()


def test_torch_gives_the_first_stages_a_layer_more_and_groups_in_rounds() -> None:
    profile = _profile(7, "torch")
    plan = penstock.even_layout(_request("1x2xH100", 3, profile), pipeline=2, virtual_stages=2).file.plan
    assert [stage.layers for stage in plan.pipelines[0].stages] == [(0, 2), (3, 4), (5, 6), (7, 8)]
    uneven = penstock.even_layout(_request("1x2xH100", 8, _profile(7)), pipeline=2, virtual_stages=2).file.plan
    assert [stage.layers for stage in uneven.pipelines[0].stages] == [(0, 2), (3, 4), (5, 6), (7, 8)]
    assert uneven.assumptions[-1].endswith(
        "stages of 1 or 2 layers, by --pipeline-model-parallel-layout 'Et*2|(t*2|)*2tL'"
    )
    with pytest.raises(UnsupportedRequest, match="7 layers are fewer than 12 stages"):
        penstock.even_layout(_request("1x2xH100", 8, _profile(7)), pipeline=2, virtual_stages=6)


@pytest.mark.parametrize(
    ("layers", "pipeline", "virtual_stages", "split"),
    [
        (61, 8, 1, (*[8] * 7, 5)),
        (61, 4, 1, (16, 16, 16, 13)),
        (61, 16, 1, (*[4] * 15, 1)),
        (17, 8, 1, (2, 3, *[2] * 6)),
        (13, 8, 1, (1, *[2] * 5, 1, 1)),
        (5, 6, 1, (*[1] * 5, 0)),
        (13, 6, 1, (2, 3, 2, 2, 2, 2)),
        (61, 8, 4, (1, *[2] * 29, 1, 1)),
        (7, 2, 2, (2, 2, 2, 1)),
        (9, 4, 1, (2, 3, 3, 1)),
    ],
)
def test_the_flags_of_an_uneven_layout_are_read_as_its_stages(
    layers: int, pipeline: int, virtual_stages: int, split: tuple[int, ...]
) -> None:
    layout = Layout(pipeline=pipeline, virtual_stages=virtual_stages, uneven=True)
    flags = Flags(f"--pipeline-model-parallel-size {pipeline} {uneven_flags(layers, layout)}", "train.sh")
    stages = stages_of(flags, Roles(1, layers, 1, ""), pipeline)
    sizes = [last - first + 1 for first, last in stages]
    assert layers_of_stages(layers, layout) == (sizes[0] - 1, *sizes[1:-1], sizes[-1] - 1) == split
    assert layers_of_stages(layers, replace(layout, uneven=False)) is None


def test_a_measured_model_needs_names_alone() -> None:
    profile = catalogue.profile("bert-48").model_copy(
        update={"shape": None, "variants": None, "classes": None, "framework": None}
    )
    even = penstock.even_layout(_request("1x4xV100", 8, profile, memory=MemoryModel()), pipeline=4)
    sizes = [last - first + 1 for first, last in (stage.layers for stage in even.file.plan.pipelines[0].stages)]
    assert sizes == [13, 12, 12, 13]
    uneven = penstock.even_layout(_request("1x7xV100", 7, profile, memory=MemoryModel()), pipeline=7).file.plan
    assert uneven.pipelines[0].stages[-1].layers == (43, 49)
    with pytest.raises(
        UnsupportedRequest, match="48 transformer layers cannot be split over 7 pipeline ranks with 8 stages each"
    ):
        penstock.even_layout(_request("1x7xV100", 7, profile), pipeline=7, virtual_stages=8)


@pytest.mark.parametrize(
    ("options", "batch", "error", "sentence"),
    [
        ({"tensor": 3}, 16, UnsupportedRequest, "tensor 3 does not divide 32 attention heads"),
        ({"tensor": 16}, 16, UnsupportedRequest, "tensor 16 needs 16 GPUs in one node, but the largest node has 8"),
        ({"pipeline": 3}, 16, UnsupportedRequest, "pipeline 3 does not divide 16 GPUs; nearest: pipeline 1, 2, 4"),
        ({"pipeline": 16}, 16, UnsupportedRequest, "6 layers are fewer than 16 stages"),
        ({"micro_batch_size": 3}, 16, UnsupportedRequest, "3 × 16 replicas = 48 does not divide a global batch of 16"),
        ({"virtual_stages": 2}, 16, UnsupportedRequest, "virtual stages 2 need a pipeline"),
        (
            {"pipeline": 2, "sharding": "gradients"},
            16,
            UnsupportedRequest,
            "gradients needs one stage, not 2: gradients would",
        ),
        ({"pipeline": 2, "virtual_stages": 3}, 24, InvalidDocument, "groups of 2, which 3 micro-batches cannot"),
        (
            {"micro_batch_size": 0},
            16,
            InvalidDocument,
            "the layout has micro_batch",
        ),
    ],
)
def test_what_is_refused(options: dict[str, int], batch: int, error: type[PenstockError], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        penstock.even_layout(_request(batch=batch), **options)  # type: ignore[arg-type]


def test_layers_without_roles_have_no_plain_layout() -> None:
    with pytest.raises(UnsupportedRequest, match="do not say which are"):
        penstock.even_layout(_request("1x2xV100", 8, catalogue.profile("resnet-50")), pipeline=2)


def test_recomputed_modules_take_less_time_than_layers_and_free_less() -> None:
    """Measured by NVIDIA for llama-3-70b on 32 H100 in FP8: recomputing the mlp takes 704 / 593.6 times as long."""
    shape = SHAPES["llama-3-70b"].model_copy(update={"sequence_length": 4096})
    profile = profile_of(shape, "megatron", ("H100",), micro_batch_sizes=(1, 2), degrees=DegreeOptions(tensor=(4,)))
    request = _request("4x8xH100", 32, profile, degrees="auto", sharding="auto")
    times, sizes = [], []
    for again in ("none", ["norm"], ["mlp"], ["mlp", "norm", "attention"], "full"):
        layout = {"tensor": 4, "pipeline": 4, "virtual_stages": 5, "sharding": "optimizer"}
        even = penstock.even_layout(request, **layout, recompute=again)  # type: ignore[arg-type]
        prediction = even.file.plan.prediction
        assert prediction is not None
        times.append(prediction.time_per_global_batch_ns)
        sizes.append(prediction.peak_memory_bytes)
        assert penstock.judge(even.file).faults == ()
    assert times == sorted(times)
    assert sizes == sorted(sizes, reverse=True)
    assert times[2] / times[0] == pytest.approx(704 / 593.6, rel=0.05)


def test_modules_without_costs_have_no_layout() -> None:
    with pytest.raises(UnsupportedRequest, match="no costs of recomputing norm at no degree above 1"):
        penstock.even_layout(_request(), pipeline=2, recompute=["norm"])
