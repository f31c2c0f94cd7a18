"""Headlines name data parallelism, pipelines side by side and pipelines on the same devices correctly."""

from __future__ import annotations

import pytest

from penstock.solvers.model.plan_shape import are_in_turn, is_data_parallel, layers_need, micro_batches, shape


@pytest.mark.parametrize(
    ("pipelines", "words"),
    [
        ([[["a"]]], "one device"),
        ([[["a", "b", "c"]]], "data parallelism over 3 devices"),
        ([[["a"]], [["b"]], [["c"]]], "data parallelism over 3 devices, each a pipeline of its own"),
        ([[["a", "b"]], [["c"]]], "data parallelism over 3 devices, in 2 groups"),
        ([[["a"], ["b", "c"]]], "2 stages on 3 devices"),
        ([[["a"], ["b"]], [["c"], ["d"]]], "2 pipelines side by side on 4 devices, each of 2 stages"),
        ([[["a"], ["b"]], [["c"]]], "2 pipelines side by side on 3 devices, of 1 to 2 stages"),
        ([[["a"], ["b"]], [["b"], ["a"]]], "2 pipelines over the same 2 devices, each of 2 stages"),
        ([[["a"]], [["a"]]], "2 pipelines over the same device, each of 1 stage"),
        ([[[str(number)] for number in range(1024)]], "1024 stages on 1,024 devices"),
        ([[["a"], ["b"], ["a"], ["b"]]], "4 stages on 2 devices"),
        ([[["a", "b"], ["a", "b"]]], "data parallelism over 2 devices, 2 parts of the model in turn"),
        ([[["a"], ["a"], ["a"]]], "one device, 3 parts of the model in turn"),
        ([[["a", "b"], ["a"]]], "2 stages on 2 devices"),
    ],
)
def test_shapes_in_words(pipelines: list[list[list[str]]], words: str) -> None:
    assert shape(pipelines) == words
    by_replicas = is_data_parallel(pipelines) or are_in_turn(pipelines)
    assert by_replicas == words.startswith(("data parallelism", "one device"))


@pytest.mark.parametrize(
    ("pipelines", "words"),
    [
        (["ab"], "TP 2 on 2 devices"),
        (["abcd"], "2 replicas × TP 2 on 4 devices"),
        (["ab", "cd"], "2 stages × TP 2 on 4 devices"),
        (["abcd", "efgh"], "2 stages × 2 replicas × TP 2 on 8 devices"),
        (["abcd", "abcd"], "2 replicas × TP 2 on 4 devices, 2 parts of the model in turn"),
        (["ab", "cdef"], "2 stages on 3 cells of TP 2 (6 devices)"),
    ],
)
def test_shapes_of_cells_in_words(pipelines: list[str], words: str) -> None:
    assert shape([pipelines], 2, "TP 2") == words


def test_pipelines_of_cells_in_words() -> None:
    each = "data parallelism over 2 cells of TP 2 (4 devices), each a pipeline of its own"
    assert shape([["ab"], ["cd"]], 2, "TP 2") == each


@pytest.mark.parametrize(
    ("number", "rows", "words"),
    [
        (1, 64, "one micro-batch of 64 samples"),
        (1, 1, "one micro-batch of 1 sample"),
        (8, 4, "8 micro-batches of at most 4 samples"),
        (64, 1, "64 micro-batches of at most 1 sample"),
    ],
)
def test_micro_batches_in_words(number: int, rows: int, words: str) -> None:
    assert micro_batches(number, rows) == words


def test_one_layer_needs_and_several_need() -> None:
    assert layers_need(3, 3) == "layer 3 needs"
    assert layers_need(0, 0, ["a", "b"]) == "layer 0 (a) needs"
    assert layers_need(0, 1, ["a", "b"]) == "layers 0–1 (a … b) need"
    assert layers_need(3, 5) == "layers 3–5 need"
