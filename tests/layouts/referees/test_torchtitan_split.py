"""Exports under the splitting code of torchtitan's two newest releases: every layer, and the head, is in one part."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from installed import RELEASES, under

from penstock.examples import catalogue
from penstock.exporting.layouts import layout_text
from penstock.layouts.torchtitan.model_parts import HEADS
from penstock.layouts.torchtitan.torchtitan import SCHEDULES
from penstock.questions.by_name import import_layout
from penstock.questions.layouts import plan_file
from penstock.schemas.api.layouts import LayoutRequest
from penstock.schemas.plan import PlanFile
from penstock.schemas.request import PlanRequest
from penstock.solvers.schedules.trainer_orders import ranks_of_stages

FULL = {each.rpartition(".")[0]: f"torchtitan-{each}" for each in RELEASES["torchtitan"]}
"""The folders of releases."""


class Shape(NamedTuple):
    """A plan: ``cuts`` end stages before these layers."""

    model: str
    cluster: str
    ranks: int
    schedule: str
    cuts: tuple[int, ...]
    rows: int = 1
    number: int = 4
    sharded: bool = False
    full: bool = False


SHAPES = (
    Shape("gpt", "1x1xV100", 1, "1F1B", ()),
    Shape("gpt", "1x2xV100", 1, "1F1B", (), sharded=True, rows=2),
    Shape("gpt", "1x4xV100", 2, "1F1B", (4,), rows=2),
    Shape("gpt", "1x4xV100", 4, "GPipe", (1, 2, 9), full=True),
    Shape("gpt", "1x4xV100", 2, "Interleaved1F1B", (2, 5, 7), sharded=True),
    Shape("gpt", "2x4xV100", 4, "LoopedBFS", (1, 2, 3, 4, 5, 8, 9), number=8),
    Shape("gpt2-small", "1x4xA100", 2, "ZBVZeroBubble", (3, 6, 11), sharded=True),
    Shape("gpt2-small", "1x3xA100", 3, "ZBVZeroBubble", (1, 3, 5, 8, 13)),
    Shape("gpt2-small", "2x4xA100", 8, "1F1B", (2, 3, 5, 6, 8, 10, 12)),
    Shape("llama-3-8b", "1x8xH100", 4, "1F1B", (9, 17, 26), sharded=True, full=True),
    Shape("llama-3-8b", "2x8xH100", 8, "Interleaved1F1B", tuple(range(2, 32, 2)), number=8),
    Shape("llama-3-70b", "2x8xH100", 16, "1F1B", tuple(range(6, 81, 5)), number=16, full=True),
)


@cache
def plan_of(shape: Shape) -> PlanFile:
    """Plan a shape, on devices with enough memory for any plan."""
    layers = len(catalogue.profile(shape.model).layers)
    topology = catalogue.cluster(shape.cluster)
    devices = sum(len(node.devices) for node in topology.expanded().nodes)
    bounds = [0, *shape.cuts, layers]
    names = [layer.name for layer in catalogue.profile(shape.model).layers]
    replicas = devices // shape.ranks
    document = topology.model_dump(mode="json", exclude_none=True)
    settings = {
        "parallelism": {
            "pipeline_parallel_degree": shape.ranks,
            "pipeline_parallel_schedule": shape.schedule,
            "pipeline_parallel_microbatch_size": shape.rows,
            "data_parallel_shard_degree": replicas if shape.sharded else 1,
            "module_fqns_per_model_part": [names[a:b] for a, b in pairwise(bounds)],
        },
        "training": {"local_batch_size": shape.rows * (shape.number if shape.ranks > 1 else 1)},
        "activation_checkpoint": {"mode": "full" if shape.full else "none"},
    }
    fields = {
        "schema_version": 1,
        "profile": catalogue.profile(shape.model).model_dump(mode="json"),
        "topology": {**document, "uniform": document["uniform"] | {"memory_bytes": 2**43}},
        "global_batch_size": shape.rows * shape.number * replicas,
        "target": "torchtitan",
    }
    request = PlanRequest.parse(fields)
    text = json.dumps(settings)
    return plan_file(
        import_layout(LayoutRequest(format="torchtitan", layout=text, request=request, compare=False), workers=1)
    )


def splits(release: str, texts: list[tuple[str, int]], tier: str) -> list[dict[str, Any]]:
    """Return how a release splits exported texts, each with the number of its model's transformer layers."""
    question = {"release": release, "cases": [{"text": text, "layers": layers} for text, layers in texts]}
    answers: list[dict[str, Any]] = under(FULL[release], "torchtitan_splits.py", question, tier)
    return answers


def expected(stage: tuple[int, int], last: int, head: str) -> list[str]:
    """Return the modules of a stage whose first and last layers count from the embedding."""
    modules = []
    for layer in range(stage[0], stage[1] + 1):
        modules += ["tok_embeddings"] if layer == 0 else ["norm", head] if layer == last else [f"layers.{layer - 1}"]
    return modules


@pytest.mark.parametrize("release", sorted(HEADS))
def test_every_layer_of_twelve_plans_is_kept(release: str, pytestconfig: pytest.Config) -> None:
    assert len(SHAPES) == 12
    files = [plan_of(shape) for shape in SHAPES]
    layers = [len(catalogue.profile(shape.model).layers) - 2 for shape in SHAPES]
    texts = [layout_text(file, "torchtitan", release) for file in files]
    answers = splits(release, list(zip(texts, layers, strict=True)), pytestconfig.getoption("tier"))
    parts = 0
    for shape, file, answer, number in zip(SHAPES, files, answers, layers, strict=True):
        stages = [stage.layers for stage in file.plan.pipelines[0].stages]
        chunks = len(stages) // shape.ranks
        names_of = {index: names for rank in answer["ranks"] for index, names in rank}
        assert sorted(name for names in names_of.values() for name in names) == sorted(answer["whole"]), shape
        for s, stage in enumerate(stages):
            modules = {name.rpartition(".")[0] for name in names_of[s]}
            assert modules == set(expected(stage, number + 1, HEADS[release])), (shape, s)
            parts += 1
        rank_of = [next(r for r, rank in enumerate(answer["ranks"]) if s in dict(rank)) for s in range(len(stages))]
        assert rank_of == list(ranks_of_stages(SCHEDULES[shape.schedule], shape.ranks, chunks)), shape
        replicas = file.plan.pipelines[0].stages[0]
        assert answer["replicate"] * answer["shard"] == len(replicas.devices)
        assert answer["recomputes"] == shape.full
        assert answer["micro_batch"] == shape.rows
        assert answer["local"] == shape.rows * (shape.number if shape.ranks > 1 else 1)
        assert answer["global"] == file.plan.global_batch_size
    assert parts == sum(len(shape.cuts) + 1 for shape in SHAPES) > 70


@pytest.mark.parametrize("release", sorted(HEADS))
def test_the_other_releases_name_loses_the_head(release: str, pytestconfig: pytest.Config) -> None:
    shape = SHAPES[2]
    (other,) = HEADS.keys() - {release}
    text = layout_text(plan_of(shape), "torchtitan", release).replace(f'"{HEADS[release]}"', f'"{HEADS[other]}"')
    (answer,) = splits(release, [(text, 8)], pytestconfig.getoption("tier"))
    kept = {name for rank in answer["ranks"] for _index, names in rank for name in names}
    lost = {name.rpartition(".")[0] for name in set(answer["whole"]) - kept}
    assert lost == {HEADS[release]}
