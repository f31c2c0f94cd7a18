"""``scripts/bench-degrees`` leaves out no layout: its ten best equal the ten best of all, judged without a bound."""

from __future__ import annotations

from itertools import product

import pytest
from bench_degrees import BEST, CASES, Case, Uniform, answered, report, request_of

import penstock
from penstock.examples.catalogue import cluster
from penstock.examples.shapes import SHAPES
from penstock.schemas.errors import PenstockError
from penstock.schemas.request import MemoryModel, PlanRequest, Termination
from penstock.schemas.transformers.degrees import Degrees
from penstock.shapes.profiled_degrees import DegreeOptions
from penstock.shapes.profiles import profile_of

LAYERS, BATCH = 14, 8


def _request(free_bytes: int) -> PlanRequest:
    """Return a request for a model that needs more than ``free_bytes`` on a GPU unless it is divided."""
    shape = SHAPES["llama-3-8b"].model_copy(update={"layers": LAYERS})
    return PlanRequest(
        profile=profile_of(
            shape,
            "megatron",
            ("H100",),
            micro_batch_sizes=(1, 2, 4),
            degrees=DegreeOptions(tensor=(2, 4), context=(1,)),
        ),
        topology=cluster("2x4xH100"),
        global_batch_size=BATCH,
        memory=MemoryModel(headroom_bytes=80 * 2**30 - free_bytes),
        degrees="auto",
        sharding="auto",
    )


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("free_bytes", [80 * 2**30, 30 * 2**30], ids=("roomy", "tight"))
def test_the_ten_best_are_those_of_all(free_bytes: int) -> None:
    request, every, too_large = _request(free_bytes), [], 0
    parts, sizes = range(1, LAYERS + 3), (1, 2, 4, 8)
    for tensor, pipeline, chunks, size in product((1, 2, 4), (1, 2, 4, 8), parts, sizes):
        for sharding, recompute in product(("none", "optimizer", "gradients", "parameters"), ("none", "full")):
            try:
                layout = penstock.even_layout(
                    request,
                    tensor=tensor,
                    pipeline=pipeline,
                    virtual_stages=chunks,
                    micro_batch_size=size,
                    sharding=sharding,  # type: ignore[arg-type]
                    recompute=recompute,  # type: ignore[arg-type]
                )
            except PenstockError:
                continue
            assert layout.file.plan.prediction is not None
            too_large += not layout.fits
            if layout.fits:
                every.append(layout.file.plan.prediction.time_per_global_batch_ns)
    uniform = Uniform(request)
    assert [each.time_ns for each in uniform.best] == sorted(every)[:BEST]
    counts = uniform.counts
    assert (counts["too large"] > 10) == (too_large > 10) == (free_bytes < 80 * 2**30)
    assert counts["judged"] < len(every)
    left_out = sum(counts[each] for each in ("illegal", "too large", "slower by load"))
    assert counts["layouts"] == counts["judged"] + left_out


def test_a_profile_that_is_too_quick_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = _request(80 * 2**30)
    times = {"forward_ns": 1, "backward_ns": 2}
    model = quick.profile.model_copy(  # type: ignore[union-attr]
        update={
            "measurements": tuple(
                each.model_copy(update={"layers": tuple(layer.model_copy(update=times) for layer in each.layers)})
                for each in quick.profile.measurements  # type: ignore[union-attr]
            )
        }
    )
    request = quick.model_copy(update={"profile": model})
    monkeypatch.setattr("bench_degrees.request_of", lambda *_arguments: request)
    with pytest.raises(SystemExit, match=r"% of the peak; dense models on H100 use 25–60 %"):
        report(Case("llama-3-8b", "2x4xH100", 16), "megatron", 1, planned=False)


def test_the_requests_leave_degrees_and_sharding_open() -> None:
    request = request_of(CASES[0], "torch", 3)
    assert (request.degrees, request.sharding, request.termination.max_plans) == ("auto", "auto", 3)
    assert request.global_batch_size == 64


@pytest.mark.tier("nightly")
def test_open_degrees_are_never_slower_than_degree_1_or_a_uniform_layout() -> None:
    request = _request(30 * 2**30).model_copy(update={"termination": Termination(max_plans=1)})
    ours, one = answered(request), answered(request.model_copy(update={"degrees": Degrees()}))
    assert ours.time_ns <= min(one.time_ns, Uniform(request).best[0].time_ns)
    assert ours.plan.certificates[0].bound_ns <= one.plan.certificates[0].bound_ns
