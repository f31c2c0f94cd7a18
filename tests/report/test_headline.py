"""The first lines of an answer: a plan in trainers' words, and what is proven, no wider than the bound."""

from __future__ import annotations

from typing import Any

import pytest

import penstock
from penstock.cli.main import main
from penstock.planning.bound_sentences import widest
from penstock.planning.headline import headline, proof, speed
from penstock.report.blocks import Cell, Column, Table

pytestmark = pytest.mark.tier("ci")

MOST_LINES, MOST_COLUMNS = 12, 100
PIPELINE = {"planner": "gpipe", "options": {"stages": 4}, "degrees": {"tensor": 1}}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "data parallel": ("gpt2-small", "2x4xV100", {"planner": "dp", "degrees": {"tensor": 1}}),
    "degrees": ("llama-3-8b", "1x8xH100", {"planner": "even", "degrees": {"tensor": 2}}),
    "pipeline": ("gpt2-small", "1x4xV100", PIPELINE),
}


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("data parallel", "TP 1 · PP 1 · DP 8 · 1 micro-batch of 8"),
        ("degrees", "TP 2 · PP 1 · DP 4 · "),
        ("pipeline", "TP 1 · PP 4 · DP 1 · "),
    ],
)
def test_a_plan_in_trainers_words(case: str, words: str) -> None:
    model, cluster, options = CASES[case]
    plan = penstock.plan(model, cluster, global_batch_size=64, **options).file.plan
    assert headline(plan).startswith(words)
    assert plan.prediction is not None
    for line in (headline(plan), speed(plan), proof(plan)):
        assert len(line) <= MOST_COLUMNS
    bound = widest(plan.certificates)
    assert bound is not None
    assert ("gradients sharded over all GPUs or none" in proof(plan)) == ("shards gradients" in bound.model)
    assert ("over all plans" in proof(plan)) == (bound.model == "every plan of this request")


@pytest.mark.parametrize(
    "options",
    [
        ("--example", "gpt2-small", "--cluster", "2x4xV100", "-b", "64", "--tensor", "1", "--planner", "dapple"),
        ("--example", "bert-48", "--cluster", "dapple-config-a", "-b", "64", "--planner", "gpipe", "--set", "stages=8"),
    ],
)
def test_an_answer_takes_few_lines(options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *options]) == 0
    lines = capsys.readouterr().out.rstrip().splitlines()
    assert len(lines) <= MOST_LINES
    assert max(len(line.rstrip()) for line in lines) <= MOST_COLUMNS
    assert "--verbose" in lines[-1]
    assert main(["plan", *options, "--verbose"]) == 0
    verbose = capsys.readouterr().out
    assert "No plan" in verbose
    assert "F forward  B backward" in verbose


def test_equal_rows_are_one_and_many_are_cut() -> None:
    rows = [(f"{s}", f"{2 * s}–{2 * s + 1}", f"node{s}/0", "1 GiB" if s else "2 GiB") for s in range(9)]
    heads = tuple(Column(head) for head in ("stage", "layers", "devices", "memory"))
    table = Table.of(heads, rows)
    folded = table.folded(3, 5)
    assert [[cell.text for cell in row] for row in folded.rows] == [
        ["0", "0–1", "node0/0", "2 GiB"],
        ["1–8", "2–17", "node1/0 … node8/0", "1 GiB"],
    ]
    several = Table.of(heads, [(f"{s}", f"{s}", f"node{s}/0", f"{s} GiB") for s in range(9)]).folded(3, 5)
    assert [row[0].text for row in several.rows] == ["0", "1", "2", "…", "8"]
    assert several.rows[3][1] == Cell("5 more")
