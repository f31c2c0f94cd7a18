"""The numbers of the example in docs/theory/judge.md are the simulator's numbers."""

from __future__ import annotations

import re

from problems import early_backward, make_problem
from repository import ROOT

from penstock.schemas.program import KINDS
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Stage, single_pipeline
from penstock.solvers.verify.verifier import verify

PAGE = ROOT / "docs/theory/judge.md"


def test_the_worked_example_is_the_judges() -> None:
    problem = make_problem(
        [30, 20, 40],
        [60, 40, 90],
        [4, 6],
        [300, 200, 800],
        backward_bytes=[4, 6],
        stash_bytes=[50, 30, 70],
        workspace_bytes=[5, 8, 0],
        update_ns=[4, 3, 10],
        nodes=(1, 2),
        context_bytes=11,
        latency_ns=2,
        form="ports",
        global_batch_size=5,
        shared=True,
        bucket_bytes=500,
        state_factor=2,
    )
    stages = (Stage(0, 0, (0,)), Stage(1, 2, (1, 2), recompute=((2, 2),)))
    allocation = single_pipeline(stages, 2)
    orders = early_backward(allocation)
    timeline = simulate(problem, allocation, orders)
    assert verify(problem, allocation, orders, timeline) == []

    cells = _example_cells()
    rows = [row for row in cells if len(row) == 6 and row[1].isdigit()]
    table = {row[k]: (int(row[k + 1]), int(row[k + 2])) for row in rows for k in (0, 3)}
    spans = {}
    for track in timeline.tracks:
        for (kind, s, m), start, end in zip(
            track.operations.tolist(), track.start_ns.tolist(), track.end_ns.tolist(), strict=True
        ):
            spans[f"{s}{KINDS[kind]}{m}"] = (start, end)
    sent = timeline.transfers
    columns = (sent.direction, sent.micro_batch, sent.start_ns, sent.end_ns)
    for way, m, start, end in zip(*(each.tolist() for each in columns), strict=True):
        spans[f"{('forward', 'backward')[way]} {m}"] = (start, end)
    spans |= {f"bucket {each.bucket}": each[2:] for each in timeline.reductions}
    spans |= {f"step of stage {each.stage}": each[2:] for each in timeline.updates}
    assert table == spans
    assert len(table) == 16

    curve = [(int(row[0]), int(row[1])) for row in cells if len(row) == 3 and row[0].isdigit()]
    assert curve == list(zip(*(each.tolist() for each in timeline.memory_curve(0)), strict=True))
    times, sizes = (row[1:] for row in cells if row[0] in ("from", "bytes") and len(row) == 10)
    assert [list(map(int, times)), list(map(int, sizes))] == [each.tolist() for each in timeline.memory_curve(1)]

    text = PAGE.read_text()
    use = timeline.uses[0]
    assert use[:3] == (454, 40, 1283)
    assert timeline.uses[1][:3] == timeline.uses[2][:3] == (703, 984, 90)
    assert (timeline.time_per_global_batch_ns, timeline.fill_ns, timeline.drain_ns) == (1777, 106, 981)
    assert round(timeline.bubble, 3) == 0.651
    for words in (
        "1,777, fill 106",
        "busy 90 + 60 + 180 + 120 + 4 = 454",
        "are busy 703, communicate for 984",
        "= 0.651",
    ):
        assert words in text


def _example_cells() -> list[list[str]]:
    """Return the rows of the tables of the page's example."""
    example = PAGE.read_text().split("## 11 An example")[1]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", example, re.M)]
