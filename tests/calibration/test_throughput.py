"""One figure of a run folded into a kind of device: against truths that are known, and as every interface has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.calibration.scaling import followed, scaled, with_kind
from penstock.calibration.throughput import PRECISION, answer, calibrate_throughput
from penstock.calibration.trust import LARGEST_FACTOR
from penstock.cli.main import main
from penstock.examples import catalogue
from penstock.examples.shapes import SHAPES
from penstock.layouts.even import even_layout
from penstock.planning.judge import judge
from penstock.questions.in_child import answer_task, task_of
from penstock.schemas.api.throughput import ThroughputOut, ThroughputRequest
from penstock.schemas.errors import InvalidDocument, InvalidPlan, UnsupportedRequest
from penstock.schemas.plan import PlanFile
from penstock.schemas.profile import DividedMeasurement, LayerMeasurement, ModelProfile
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology
from penstock.schemas.transformers.degrees import Collective
from penstock.shapes.profiles import profile_of
from penstock.workers.protocol import Message
from penstock.workers.solve_child import TASKS

PROFILE = profile_of(SHAPES["llama-3-8b"], "megatron", ["A100", "H100"], micro_batch_sizes=[1, 2])
CLUSTER = catalogue.cluster("2x8xH100")


def laid_out(profile: ModelProfile, cluster: ClusterTopology = CLUSTER, **layout: int) -> PlanFile:
    request = PlanRequest(profile=profile, topology=cluster, global_batch_size=64)
    return even_layout(request, sharding="optimizer", **layout).file  # type: ignore[arg-type]


def time_ns(file: PlanFile) -> int:
    """Return the plan's time by the judge, which `calibrate_throughput` does not use for times."""
    timeline = judge(file).timeline
    assert timeline is not None
    return timeline.time_per_global_batch_ns


TENSOR = laid_out(PROFILE, tensor=4, pipeline=2)
PLAIN = laid_out(PROFILE, tensor=1, pipeline=4)


@pytest.mark.cases(2)
@pytest.mark.parametrize("factor", [0.4, 1.0, 1.37, 9.0])
def test_computation_that_is_off_by_a_factor_is_found_and_with_it_other_layouts(factor: float) -> None:
    true = scaled(PROFILE, "H100", factor)
    taken_ns = time_ns(laid_out(true, tensor=4, pipeline=2))
    result = calibrate_throughput(TENSOR, step_ns=taken_ns, show=[PLAIN], any_factor=factor > LARGEST_FACTOR)
    assert result.factor == pytest.approx(factor, rel=5 * PRECISION)
    assert time_ns(laid_out(result.profile, tensor=4, pipeline=2)) == pytest.approx(
        result.measured_ns, rel=2 * PRECISION
    )
    wanted = time_ns(laid_out(true, tensor=1, pipeline=4))
    assert result.shown[0].after_ns == pytest.approx(wanted, rel=5 * PRECISION)
    assert time_ns(laid_out(result.profile, tensor=1, pipeline=4)) == result.shown[0].after_ns
    assert result.shown[0].before_ns == time_ns(PLAIN)


def test_tokens_per_second_and_gpu_count_the_gpus_that_the_plan_uses() -> None:
    shape = PROFILE.shape
    assert shape is not None
    pace = 64 * shape.sequence_length / 16 / (time_ns(TENSOR) / 1e9)
    result = calibrate_throughput(TENSOR, tokens_per_s_per_gpu=pace / 2)
    assert result.measured_ns == pytest.approx(2 * time_ns(TENSOR), rel=1e-9)
    assert result.run.tokens_per_s_per_gpu_after == pytest.approx(pace / 2, rel=2 * PRECISION)
    assert result.run.tokens_per_s_per_gpu_before == pytest.approx(pace)


def unhidden(measured: DividedMeasurement) -> list[list[Collective]]:
    """Return all collectives, without how much of them computation hides: a slower pass hides more."""
    return [[each.model_copy(update={"hidden_ns": 0}) for each in layer.collectives] for layer in measured.layers]


def test_all_degrees_change_and_other_kinds_and_communication_do_not() -> None:
    result = calibrate_throughput(TENSOR, step_ns=2 * time_ns(TENSOR))

    def costs(profile: ModelProfile, kind: str) -> list[LayerMeasurement]:
        measured = [*profile.measurements, *(one for each in profile.variants or () for one in each.measurements)]
        return [layer for one in measured if one.device_kind == kind for layer in one.layers]

    assert costs(result.profile, "A100") == costs(PROFILE, "A100")
    pairs = list(zip(costs(PROFILE, "H100"), costs(result.profile, "H100"), strict=True))
    assert len(pairs) > len(PROFILE.layers) * 2
    for old, new in pairs:
        assert new.forward_ns == pytest.approx(old.forward_ns * result.factor, abs=1)
        assert new.backward_ns == pytest.approx(old.backward_ns * result.factor, abs=2)
        assert new.weight_ns == pytest.approx(old.weight_ns * result.factor, abs=1)
        assert (new.stash_bytes, new.workspace_bytes) == (old.stash_bytes, old.workspace_bytes)
    for before, after in zip(PROFILE.variants or (), result.profile.variants or (), strict=True):
        assert before.layers == after.layers
        for one, other in zip(before.measurements, after.measurements, strict=True):
            assert unhidden(one) == unhidden(other)
            modules = [
                (old.forward_ns, new.forward_ns, old.freed_bytes == new.freed_bytes)
                for a, b in zip(one.layers, other.layers, strict=True)
                for old, new in zip(a.modules or (), b.modules or (), strict=True)
            ]
            factor = result.factor if one.device_kind == "H100" else 1
            assert all(new == pytest.approx(old * factor, abs=1) and same for old, new, same in modules)


def test_the_profile_says_what_it_rests_on_and_promises_no_more_than_before() -> None:
    result = calibrate_throughput(TENSOR, step_ns=2 * time_ns(TENSOR))
    source = result.profile.source
    assert source.method == "calibrated"
    assert source.expected_error == PROFILE.source.expected_error
    assert f"computation of H100 × {result.factor:.4g}" in source.description
    assert "one run takes" in result.profile.assumptions[-1]


def test_a_kind_that_the_topology_scales_gets_costs_of_its_own() -> None:
    """With no factor the plan takes as long as before; the profile no longer needs the topology's scaling."""
    cluster = catalogue.cluster("2x8xB200")
    plan = laid_out(PROFILE, cluster, tensor=4, pipeline=2)
    (kind,) = cluster.kinds
    profile = with_kind(PROFILE, "B200", kind.scale_from, kind.speed)
    plain = cluster.model_copy(update={"kinds": ()})
    assert time_ns(laid_out(profile, plain, tensor=4, pipeline=2)) == pytest.approx(time_ns(plan), rel=1e-4)
    result = calibrate_throughput(plan, step_ns=time_ns(plan) * 3 // 2)
    assert result.device_kind == "B200"
    assert "B200" in result.profile.device_kinds
    again = laid_out(result.profile, plain, tensor=4, pipeline=2)
    assert time_ns(again) == pytest.approx(result.measured_ns, rel=2 * PRECISION)


def test_another_profile_takes_the_factor() -> None:
    other = profile_of(SHAPES["gpt2-small"], "megatron", ["H100"], micro_batch_sizes=[1])
    result = calibrate_throughput(TENSOR, step_ns=2 * time_ns(TENSOR), profile=other)
    assert result.profile.name == "gpt2-small"
    forward = [profile.measurements[0].layers[1].forward_ns for profile in (other, result.profile)]
    assert forward[1] == round(forward[0] * result.factor)


def test_what_no_factor_explains_is_refused_with_the_numbers() -> None:
    nothing = laid_out(scaled(PROFILE, "H100", 0), tensor=4, pipeline=2)
    with pytest.raises(
        UnsupportedRequest, match=r"costs would change by a factor of 0\.\d+, beyond the limit of 3"
    ) as caught:
        calibrate_throughput(TENSOR, step_ns=2 * time_ns(nothing))
    assert "--any-factor" in str(caught.value)
    accepted = calibrate_throughput(TENSOR, step_ns=2 * time_ns(nothing), any_factor=True)
    assert accepted.least_ns == time_ns(nothing)
    assert accepted.profile.source.expected_error == pytest.approx(1 - accepted.factor, abs=1e-3)
    assert "beyond 3, which was accepted" in accepted.profile.assumptions[-1]
    with pytest.raises(
        UnsupportedRequest, match=r"communication and updates alone are predicted to take .* \(with computation on H100"
    ):
        calibrate_throughput(TENSOR, step_ns=time_ns(nothing))
    with pytest.raises(UnsupportedRequest, match="times the"):
        calibrate_throughput(TENSOR, step_ns=10**6 * time_ns(TENSOR))


def test_what_is_no_run_of_one_kind_is_refused() -> None:
    for figures in ({}, {"step_ns": 1, "tokens_per_s_per_gpu": 1.0}):
        with pytest.raises(InvalidDocument, match="not both"):
            calibrate_throughput(TENSOR, **figures)  # type: ignore[arg-type]
    with pytest.raises(InvalidDocument, match="have to be above 0"):
        calibrate_throughput(TENSOR, tokens_per_s_per_gpu=-1.0)
    slower = laid_out(PROFILE, catalogue.cluster("2x8xA100"), tensor=4, pipeline=2)
    with pytest.raises(UnsupportedRequest, match="uses A100, but the run was on H100"):
        calibrate_throughput(TENSOR, step_ns=2 * time_ns(TENSOR), show=[slower])
    only = profile_of(SHAPES["gpt2-small"], "megatron", ["A100"], micro_batch_sizes=[1])
    with pytest.raises(InvalidDocument, match="has costs of A100, but the run was on H100"):
        calibrate_throughput(TENSOR, step_ns=2 * time_ns(TENSOR), profile=only)
    nodes = tuple(
        node.model_copy(update={"devices": tuple(one.model_copy(update={"kind": kind}) for one in node.devices)})
        for node, kind in zip(CLUSTER.expanded().nodes, ("A100", "H100"), strict=True)
    )
    mixed = CLUSTER.expanded().model_copy(update={"nodes": nodes})
    with pytest.raises(UnsupportedRequest, match="2 kinds, A100, H100"):
        calibrate_throughput(laid_out(PROFILE, mixed, tensor=4, pipeline=2), step_ns=10**9)
    torn = TENSOR.model_copy(update={"plan": TENSOR.plan.model_copy(update={"request_hash": "sha256:" + 64 * "0"})})
    with pytest.raises(InvalidPlan, match="was made for the request sha256:0000"):
        calibrate_throughput(torn, step_ns=10**9)


def test_costs_at_degrees_follow_those_that_a_trace_corrected() -> None:
    """Forward of blocks twice as long, weight gradients three times, the embedding as it was."""

    def changed(index: int, layer: LayerMeasurement) -> LayerMeasurement:
        if not 0 < index < len(PROFILE.layers) - 1:
            return layer
        more = {"forward_ns": 2 * layer.forward_ns, "backward_weight_ns": 3 * layer.weight_ns}
        return layer.model_copy(update={**more, "backward_ns": layer.backward_ns + 2 * layer.weight_ns})

    measurements = tuple(
        one.model_copy(update={"layers": tuple(changed(i, layer) for i, layer in enumerate(one.layers))})
        for one in PROFILE.measurements
    )
    layers = tuple(layer.model_copy(update={"update_ns": 5 * layer.update_ns}) for layer in PROFILE.layers)
    corrected = followed(PROFILE, PROFILE.model_copy(update={"measurements": measurements, "layers": layers}))
    assert PROFILE.classes is not None
    embedding, block = PROFILE.classes[0], PROFILE.classes[1]
    for before, after in zip(PROFILE.variants or (), corrected.variants or (), strict=True):
        assert [layer.update_ns for layer in after.layers] == [5 * layer.update_ns for layer in before.layers]
        for one, other in zip(before.measurements, after.measurements, strict=True):
            assert one.layers[embedding] == other.layers[embedding]
            old, new = one.layers[block], other.layers[block]
            assert new.forward_ns == 2 * old.forward_ns
            assert new.weight_ns == 3 * old.weight_ns
            assert new.backward_ns - new.weight_ns == old.backward_ns - old.weight_ns
            assert [module.forward_ns for module in new.modules or ()] == [
                2 * module.forward_ns for module in old.modules or ()
            ]


@pytest.mark.tier("ci")
def test_command_document_and_worker_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("plan", "other", "profile")
    plan, other, written = (str(tmp_path / f"{name}.json") for name in names)
    TENSOR.write(plan)
    PLAIN.write(other)
    step_ms = 2 * time_ns(TENSOR) // 10**6
    options = ["--from-throughput", f"{step_ms}ms", "--plan", plan, "--show", other]
    assert main(["calibrate", *options, "-o", written]) == 0
    output = capsys.readouterr().out
    assert "computation of H100 ×" in output
    assert f"{other} (llama-3-8b)  predicted" in output
    assert main(["calibrate", *options, "-o", written, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    request = ThroughputRequest(plan_file=TENSOR, step_ns=step_ms * 10**6, show=(PLAIN,))
    result = answer(request)
    assert ModelProfile.read(written) == result.profile
    assert document == result.model_dump(mode="json", exclude={"profile"})
    sent: list[Message] = []
    TASKS["ask"](
        answer_task,
        task_of("calibrate-throughput", request, most_devices=1, most_micro_batches=1, memory_bytes=0),
        sent.append,
    )
    assert ThroughputOut.model_validate_json(sent[0].body) == result
    links = [*options, "--output-topology", written]
    for wrong in ([], ["p.json"], ["--from-throughput", "1"], links, ["p.json", "t.json", *options]):
        assert main(["calibrate", *wrong]) == 64
        assert capsys.readouterr().err


def test_a_run_that_memory_has_no_room_for_was_run_all_the_same() -> None:
    small = catalogue.cluster("1x2xH100")
    assert small.uniform is not None
    tight = small.model_copy(update={"uniform": small.uniform.model_copy(update={"memory_bytes": 10**10})})
    request = PlanRequest(profile=PROFILE, topology=tight, global_batch_size=8)
    layout = even_layout(request, tensor=2, sharding="optimizer")
    assert not layout.fits
    prediction = layout.file.plan.prediction
    assert prediction is not None
    result = calibrate_throughput(layout.file, step_ns=2 * prediction.time_per_global_batch_ns)
    assert result.run.before_ns == prediction.time_per_global_batch_ns


def test_one_published_row_orders_four_others() -> None:
    """Megatron-Bridge, llama-3-70b in FP8 on H100: 1,664 tokens/s per GPU on 64; TFLOP/s per GPU of others on 32."""

    def layout(length: int, nodes: int, batch: int, *again: str, tensor: int = 4, pipeline: int = 4) -> PlanFile:
        shape = SHAPES["llama-3-70b"].model_copy(update={"sequence_length": length})
        profile = profile_of(shape, "megatron", ["H100"], micro_batch_sizes=[1])
        cluster = catalogue.cluster(f"{nodes}x8xH100")
        request = PlanRequest(profile=profile, topology=cluster, global_batch_size=batch)
        return even_layout(
            request,
            tensor=tensor,
            pipeline=pipeline,
            virtual_stages=5,
            sharding="optimizer",
            recompute=again or "none",  # type: ignore[arg-type]
        ).file

    measured = {704.0: {}, 668.0: {"pipeline": 8}, 508.7: {"tensor": 8}}
    shown = [layout(4096, 4, 32, **degrees) for degrees in measured.values()]
    result = calibrate_throughput(
        layout(8192, 8, 256, pipeline=8), tokens_per_s_per_gpu=1664, show=[*shown, layout(4096, 4, 32, "mlp")]
    )
    paces = [one.tokens_per_s_per_gpu_after or 0 for one in result.shown]
    pairs = sorted(zip([*measured, 593.6], paces, strict=True))
    assert [pace for _measured, pace in pairs] == sorted(paces)
    for was, pace in pairs:
        assert pace / paces[0] == pytest.approx(was / 704, rel=0.12)
