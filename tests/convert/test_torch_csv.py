"""Schedules in PyTorch's CSV: its own parser, validation and lowering take them."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from torch.distributed.pipelining.schedules import (
    _Action,
    _add_send_recv,
    _PipelineScheduleRuntime,
    _validate_schedule,
)

from penstock.convert.torch_csv import onto, remarks, to_csv
from penstock.schemas.errors import InvalidDocument, UnsupportedRequest
from penstock.schemas.program import BACKWARD, FORWARD, INPUT, KINDS, RECOMPUTE, WEIGHT, parse_row
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.schedule import Orders, Row


def one_f_one_b(num_stages: int, num_micro_batches: int, split: bool = False) -> tuple[Allocation, Orders]:
    stages = tuple(Stage(s, s, (num_stages - 1 - s,)) for s in range(num_stages))
    rows = []
    for s in range(num_stages):
        warmup = min(num_stages - s, num_micro_batches)
        operations = [(FORWARD, s, m) for m in range(warmup)]
        for m in range(num_micro_batches):
            operations += [(INPUT, s, m), (WEIGHT, s, m)] if split else [(BACKWARD, s, m)]
            operations += [(FORWARD, s, m + warmup)] if m + warmup < num_micro_batches else []
        rows.append(Row(stages[s].devices, np.array(operations, dtype=np.int32)))
    return single_pipeline(stages, num_micro_batches), Orders("1f1b", tuple(rows))


def by_hand(*rows: str) -> Orders:
    arrays = [np.array(parse_row(row), dtype=np.int32) for row in rows]
    return Orders("by hand", tuple(Row((d,), operations) for d, operations in enumerate(arrays)))


def on_devices(*devices: int) -> Allocation:
    """Place a stage of one layer on each device."""
    return single_pipeline(tuple(Stage(s, s, (device,)) for s, device in enumerate(devices)), 2)


def torch_reads(text: str) -> dict[int, list[_Action | None]]:
    return {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(csv.reader(io.StringIO(text)))}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(1, 1), (2, 4), (4, 4), (4, 9), (5, 3)])
def test_torch_validates_and_lowers_what_is_exported(num_stages: int, num_micro_batches: int, split: bool) -> None:
    allocation, orders = one_f_one_b(num_stages, num_micro_batches, split)
    actions = torch_reads(to_csv(allocation, orders))
    mapping = _validate_schedule(actions, num_stages, num_stages, num_micro_batches)
    assert mapping == {s: num_stages - 1 - s for s in range(num_stages)}
    compute = {rank: [action for action in row if action is not None] for rank, row in actions.items()}
    lowered = _add_send_recv(compute, stage_to_rank=mapping.__getitem__, num_stages=num_stages)
    sends = sum(str(action).count("SEND") for row in lowered.values() for action in row)
    assert sends == 2 * (num_stages - 1) * num_micro_batches


def test_the_text_is_a_line_per_rank() -> None:
    allocation, orders = one_f_one_b(2, 3)
    assert to_csv(allocation, orders) == "1F0,1B0,1F1,1B1,1F2,1B2\n0F0,0F1,0B0,0F2,0B1,0B2\n"


def test_import_gives_the_orders_back() -> None:
    allocation, orders = one_f_one_b(4, 7, split=True)
    again, imported = onto(to_csv(allocation, orders), allocation)
    assert again == allocation
    for row, other in zip(reversed(orders.rows), imported.rows, strict=True):
        assert other.devices == row.devices, "a line per device, in the order of their numbers"
        assert np.array_equal(other.operations, row.operations)


def test_idle_cells_are_skipped() -> None:
    _, imported = onto("0F0,0F1,,,0B0 ,0B1\n,1F0,1F1,1B0,1B1\n", on_devices(5, 2))
    assert [row.devices for row in imported.rows] == [(5,), (2,)]
    assert imported.rows[0].operations.tolist() == [[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 0, 1]]


@pytest.mark.parametrize("cell", ["1FOO3", "2BANANA", "F0", "2F", "0R0", "-1F0", "1F0x", "01F0"])
def test_cells_that_torch_misreads_are_refused(cell: str) -> None:
    with pytest.raises(InvalidDocument, match=rf"line 1, column 2: '{cell}' is not an operation"):
        onto(f"0F0,{cell}\n", on_devices(0))


@pytest.mark.parametrize("cell", ["0UNSHARD", "0SEND_F1", "1RECV_B2", "0REDUCE_GRAD", "(0F1;3B0)OVERLAP_F_B"])
def test_cells_of_a_lowered_schedule_are_refused(cell: str) -> None:
    with pytest.raises(UnsupportedRequest, match="only F, B, I and W are read"):
        onto(f"0F0,{cell}\n", on_devices(0))


def test_a_stage_on_two_lines_is_refused() -> None:
    with pytest.raises(InvalidDocument, match="stage 0 is on lines 1 and 2"):
        onto("0F0\n0F1\n", on_devices(0, 1))


def test_plans_beyond_the_common_subset_are_refused() -> None:
    rows = by_hand("0F0:2 0B0:2", "1F0:2 1B0:2")
    turns = single_pipeline((Stage(0, 0, (0, 1), "round_robin"), Stage(1, 1, (2,))), 2)
    with pytest.raises(UnsupportedRequest, match="stage 0 take whole micro-batches in turn"):
        to_csv(turns, rows)
    shared = single_pipeline((Stage(0, 0, (0, 1)), Stage(1, 1, (1,))), 2)
    with pytest.raises(UnsupportedRequest, match="a device of stage 0 belongs to two"):
        to_csv(shared, rows)
    plain = single_pipeline((Stage(0, 0, (0,)), Stage(1, 1, (1,))), 2)
    with pytest.raises(UnsupportedRequest, match="in the order 1, 0; PyTorch reads losses"):
        to_csv(plain, by_hand("0F0:2 0B0:2", "1F1 1B1 1F0 1B0"))


def replicated(num_stages: int, number: int, counts: tuple[int, ...], recompute: bool) -> tuple[Allocation, Orders]:
    """Build 1F1B with ``counts[s]`` devices for stage s, where each stage recomputes ahead of its backwards, or not."""
    _allocation, orders = one_f_one_b(num_stages, number)
    first = [sum(counts[:s]) for s in range(num_stages)]
    stages = tuple(
        Stage(s, s, tuple(range(first[s], first[s] + counts[s])), recompute=((s, s),) if recompute else ())
        for s in range(num_stages)
    )
    rows = []
    for stage, row in zip(stages, orders.rows, strict=True):
        operations = row.operations.tolist()
        if recompute:
            again = [
                [(RECOMPUTE, s, m), (kind, s, m)] if kind == BACKWARD else [(kind, s, m)] for kind, s, m in operations
            ]
            operations = [each for pair in again for each in pair]
        rows.append(Row(stage.devices, np.array(operations, dtype=np.int32)))
    return single_pipeline(stages, number), Orders("1f1b", tuple(rows))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 2, 2), (3, 1, 2)])
def test_pytorchs_runtime_loads_the_rows_of_replicas_and_of_what_recomputes(
    tmp_path: Path, counts: tuple[int, ...], recompute: bool
) -> None:
    allocation, orders = replicated(3, 5, counts, recompute)
    text = to_csv(allocation, orders)
    plain, rows = replicated(3, 5, (1, 1, 1), False)
    assert text == to_csv(plain, rows)
    (tmp_path / "rows.csv").write_text(text)
    for rank in range(3):
        stage = SimpleNamespace(num_stages=3, group_size=3, group_rank=rank, stage_index=rank, has_backward=True)
        runtime = _PipelineScheduleRuntime([stage], n_microbatches=5)
        runtime._load_csv(str(tmp_path / "rows.csv"))
        assert runtime.stage_index_to_group_rank == {0: 0, 1: 1, 2: 2}
        computing = [str(each) for each in runtime.pipeline_order_with_comms[rank] if each.is_compute_op]
        kept = [KINDS[kind] for kind, *_ in orders.rows[rank].operations.tolist() if kind != RECOMPUTE]
        assert [word.strip("0123456789") for word in computing] == kept
    sentences = remarks(allocation, orders)
    assert any("stage 2 layers 2" in each for each in sentences) == recompute
    assert any("ahead of its backwards" in each for each in sentences) == recompute
    assert any("2 replicas" in each for each in sentences) == (counts == (2, 2, 2))
    assert any("3 of stage 0, 1 of stage 1, 2 of stage 2" in each for each in sentences) == (counts == (3, 1, 2))
    assert sentences or counts == (1, 1, 1)
