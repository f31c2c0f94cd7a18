"""The reader of PipeDream's and DAPPLE's profile text."""

from __future__ import annotations

import random

import pytest

from penstock.convert import to_problem
from penstock.examples import catalogue
from penstock.importers.pipedream import read_profile
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import PlanRequest
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Stage, single_pipeline
from penstock.solvers.schedules.early_backward import early_backward


def node(
    number: int, name: str, forward: object = 1, backward: object = 2, out: object = 100, params: object = 8
) -> str:
    return (
        f"node{number} -- {name} -- forward_compute_time={forward}, backward_compute_time={backward}, "
        f"activation_size={out}, parameter_size={params}"
    )


def text(nodes: list[str], edges: list[tuple[int, int]], indent: str = "\t") -> str:
    return "\n".join(nodes + [f"{indent}node{a} -- node{b}" for a, b in edges]) + "\n"


def read(source: str, micro_batch_size: int = 2) -> ModelProfile:
    return read_profile(source, name="small", micro_batch_size=micro_batch_size)


def crossing(profile: ModelProfile) -> list[dict[str, int]]:
    return [{tensor.name: tensor.bytes_per_sample for tensor in cut} for cut in profile.boundaries]


def test_reads_times_sizes_and_order() -> None:
    nodes = [node(2, "fc", 0.0015, 3, "51.0", "400.000"), node(1, "conv", 1.5, 3.25, 101, 8)]
    profile = read(text(nodes, [(1, 2)]))
    assert [layer.name for layer in profile.layers] == ["conv", "fc"]
    assert [layer.parameter_bytes for layer in profile.layers] == [8, 400]
    (measured,) = profile.measurements
    assert (measured.device_kind, measured.micro_batch_size) == ("V100", 2)
    assert [(m.forward_ns, m.backward_ns, m.stash_bytes) for m in measured.layers] == [
        (1_500_000, 3_250_000, 101),
        (1_500, 3_000_000, 51),
    ]
    assert crossing(profile) == [{"conv": 51}]
    assert profile.source.method == "imported"


@pytest.mark.parametrize("indent", ["\t", " \t", "  "])
def test_input_nodes_are_dropped_whatever_the_indent(indent: str) -> None:
    nodes = [node(1, "Input0", 17, 0, 4000, 0), node(2, "a"), node(3, "b")]
    profile = read(text(nodes, [(1, 2), (1, 3), (2, 3)], indent))
    assert crossing(profile) == [{"a": 50}]
    assert any("Input0" in note for note in profile.assumptions)


def test_parameterless_sources_become_model_inputs() -> None:
    nodes = [
        node(1, "input_ids", 0.01, 0, 10, 0),
        node(2, "attention_mask", 0.01, 0, 1_000, 0),
        node(3, "embeddings", 0.05, 0, 100, 64),
        node(4, "layer_0"),
        node(5, "layer_1"),
    ]
    profile = read(text(nodes, [(1, 2), (1, 3), (3, 4), (2, 4), (4, 5), (2, 5)]))
    assert crossing(profile) == [{"embeddings": 50}, {"layer_0": 50}]
    assert any("input_ids, attention_mask" in note for note in profile.assumptions)


def test_a_first_layer_without_parameters_but_with_backward_is_kept() -> None:
    profile = read(text([node(1, "pool", params=0), node(2, "fc")], [(1, 2)]))
    assert [layer.name for layer in profile.layers] == ["pool", "fc"]


def test_a_skip_crosses_every_cut_once_and_travels_hop_by_hop() -> None:
    nodes = [node(1, "a", out=10), node(2, "b", out=20), node(3, "c", out=30), node(4, "d", out=40)]
    profile = read(text(nodes, [(1, 2), (2, 3), (1, 4), (3, 4), (1, 3)]))
    assert crossing(profile) == [{"a": 5}, {"a": 5, "b": 10}, {"a": 5, "c": 15}]


def test_several_outputs_one_per_reader_or_all_together() -> None:
    nodes = [node(1, "cell", out="[10; 30]"), node(2, "b", out=2), node(3, "c", out=2), node(4, "d", out="[4; 6; 8]")]
    nodes.append(node(5, "e", out=2))
    profile = read(text(nodes, [(1, 2), (1, 3), (2, 3), (3, 4), (4, 5)]))
    assert crossing(profile) == [
        {"cell.0": 5, "cell.1": 15},
        {"cell.1": 15, "b": 1},
        {"c": 1},
        {"d.0": 2, "d.1": 3, "d.2": 4},
    ]
    assert profile.measurements[0].layers[0].stash_bytes == 40


def test_one_output_written_once_per_reader_is_one_tensor() -> None:
    """Cells as DAPPLE writes AmoebaNet-36: the next two cells read what a cell makes, and its size stands twice."""
    nodes = [node(i, f"cell_{i}", out=f"[{10 * i}; {10 * i}]") for i in range(1, 4)]
    nodes += [node(4, "cell_4", out=40), node(5, "head", out=2)]
    profile = read(text(nodes, [(1, 2), (1, 3), (2, 3), (2, 4), (3, 4), (3, 5), (4, 5)]))
    assert crossing(profile) == [
        {"cell_1": 5},
        {"cell_1": 5, "cell_2": 10},
        {"cell_2": 10, "cell_3": 15},
        {"cell_3": 15, "cell_4": 20},
    ]
    assert [layer.stash_bytes for layer in profile.measurements[0].layers] == [10, 20, 30, 40, 2]
    assert any("one tensor that all of them read" in note for note in profile.assumptions)


def test_outputs_of_several_sizes_stay_apart() -> None:
    """Two of three entries are equal: by the text they may be a state and a cell, so each reader gets its own."""
    nodes = [node(1, "cell", out="[20; 6; 6]"), node(2, "a"), node(3, "b"), node(4, "c")]
    profile = read(text(nodes, [(1, 2), (1, 3), (1, 4)]))
    assert crossing(profile) == [
        {"cell.0": 10, "cell.1": 3, "cell.2": 3},
        {"cell.1": 3, "cell.2": 3},
        {"cell.2": 3},
    ]
    assert profile.measurements[0].layers[0].stash_bytes == 32


def test_an_item_of_a_list_is_the_tensor_that_its_writer_made() -> None:
    """As PipeDream's profiler writes GNMT: an LSTM's output 0 goes on, its state is taken out and not read."""
    nodes = [
        node(1, "LSTM(8, 4)", out="[60; 6; 6]"),
        node(2, "__getitem__(0)", 0, 0, 60, 0),
        node(3, "__getitem__(1)", 0, 0, 6, 0),
        node(4, "Dropout(p=0.2)", out=60, params=0),
        node(5, "Add", out=60, params=0),
        node(6, "__getitem__(0)", out=60, params=0),
    ]
    profile = read(text(nodes, [(1, 2), (1, 3), (2, 4), (2, 5), (4, 5), (5, 6)]))
    assert crossing(profile) == [
        {"LSTM.0": 30, "LSTM.1": 3},
        {"LSTM.0": 30, "LSTM.1": 3},
        {"LSTM.0": 30},
        {"LSTM.0": 30, "Dropout": 30},
        {"Add": 30},
    ]
    assert [layer.stash_bytes for layer in profile.measurements[0].layers] == [72, 0, 0, 60, 60, 60]
    assert any("makes no tensor of its own" in note for note in profile.assumptions)


@pytest.mark.parametrize("wrong", ["__getitem__(2)", "__getitem__(x)", "__getitem__(0)(1)"])
def test_what_is_no_item_of_the_list_makes_a_tensor_of_its_own(wrong: str) -> None:
    """A list of two sizes has no third entry; entry 0 has another size than what the node writes."""
    nodes = [node(1, "cell", out="[60; 6]"), node(2, wrong, out=60, params=0), node(3, "a")]
    profile = read(text(nodes, [(1, 2), (2, 3)]))
    assert crossing(profile) == [{"cell.0": 30, "cell.1": 3}, {"__getitem__": 30}]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_stage_of_all_layers_takes_the_sum_of_its_layers(replicas: int) -> None:
    """By hand: 4 layers of 1 + 2 ms for 2 samples, in 4 micro-batches of 2 samples, each by one device or halved.

    What layers hand on to later layers costs the stage neither time nor buffers; without parameters nothing is reduced.
    """
    nodes = [node(i, f"cell_{i}", out="[100; 100]", params=0) for i in (1, 2)]
    nodes += [node(3, "cell_3", params=0), node(4, "head", params=0)]
    profile = read(text(nodes, [(1, 2), (1, 3), (2, 3), (2, 4), (3, 4)]))
    request = PlanRequest(profile=profile, topology=catalogue.cluster("2xV100"), global_batch_size=8)
    problem = to_problem(request)
    plan = single_pipeline((Stage(0, 3, tuple(range(replicas))),), 4)
    timeline = simulate(problem, plan, early_backward(problem, plan, warmup=(1,)))
    assert timeline.time_per_global_batch_ns == 4 * 4 * 3_000_000 // replicas
    assert [use.memory.buffers for use in timeline.uses.values()] == [0] * replicas


def test_equal_operations_are_told_apart_by_their_node() -> None:
    profile = read(
        text(
            [node(1, "ReLU(inplace)"), node(2, "Conv2d(3, 64, bias=False)"), node(7, "ReLU(inplace)")], [(1, 2), (2, 7)]
        )
    )
    assert [layer.name for layer in profile.layers] == ["ReLU.1", "Conv2d", "ReLU.7"]
    assert profile.layers[1].members == ("Conv2d(3, 64, bias=False)",)


def test_missing_times_and_a_stage_id_are_tolerated() -> None:
    source = (
        "node1 -- a -- activation_size=10, parameter_size=0 -- stage_id=0\n" + node(2, "b") + "\n\tnode1 -- node2\n"
    )
    profile = read(source.replace("node1 -- a", "node1 -- a").replace("parameter_size=0 ", "parameter_size=4 "))
    assert profile.measurements[0].layers[0].forward_ns == 0
    assert any("forward_compute_time" in note for note in profile.assumptions)


def test_the_order_does_not_depend_on_the_lines() -> None:
    nodes = [node(i, f"n{i}", out=8 * i) for i in range(1, 13)]
    edges = [(i, j) for i in range(1, 13) for j in range(i + 1, 13) if (i * j) % 5 == 1 or j == i + 1]
    expected = read(text(nodes, edges)).model_dump()
    shuffler = random.Random(3)
    for _ in range(5):
        shuffler.shuffle(nodes)
        shuffler.shuffle(edges)
        assert read(text(nodes, edges)).model_dump() == expected


def test_forty_eight_layers_keep_their_cuts_and_parameters() -> None:
    nodes = [node(1, "input_ids", 0, 0, 9216, 0), node(2, "attention_mask", 0, 0, 3538944, 0)]
    nodes += [node(3, "embeddings", 0.056, 0, 4325376, 127131648)]
    nodes += [node(4 + i, f"layer_{i}", 2.69, 4.47, 4325376, 50384896) for i in range(48)]
    edges = [(1, 2), (1, 3)] + [(i, i + 1) for i in range(3, 51)] + [(2, i) for i in range(4, 52)]
    profile = read(text(nodes, edges))
    assert len(profile.boundaries) == 48
    assert crossing(profile)[20] == {"layer_19": 4325376 // 2}
    assert all(len(cut) == 1 for cut in profile.boundaries)
    assert sum(layer.parameter_bytes for layer in profile.layers) == 127131648 + 48 * 50384896


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "no node"),
        ("\n\n", "no node"),
        ("hello\n" + node(1, "a"), "line 1"),
        (node(1, "a") + "\n\tnode1 -- node9\n", "line 2: the edge node1 -- node9 ends at node9"),
        (node(1, "a") + "\n" + node(1, "b"), "line 2: node1 stands already in line 1"),
        (node(1, "a", forward=-1), "forward_compute_time=-1 is negative"),
        (node(1, "a", out="nan"), "not a finite number"),
        (node(1, "a", out="12x"), "'12x' is not a finite number"),
        (node(1, "a", params="1e40"), "more than 2^53"),
        (node(1, "a", forward="1e12"), "more than 2^53"),
        (node(1, "a", out="[9e15; 9e15]"), "adds up to more than 2^53"),
        (node(1, "a") + ", parameter_size=3", "given twice"),
        (node(1, "a").replace("parameter_size", "parameters"), "parameter_size is missing"),
        (node(1, "a").replace("forward_compute_time", "forward_time"), "'forward_time=1'"),
        (text([node(1, "a"), node(2, "b"), node(3, "c")], [(1, 2), (2, 3), (3, 2)]), "node2 -- node3 -- node2"),
        (text([node(1, "a")], [(1, 1)]), "back to its own node"),
        (text([node(1, "a", 0, 0), node(2, "b", 0, 0)], [(1, 2)]), "has no times except for inputs"),
        (node(1, "Input"), "only model inputs"),
    ],
)
def test_bad_text_is_refused_with_its_line(source: str, message: str) -> None:
    with pytest.raises(InvalidDocument) as caught:
        read(source)
    assert message in str(caught.value)


def test_every_fault_is_told_at_once() -> None:
    with pytest.raises(InvalidDocument) as caught:
        read(node(1, "a", forward=-1, params=-2) + "\n?\n\tnode1 -- node3\n")
    assert [fault.pointer for fault in caught.value.faults] == ["line 1", "line 1", "line 2", "line 3"]


def test_a_micro_batch_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidDocument, match="at least 1 sample"):
        read(node(1, "a"), micro_batch_size=0)
