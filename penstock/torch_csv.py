"""Orders as PyTorch's compute-only schedule CSV, and back: the common subset of both (EXECUTOR.md, A1 and G.4).

One line per rank, one cell per operation (``2F0``: stage 2, forward, micro-batch 0; kinds F, B, I, W); an empty cell is
an idle step. torchtitan takes such a file as ``parallelism.pipeline_parallel_schedule_csv``,
``_PipelineScheduleRuntime`` by ``_load_csv``. PyTorch knows no replicas of a stage in a schedule, no recomputation, and
reads the last stage's losses in the order in which its forwards run, so these have to be in ascending order.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence

import numpy as np

from penstock.schemas.errors import Fault, InvalidDocument, UnsupportedRequest
from penstock.schemas.program import FORWARD, KINDS, RECOMPUTE
from penstock.solvers.allocation import Allocation
from penstock.solvers.schedule import Orders, Row

_CELL = re.compile(r"(0|[1-9][0-9]{0,8})([FBIW])(0|[1-9][0-9]{0,8})")
_TORCH_ONLY = re.compile(r"\(.*\)OVERLAP_F_B|[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)[0-9]*")


def to_csv(allocation: Allocation, orders: Orders) -> str:
    """One line per rank, ranks in the order of the devices' indices.

    Raises UnsupportedRequest where PyTorch's runtime would not train this plan, or would train something else.
    """
    _refuse(allocation)
    last = len(allocation.stages) - 1
    lines: dict[int, list[str]] = {}
    for row in orders.rows:
        operations = row.operations.tolist()
        if any(kind == RECOMPUTE for kind, _, _ in operations):
            raise UnsupportedRequest("a PyTorch schedule has no recomputation; the plan's rows have R")
        losses = [m for kind, stage, m in operations if kind == FORWARD and stage == last]
        if losses != sorted(losses):
            raise UnsupportedRequest(
                f"the last stage runs its forwards in the order {_some(losses)}; PyTorch reads losses in ascending "
                "order and would train wrong gradients without a word",
                remedy="a schedule whose last stage runs forwards in ascending order",
            )
        for device in row.devices:
            lines[device] = [f"{stage}{KINDS[kind]}{m}" for kind, stage, m in operations]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines[device] for device in sorted(lines))
    return text.getvalue()


def _refuse(allocation: Allocation) -> None:
    if len(allocation.pipelines) > 1:
        raise UnsupportedRequest(f"a PyTorch schedule is of one pipeline; the plan has {len(allocation.pipelines)}")
    for number, stage in enumerate(allocation.stages):
        if stage.replicas > 1:
            raise UnsupportedRequest(
                f"a PyTorch schedule has each stage on one rank; stage {number} has {stage.replicas} replicas",
                remedy="a plan with one device per stage, replicated as a whole outside the schedule",
            )
        if stage.recompute:
            raise UnsupportedRequest(
                f"a PyTorch schedule has no recomputation; stage {number} recomputes layers {list(stage.recompute)}",
                remedy="recompute: never, and torch.utils.checkpoint in the model",
            )


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")


def from_csv(text: str, devices: Sequence[int], name: str = "torch-csv") -> Orders:
    """The rows of a compute-only CSV, rank r's on ``devices[r]``.

    Raises InvalidDocument for cells that are not whole operations (line and column named), a stage on two ranks, or
    another number of lines than of devices; UnsupportedRequest for cells that only PyTorch's lowered schedules have.
    """
    lines = list(csv.reader(io.StringIO(text)))
    if len(lines) != len(devices):
        raise InvalidDocument(f"the schedule has {len(lines)} lines, one per rank; there are {len(devices)} devices")
    rank_of: dict[int, int] = {}
    rows = []
    for rank, line in enumerate(lines):
        operations = [_operation(cell.strip(), rank, column) for column, cell in enumerate(line) if cell.strip()]
        for _, stage, _ in operations:
            if rank_of.setdefault(stage, rank) != rank:
                raise InvalidDocument(
                    f"stage {stage} is on lines {rank_of[stage] + 1} and {rank + 1}; each is on one rank"
                )
        rows.append(Row((devices[rank],), np.array(operations, dtype=np.int32).reshape(-1, 3)))
    return Orders(name, tuple(rows))


def _operation(cell: str, rank: int, column: int) -> tuple[int, int, int]:
    match = _CELL.fullmatch(cell)
    if match is not None:
        return KINDS.index(match[2]), int(match[1]), int(match[3])
    where = f"line {rank + 1}, column {column + 1}"
    if _TORCH_ONLY.fullmatch(cell):
        raise UnsupportedRequest(
            f"{where}: {cell!r} is of a schedule that PyTorch has lowered; only F, B, I and W are read",
            remedy='the compute-only form (`format="compute_only"`)',
        )
    raise InvalidDocument(
        f"{where}: {cell!r} is not an operation; expected stage, F, B, I or W, and micro-batch, such as 2F0",
        faults=(Fault(f"/{rank}/{column}", cell),),
    )
