"""Measurements of GPU kernels that run without a GPU: shapes on the meta device, blocks on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import benchmark_rows
import gpu_blocks
import gpu_kernels
import gpu_operators
import pytest
import torch
from benchmark_rows import Rows


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Actions are run once, on tensors without storage."""

    def once(action: Callable[[], object], **_limits: object) -> float:
        action()
        return 1.0

    for module in (gpu_kernels, gpu_operators):
        monkeypatch.setattr(module, "DEVICE", "meta")
        monkeypatch.setattr(module, "timed", once)


@pytest.mark.parametrize("name", ["products", "attention", "moved", "grouped", "head"])
def test_each_section_runs_and_fills_its_columns(name: str) -> None:
    measure, seconds = gpu_kernels.SECTIONS[name]
    rows = list(islice(measure(), 40))
    assert seconds > 0
    assert {len(row) for row in rows} == {len(gpu_kernels.COLUMNS[name])}
    assert len(set(rows)) == len(rows)


def test_products_are_those_of_every_width_degree_and_pass() -> None:
    rows = [dict(zip(gpu_kernels.COLUMNS["products"], row, strict=True)) for row in gpu_operators.products()]
    sizes = {(row["pass"], row["rows"], row["inner"], row["columns"]) for row in rows}
    assert len(sizes) == len(rows) == 672
    for hidden in gpu_blocks.WIDTHS:
        for tensor in gpu_operators.TENSOR:
            assert ("forward", 4096, hidden, hidden // tensor) in sizes
            assert ("input", 4096, hidden * 7 // 2 // tensor, hidden) in sizes
            assert ("weight", hidden, 4096, gpu_operators.VOCABULARY // tensor) in sizes


@pytest.mark.tier("ci")
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_block_makes_the_gradients_of_all_of_its_part(tensor: int) -> None:
    hidden, length = 256, 8
    block = gpu_blocks.local_block(hidden, tensor, device="cpu")
    whole, gradient = (torch.randn(1, length, hidden, dtype=torch.bfloat16) for _ in range(2))
    x = torch.randn(1, length // tensor, hidden, dtype=torch.bfloat16, requires_grad=True)
    y = gpu_blocks.forward_of(block, tensor, whole, gradient)(x)
    y.backward(torch.ones_like(y))
    assert y.shape == x.shape
    assert x.grad is not None
    assert x.grad.isfinite().all()
    size = gpu_blocks.sizes_of(hidden, tensor)
    parameters_of_part = 2 * hidden * size.queries + 2 * hidden * size.keys + 3 * hidden * size.inner + 2 * hidden
    assert sum(parameter.numel() for parameter in block.parameters()) == parameters_of_part
    for parameter in block.parameters():
        assert parameter.dtype == torch.bfloat16
        assert parameter.grad is not None
        assert parameter.grad.count_nonzero() > 0


def test_a_section_ends_at_its_limit_and_says_so() -> None:
    def endless() -> Iterator[tuple[Any, ...]]:
        while True:
            yield (1,)

    rows, why = gpu_kernels.bounded(endless(), 0.0)
    assert rows == [(1,)]
    assert why == "ended after 0 s"


def test_a_section_that_fails_keeps_its_rows_and_says_why() -> None:
    def failing() -> Iterator[tuple[Any, ...]]:
        yield (1,)
        raise RuntimeError("out of memory")

    assert gpu_kernels.bounded(failing(), 1.0) == ([(1,)], "RuntimeError: out of memory")


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(
        benchmark_rows.written({"gpu": "H100"}, {"facts": Rows(("fact", "ns"), [("between_events", 3100.4)])}),
        encoding="utf-8",
    )
    about, sections = benchmark_rows.read(path)
    assert about == {"gpu": "H100"}
    assert list(sections["facts"].named()) == [{"fact": "between_events", "ns": 3100}]


@pytest.mark.tier("ci")
def test_files_and_sections_that_are_none_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (([], "required: out"), (["rows.json", "--only", "speed"], "invalid choice: 'speed'")):
        with pytest.raises(SystemExit, match="2"):
            gpu_kernels.main(arguments)
        assert message in capsys.readouterr().err
