"""``penstock.fits`` and ``penstock fits``: which layouts are legal and fit, in which order, and every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.cli.main import main
from penstock.examples import catalogue
from penstock.examples.shapes import SHAPES
from penstock.planning.fits import MOST_LAYOUTS
from penstock.schemas.api.fits import FitsAnswer
from penstock.schemas.errors import InvalidDocument, PenstockError, UnsupportedRequest
from penstock.schemas.topology import ClusterTopology

LLAMA_CONFIG = {
    "model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "hidden_size": 8192,
    "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672, "max_position_embeddings": 8192,
}  # fmt: skip


def test_rows_that_fit_come_first_and_then_by_what_is_left() -> None:
    answer = penstock.fits("llama-3-70b", "8x8xH100", rows=1000)
    assert answer.legal == len(answer.rows)
    assert answer.legal + sum(one.layouts for one in answer.refused) == answer.tried
    assert [row.fits for row in answer.rows] == sorted((row.fits for row in answer.rows), reverse=True)
    assert [row.headroom_bytes for row in answer.rows] == sorted((r.headroom_bytes for r in answer.rows), reverse=True)
    for row in answer.rows:
        parts = row.memory.model_dump()
        total = parts.pop("total_bytes")
        assert total == sum(parts.values())
        assert row.headroom_bytes == answer.available_bytes - total
        assert row.fits == (row.headroom_bytes >= 0)
        assert row.tensor * row.context * row.pipeline * row.data == answer.gpus == 64


def test_a_configuration_is_the_shape_that_it_describes(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_CONFIG))
    by_name, by_file, by_value = (penstock.fits(one, "8x8xH100") for one in ("llama-3-70b", path, LLAMA_CONFIG))
    assert by_file == by_value
    assert by_file.rows == by_name.rows
    assert penstock.fits(SHAPES["llama-3-70b"], catalogue.cluster("8x8xH100")) == by_name


@pytest.mark.parametrize(
    ("arguments", "pointer", "words"),
    [
        ({"tensor": 5}, "/tensor", "tensor 5 does not divide 64 attention heads"),
        ({"tensor": [3, 5]}, "/tensor", "tensor 3 does not divide 64"),
        ({"tensor": 128}, "/tensor", "tensor 128 does not divide 64 GPUs"),
        ({"pipeline": 64, "virtual_stages": 2}, "/virtual_stages", "80 layers are fewer than 128 stages"),
        ({"context": 64, "tensor": 8}, "/context", "= 512 does not divide 64 GPUs"),
        ({"context": 16, "context_kind": "all_to_all"}, "/context", "does not divide 8 key and value heads"),
        ({"expert": 2}, "/expert", "has no experts"),
        ({"sharding": "parameters", "pipeline": 2}, "/sharding", "gathered again"),
        ({"virtual_stages": 3, "pipeline": 1}, "/virtual_stages", "virtual stages 3 need a pipeline"),
        ({"micro_batch_size": 3, "global_batch_size": 64, "pipeline": 4}, "/global_batch_size", "does not divide"),
    ],
)
def test_an_illegal_degree_is_refused_with_its_rule(arguments: dict[str, Any], pointer: str, words: str) -> None:
    with pytest.raises(UnsupportedRequest) as caught:
        penstock.fits("llama-3-70b", "8x8xH100", **arguments)
    assert pointer in {fault.pointer for fault in caught.value.faults}
    assert words in str(caught.value)


def test_one_illegal_value_of_several_leaves_an_answer_for_the_others() -> None:
    answer = penstock.fits("llama-3-70b", "8x8xH100", tensor=[4, 5], pipeline=[2, 7])
    assert {(row.tensor, row.pipeline) for row in answer.rows} == {(4, 2)}
    refused = [each for each in answer.assumptions if each.startswith("no layout has ")]
    assert [each.partition(":")[0] for each in refused] == ["no layout has tensor 5", "no layout has pipeline 7"]
    assert sum(one.layouts for one in answer.refused) == 3


@pytest.mark.parametrize(
    ("pipeline", "virtual_stages", "words"),
    [
        (8, 1, "pipeline 8: stages of 5 or 8 layers, by --decoder-last-pipeline-num-layers 5"),
        (16, 1, "pipeline 16: stages of 1 or 4 layers, by --decoder-last-pipeline-num-layers 1"),
        (
            8,
            4,
            "stages of 1 or 2 layers, by --pipeline-model-parallel-layout 'Et|(t*2|)*29t|tL'",
        ),
    ],
)
def test_stages_that_are_not_even_are_judged_with_the_flags_that_make_them(
    pipeline: int, virtual_stages: int, words: str
) -> None:
    """DeepSeek-V3 has 61 layers, which no usual number of stages divides."""
    degrees = {"pipeline": pipeline, "virtual_stages": virtual_stages, "tensor": 1, "expert": 16}
    answer = penstock.fits("deepseek-v3", "32x8xH100", sequence_length=4096, **degrees)
    assert answer.legal == 1
    assert any(words in each for each in answer.assumptions)


@pytest.mark.parametrize(
    ("model", "cluster", "arguments", "words"),
    [
        ("llama-3-70b", "8x8xH100", {"tensor": 0}, "greater than or equal to 1"),
        ("llama-3-70b", "8x8xH100", {"precision": "fp8"}, "precision"),
        ("llama-3-70b", "8x8xH100", {"offload": True}, "offload"),
        ("llama-3-70b", "8x8xH100", {"sharding": "offload"}, "parameters_kept"),
        ("llama-3-70b", "8x8xH100", {"recompute": "selective"}, "attention"),
        ("llama-3-70b", "8x8xH100", {"context_kind": "p2p"}, "'ring', 'all_gather' or 'all_to_all'"),
        ("llama-3", "8x8xH100", {}, "llama-3-8b"),
        ("nowhere.json", "8x8xH100", {}, "cannot read"),
        ("gpt2-small", "2x8xFOO", {}, "no device kind 'FOO'"),
        ("gpt2-small", "8xA100", {"sequence_length": 4096}, "1024 learned positions"),
    ],
)
def test_bad_input_is_named(model: str, cluster: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(PenstockError, match=words):
        penstock.fits(model, cluster, **arguments)


def test_devices_that_stand_for_groups_are_refused() -> None:
    topology = catalogue.cluster("1x8xH100").model_dump(mode="json", exclude_none=True)
    topology["uniform"]["gpus"] = 2
    with pytest.raises(UnsupportedRequest, match="has 2 GPUs"):
        penstock.fits("gpt2-small", ClusterTopology.parse(topology))
    with pytest.raises(InvalidDocument, match="give either `shape` or `hugging_face`"):
        penstock.fits(LLAMA_CONFIG, "8xH100", shape=SHAPES["gpt"].model_dump())


def test_mixed_memory_counts_as_the_smallest() -> None:
    nodes = [
        {"name": kind, "devices": [{"id": f"{kind}/{i}", "kind": kind, "memory_bytes": size} for i in range(2)]}
        for kind, size in (("A", 80 * 2**30), ("B", 40 * 2**30))
    ]
    links = [{"a": "A", "b": "B", "bandwidth_bytes_per_s": 10**9}]
    topology = ClusterTopology.parse({"name": "mixed", "nodes": nodes, "links": links})
    answer = penstock.fits("gpt2-small", topology)
    assert answer.available_bytes == 40 * 2**30
    assert any("smallest" in one for one in answer.assumptions)


def test_up_to_the_most_layouts_are_tried() -> None:
    arguments = {"tensor": "all", "context": "all", "pipeline": "all", "sharding": "all", "framework": "torch"}
    answer = penstock.fits("llama-3.1-405b", "128x8xH100", **arguments, micro_batch_size=[1, 2])
    assert MOST_LAYOUTS / 2 < answer.tried <= MOST_LAYOUTS
    with pytest.raises(UnsupportedRequest, match=r"5 of sharding(?s:.*) give values instead of 'all'"):
        penstock.fits("llama-3.1-405b", "128x8xH100", **arguments, virtual_stages="all")


def test_long_pipelines_in_many_layouts_are_refused() -> None:
    deep = SHAPES["llama-3.1-405b"].model_copy(update={"layers": 4096})
    arguments = {"tensor": 1, "pipeline": 4096, "sharding": ["none", "optimizer"]}
    assert penstock.fits(deep, "512x8xH100", **arguments).legal == 2
    with pytest.raises(UnsupportedRequest, match="128 legal layouts have 524,288 stages; the limit is 131,072"):
        penstock.fits(deep, "512x8xH100", **arguments, micro_batch_size=list(range(1, 65)))


def test_what_helps_helps() -> None:
    plain, full, sharded = (
        penstock.fits("llama-3-8b", "1x8xH100", tensor=1, pipeline=1, **more).rows[0].memory
        for more in ({}, {"recompute": "full"}, {"sharding": "parameters"})
    )
    assert full.activations_bytes < plain.activations_bytes / 4
    assert sharded.parameters_bytes * 7 < plain.parameters_bytes


COMMAND = ["fits", "--example", "llama-3-70b", "--cluster", "8x8xH100"]


@pytest.mark.tier("ci")
def test_the_command_prints_what_python_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--tensor", "4,8", "--json"]) == 0
    answer = FitsAnswer.model_validate_json(capsys.readouterr().out)
    assert answer == penstock.fits("llama-3-70b", "8x8xH100", tensor=[4, 8])
    assert main([*COMMAND, "--tensor", "4,8"]) == 0
    shown = capsys.readouterr().out
    assert f"{answer.fitting} of {answer.legal} legal layouts fit" in shown
    assert f"{answer.rows[0].memory.total_bytes / 2**30:.1f}" in shown
    assert all(one.sentence in shown for one in answer.refused)
    assert "sharding" not in shown.splitlines()[0]
    main([*COMMAND, "--tensor", "8", "--pipeline", "1", "--sharding", "optimizer,parameters", "--rows", "1"])
    assert "recomputing nothing, sharding parameters; GiB" in capsys.readouterr().out, "no column tells it"


@pytest.mark.tier("ci")
@pytest.mark.parametrize(
    ("once", "several"),
    [
        (["--tensor", "4,8"], ["--tensor", "4", "--tensor", "8"]),
        (["--tensor", "8", "--pipeline", "2,4"], ["--tensor", "8", "--pipeline", "2", "--pipeline", "4"]),
        (["--sharding", "none,optimizer"], ["--sharding", "none", "--sharding", "optimizer"]),
    ],
)
def test_options_that_are_given_several_times_are_added_up(
    once: list[str], several: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """As the options of ``penstock plan``: the last value alone has fewer layouts."""
    answers, last_alone = [], [*several[:-4], *several[-2:]]
    for words in (once, several, last_alone):
        main([*COMMAND, *words, "--json"])
        answers.append(FitsAnswer.model_validate_json(capsys.readouterr().out))
    assert answers[0] == answers[1]
    assert answers[2].legal < answers[1].legal


@pytest.mark.tier("ci")
def test_how_sequences_are_shared_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """A ring's buffers are larger than what an all-to-all sends."""
    arguments = ["--tensor", "2", "--pipeline", "4", "--context", "4", "--sequence-length", "131072", "--json"]
    memory = {}
    for kind in ("ring", "all-to-all"):
        assert main([*COMMAND, *arguments, "--context-kind", kind]) == 3, "nothing fits, and memory is said"
        answer = FitsAnswer.model_validate_json(capsys.readouterr().out)
        assert any(each.endswith(f"by {kind.replace('-', '_')}") for each in answer.assumptions)
        memory[kind] = answer.rows[0].memory.activations_bytes
    assert memory["ring"] > memory["all-to-all"]


def test_routing_of_tokens_decides_what_experts_keep() -> None:
    """Twice the even share, as a capacity or on the busiest GPU, is half as much again or more; 1 is even."""
    arguments = {"tensor": 1, "expert": 8, "pipeline": 1, "sequence_length": 4096}
    kept = [
        penstock.fits("qwen3-30b-a3b", "8xH100", **arguments, **more).rows[0].memory.activations_bytes
        for more in ({}, {"routing_imbalance": 1.0}, {"routing_imbalance": 2.0}, {"capacity_factor": 2.0})
    ]
    assert kept[0] == kept[1] < kept[2]
    assert kept[0] < kept[3]
    with pytest.raises(UnsupportedRequest, match="llama-3-8b has no experts"):
        penstock.fits("llama-3-8b", "8xH100", capacity_factor=1.0)


@pytest.mark.tier("ci")
@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["--capacity-factor", "1"], 65, "has no experts"),
        (["--tensor", "5"], 65, "nearest: tensor 2, 4, 8"),
        (["--tensor", "0"], 65, "greater than or equal to 1"),
        (["--tensor", "x"], 64, "not a number, a list of numbers"),
        (["--tensor", "8", "--tensor", "all"], 64, "'8,all' is not a number, a list of numbers"),
        (["--tensor", "1", "--pipeline", "1"], 3, "nothing fits: try --recompute full"),
        (["--hf", "config.json"], 64, "either --example or --hf"),
        (["--framework", "jax"], 65, "megatron"),
        (["--context-kind", "p2p"], 65, "none of ring, all-gather, all-to-all"),
        (["--recompute", "everything"], 65, "recompute"),
        (["--offload"], 64, "No such option"),
    ],
)
def test_exit_codes(words: list[str], code: int, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, *words]) == code
    printed = capsys.readouterr()
    assert expected in printed.out + printed.err


@pytest.mark.tier("ci")
def test_a_configuration_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    for text, expected in (("[1]", "not the object"), ("{", "JSON"), ('{"model_type": "bloom"}', "known are llama")):
        path.write_text(text)
        assert main(["fits", "--hf", str(path), "--cluster", "8xH100"]) == 65
        assert expected in capsys.readouterr().err
