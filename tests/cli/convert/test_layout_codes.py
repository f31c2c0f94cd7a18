"""``penstock import layout`` ends with a code that tells what is wrong with a layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.examples import catalogue

LAST = len(catalogue.profile("gpt2-small").layers) - 1


@pytest.mark.parametrize(
    ("layers", "model", "code", "words"),
    [
        pytest.param([[0, 6], [7, LAST]], "gpt2-small", 0, "per global batch", id="fits"),
        pytest.param([[0, 6], [7, LAST]], "gpt2-xl", 65, "the last one is 49", id="other layers"),
        pytest.param([[0, 6], [8, LAST]], "gpt2-small", 65, "layer 7 is the next", id="a gap"),
    ],
)
def test_layouts(
    layers: list[list[int]], model: str, code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = tmp_path / "layout.json"
    layout.write_text(json.dumps({"layers": layers, "num_micro_batches": 4}))
    asked = [
        "import",
        "layout",
        str(layout),
        "--from",
        "ranges",
        "--example",
        model,
        "--cluster",
        "1x2xV100",
        "-b",
        "8",
    ]
    assert main([*asked, "--alone"]) == code
    said = capsys.readouterr()
    assert words in said.out + said.err


def test_a_layout_that_does_not_fit_is_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = len(catalogue.profile("gpt2-xl").layers) - 1
    layout = tmp_path / "layout.json"
    layout.write_text(json.dumps({"layers": [[0, last - 1], [last, last]], "num_micro_batches": 1}))
    asked = ["--from", "ranges", "--example", "gpt2-xl", "--cluster", "1x2xV100", "-b", "8", "--alone"]
    assert main(["import", "layout", str(layout), *asked]) == 3
    assert "does not fit" in capsys.readouterr().out


def test_a_layout_that_cannot_be_simulated_is_65(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("penstock.layouts.drawn.unreachable", lambda *_given: "no path from node0/0 to node0/1")
    layout = tmp_path / "layout.json"
    layout.write_text(json.dumps({"layers": [[0, 6], [7, LAST]], "num_micro_batches": 4}))
    asked = ["--from", "ranges", "--example", "gpt2-small", "--cluster", "1x2xV100", "-b", "8", "--alone"]
    assert main(["import", "layout", str(layout), *asked]) == 65
    assert "cannot be simulated: no path" in capsys.readouterr().err
