"""Exports at all degrees under megatron-core itself: every rank has the plan's layers, groups and order."""

from __future__ import annotations

import ast
import subprocess
from typing import Any

import pytest
from drawn_plans import PLANS, Drawn, neighbours, plan_of
from installed import RELEASES, folder_of, under

from penstock.exporting.layouts import layout_text
from penstock.layouts.megatron.bridge import OF_EXPERTS, SETTINGS
from penstock.schemas.program import BACKWARD, FORWARD, parse_row

(RELEASE,) = (f"megatron-core-{each}" for each in RELEASES["megatron-core"])
(BRIDGE,) = (f"megatron-bridge-{each}" for each in RELEASES["megatron-bridge"])
KINDS = {"F": FORWARD, "B": BACKWARD}
pytestmark = pytest.mark.timeout(900)


def words_of(text: str) -> list[str]:
    """Return the flags as a shell passes them to a training script."""
    done = subprocess.run(
        ["bash", "-euc", text + '\nprintf "%s\\n" "${PIPELINE_ARGS[@]}"'], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def model_of(drawn: Drawn) -> dict[str, Any]:
    """Return the user's own flags, which are the model's."""
    shape = drawn.profile.shape
    assert shape is not None
    model: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "ffn_hidden_size": shape.ffn,
        "add_bias_linear": False,
    }
    if shape.latent is None:
        model["num_query_groups"] = shape.kv_heads
    else:
        model["multi_latent_attention"] = True
    if shape.experts is not None:
        model |= {"num_moe_experts": shape.experts.number, "moe_ffn_hidden_size": shape.experts.ffn}
        model |= {"moe_shared_expert_intermediate_size": shape.experts.shared_ffn or None}
    return model


@pytest.fixture(scope="module")
def judged(pytestconfig: pytest.Config) -> list[tuple[Drawn, dict[str, Any]]]:
    """Random plans, and what Megatron says of them."""
    tier = pytestconfig.getoption("tier")
    drawn = [plan_of(seed, "megatron") for seed in range(PLANS)]
    cases = [
        {
            "words": words_of(layout_text(each.file, "megatron")),
            "bridge": layout_text(each.file, "megatron-bridge"),
            "model": model_of(each),
            "world": len(each.world),
        }
        for each in drawn
    ]
    answers = under(RELEASE, "megatron_referee.py", {"cases": cases}, tier)
    return list(zip(drawn, answers, strict=True))


def test_every_plan_is_taken(judged: list[tuple[Drawn, dict[str, Any]]]) -> None:
    assert [(seed, case["refused"]) for seed, (_drawn, case) in enumerate(judged) if "refused" in case] == []


def test_every_rank_has_the_layers_of_the_plan(judged: list[tuple[Drawn, dict[str, Any]]]) -> None:
    for drawn, case in judged:
        last = drawn.stages[-1][1]
        each = len(drawn.world) // drawn.ranks
        for process, rank in enumerate(case["ranks"]):
            rank_stages = drawn.stages[process // each :: drawn.ranks]
            assert rank["stages"] == [
                {
                    "layers": [layer - 1 for layer in range(first, end + 1) if 0 < layer < last],
                    "embedding": first == 0,
                    "head": end == last,
                }
                for first, end in rank_stages
            ]


def test_every_rank_shares_with_the_ranks_that_the_plan_says(judged: list[tuple[Drawn, dict[str, Any]]]) -> None:
    """A stage's GPUs are replica after replica, in it one part of the sequence after the other, tensor fastest."""
    for drawn, case in judged:
        tensor, context, expert, expert_tensor = drawn.degrees
        dense, sparse = (tensor, context), (expert_tensor, expert)
        each = len(drawn.world) // drawn.ranks
        for process, rank in enumerate(case["ranks"]):
            wanted = {
                "tensor": neighbours(drawn, process, dense, [0]),
                "context": neighbours(drawn, process, dense, [1]),
                "replicas": neighbours(drawn, process, dense, [2]),
                "dense": neighbours(drawn, process, dense, [1, 2]),
                "pipeline": [process % each + r * each for r in range(drawn.ranks)],
            }
            if drawn.has_experts:
                wanted |= {
                    "expert_tensor": neighbours(drawn, process, sparse, [0]),
                    "expert": neighbours(drawn, process, sparse, [1]),
                    "expert_replicas": neighbours(drawn, process, sparse, [2]),
                }
            assert {name: rank["groups"][name] for name in wanted} == wanted


def test_every_rank_runs_the_order_of_the_plan(judged: list[tuple[Drawn, dict[str, Any]]]) -> None:
    operations = 0
    for drawn, case in judged:
        rows = {device: row for row in drawn.file.plan.schedule.rows for device in row.devices}
        each = len(drawn.world) // drawn.ranks
        for process, rank in enumerate(case["ranks"]):
            assert rank["micro_batches"] == drawn.number
            row = rows[drawn.world[process // each * each]]
            ran = [(KINDS[kind], chunk * drawn.ranks + process // each, m) for kind, chunk, m in rank["order"]]
            home = [s for s in range(len(drawn.stages)) if s % drawn.ranks == process // each]
            assert ran == [tuple(operation) for operation in parse_row(row.text, home[0] if len(home) == 1 else None)]
            operations += len(ran)
    assert operations > 100 * len(judged)


def test_the_same_is_recomputed(judged: list[tuple[Drawn, dict[str, Any]]]) -> None:
    whole = {"none", "block", "uniform"}
    seen = set()
    for drawn, case in judged:
        for rank in case["ranks"]:
            stage = drawn.file.plan.pipelines[0].stages[0].recompute
            granularity, method, layers = rank["recompute"]
            if hasattr(stage, "modules"):
                assert (granularity, method, layers) == ("selective", None, None)
                assert len(rank["modules"]) >= len(stage.modules)
            assert rank["sequence_parallel"] == (drawn.degrees.tensor > 1)
            seen.add(method or granularity or "none")
    assert seen <= whole | {"selective"}


def test_a_recipe_is_given_what_the_flags_say(judged: list[tuple[Drawn, dict[str, Any]]]) -> None:
    assert [(seed, case["bridge"]) for seed, (_drawn, case) in enumerate(judged) if case["bridge"]] == []


def test_bridges_classes_have_every_attribute_that_is_set(pytestconfig: pytest.Config) -> None:
    """Attributes are of ``config.train``, ``ddp`` and ``comm_overlap``; the model's attributes are Megatron-Core's."""
    tier = pytestconfig.getoption("tier")
    source = folder_of(BRIDGE, tier) / "megatron" / "bridge" / "training"
    core = folder_of(RELEASE, tier) / "megatron" / "core"
    fields: set[str] = set()
    for path in (
        source / "config.py",
        source / "comm_overlap.py",
        core / "transformer" / "transformer_config.py",
        core / "model_parallel_config.py",
        core / "distributed" / "distributed_data_parallel_config.py",
    ):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                fields.add(node.target.id)
    written = {name for name, _otherwise in SETTINGS.values()} | set(OF_EXPERTS.values())
    assert {name.rpartition(".")[2] for name in written} <= fields
