"""Pictures, pages and sentences of runs that are no single flushed step: a marked steady window, several pipelines."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from penstock.cli.main import main
from penstock.convert import to_plan, to_problem
from penstock.planning.judge import Judgement, judge
from penstock.report.drawing.picture import LETTERS, Picture, picture_of_timeline
from penstock.report.drawing.svg import svg_timeline
from penstock.report.drawing.timeline_text import render_picture, render_timeline
from penstock.report.page import html_report
from penstock.schemas.plan import PlanFile
from penstock.schemas.program import BACKWARD, FORWARD
from penstock.schemas.request import PlanRequest
from penstock.solvers.judge.shared_processor import parallel_pipelines
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation, Pipeline, Stage, single_pipeline
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.model.schedule import Orders, Pattern, PatternOperation, Row, Schedule
from penstock.solvers.model.update_rules import UpdateRule

EAGER = Pattern(
    "eager",
    5,
    1,
    (
        PatternOperation(FORWARD, 0, 0, 0),
        PatternOperation(BACKWARD, 0, 4, 1),
        PatternOperation(FORWARD, 1, 1, 0),
        PatternOperation(BACKWARD, 1, 3, 0),
    ),
)
STRAIGHT = (Stage(0, 0, (0,)), Stage(1, 1, (1,)))


def _flushed(allocation: Allocation) -> Orders:
    rows = []
    for s, stage in enumerate(allocation.stages):
        operations = [(kind, s, m) for kind in (FORWARD, BACKWARD) for m in allocation.micro_batches(s)]
        rows.append(Row(stage.devices, np.asarray(operations, dtype=np.int32)))
    return Orders("gpipe", tuple(rows))


def _file(request: PlanRequest, rule: UpdateRule, allocation: Allocation, schedule: Schedule) -> PlanFile:
    allowed = request.model_copy(update={"update_rules": ("synchronous", rule)})
    problem = to_problem(allowed)
    timeline = simulate(problem, allocation, schedule, update_rule=rule)
    best = JudgedPlan.of("by-hand", allocation, schedule, timeline, True, rule)
    return PlanFile(plan=to_plan(problem, allowed, best, ()), request=allowed)


@pytest.fixture
def periodic(request_document: PlanRequest) -> PlanFile:
    return _file(request_document, "double_buffered", single_pipeline(STRAIGHT, 2), EAGER)


@pytest.fixture
def several(request_document: PlanRequest) -> PlanFile:
    """Both layers on device 0 beside one layer each on devices 1 and 2."""
    second = (Stage(0, 0, (1,)), Stage(1, 1, (2,)))
    allocation = Allocation((Pipeline((Stage(0, 1, (0,)),), (0, 0)), Pipeline(second, (1, 1))), 2)
    return _file(request_document, "synchronous", allocation, _flushed(allocation))


@pytest.fixture
def averaging(request_document: PlanRequest) -> PlanFile:
    allocation = parallel_pipelines(STRAIGHT, 2, 2)
    return _file(request_document, "elastic_averaging", allocation, _flushed(allocation))


def _judged(file: PlanFile) -> tuple[Judgement, Picture]:
    judgement = judge(file)
    assert judgement.faults == ()
    assert judgement.timeline is not None
    return judgement, picture_of_timeline(judgement.problem, judgement.timeline, judgement.allocation)


def _counts(picture: Picture, lane: int) -> dict[str, int]:
    compute = picture.strips[picture.lanes[lane].strip].compute
    return {letter: int((compute.kind == LETTERS.index(letter)).sum()) for letter in "FBU"}


def test_a_periodic_run_is_drawn_whole_with_its_window(periodic: PlanFile) -> None:
    judgement, picture = _judged(periodic)
    timeline = judgement.timeline
    assert timeline is not None
    assert picture.window == (*timeline.window_ns, timeline.window_rounds, timeline.rounds)
    assert picture.end_ns == max(int(track.end_ns.max()) for track in timeline.tracks)
    batches = 2 * timeline.rounds
    assert _counts(picture, 0) == {"F": batches, "B": batches, "U": 0}, "an update that takes no time is not drawn"


def test_steps_in_rows_are_drawn_once_and_without_a_micro_batch(request_document: PlanRequest) -> None:
    layers = [layer.model_copy(update={"update_ns": 5}) for layer in request_document.profile.layers]
    profile = request_document.profile.model_copy(update={"layers": tuple(layers)})
    slow = request_document.model_copy(update={"profile": profile})
    judgement, picture = _judged(_file(slow, "double_buffered", single_pipeline(STRAIGHT, 2), EAGER))
    assert judgement.timeline is not None
    assert _counts(picture, 1)["U"] == judgement.timeline.rounds
    compute = picture.strips[picture.lanes[1].strip].compute
    assert set(compute.number[compute.kind == LETTERS.index("U")].tolist()) == {-1}


def test_the_window_is_marked_in_text_svg_and_page(periodic: PlanFile) -> None:
    judgement, picture = _judged(periodic)
    assert judgement.timeline is not None
    lines = render_timeline(judgement.problem, judgement.timeline, judgement.allocation, width=120).splitlines()
    marks = next(line for line in lines if "[-" in line)
    margin = lines[0].index("|") + 1
    columns = 120 - margin
    first, last = (round(t * columns / picture.end_ns) for t in judgement.timeline.window_ns)
    assert (marks.index("[") - margin, marks.rindex("]") + 1 - margin) == (first, last)
    batches = f"{judgement.timeline.window_rounds} of the {judgement.timeline.rounds} global batches"
    assert any(f"steady state: {batches}, from" in line for line in lines)
    svg = svg_timeline(picture)
    assert svg.count("steady state") == 2
    page = html_report(periodic, judgement.plan, judgement.problem, judgement.timeline, allocation=judgement.allocation)
    data = json.loads(re.search(r'id="timeline-data">(.*?)</script>', page).group(1))
    assert data["window_ns"] == list(judgement.timeline.window_ns)
    assert f"the steady state: {batches}" in page


def test_a_flushed_step_has_no_window(several: PlanFile, averaging: PlanFile) -> None:
    for file in (several, averaging):
        _judgement, picture = _judged(file)
        assert picture.window is None
        assert "steady" not in render_picture(picture) + svg_timeline(picture)


def test_an_iteration_is_drawn_to_its_end(averaging: PlanFile) -> None:
    """A device has a lane for each pipeline, and two global batches take the iteration."""
    judgement, picture = _judged(averaging)
    assert judgement.timeline is not None
    assert picture.end_ns == judgement.timeline.window_ns[1]
    assert picture.end_ns >= 2 * judgement.timeline.time_per_global_batch_ns - 1
    assert [lane.stages for lane in picture.lanes] == [(0,), (1,), (2,), (3,)]
    assert [lane.device for lane in picture.lanes] == ["node0/0", "node0/1", "node0/0", "node0/1"]


def test_a_reduction_is_drawn_on_all_pipelines_that_take_part(several: PlanFile) -> None:
    """Layer 0 is reduced by stages 0 and 1, layer 1 by stages 0 and 2."""
    _judgement, picture = _judged(several)
    reduced = {}
    for lane in picture.lanes:
        moved = picture.strips[lane.strip].communication
        reduced[lane.device] = sorted(moved.number[moved.kind == 2].tolist())
    assert reduced == {"node0/0": [0, 1], "node0/1": [1], "node0/2": [0]}


@pytest.mark.tier("ci")
@pytest.mark.parametrize("kind", ["periodic", "several", "averaging"])
def test_every_command_takes_the_plan(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    file: PlanFile = request.getfixturevalue(kind)
    path = tmp_path / "plan.json"
    file.write(path)
    words = {
        "periodic": "without a flush",
        "several": "2 pipelines side by side on 3 devices",
        "averaging": "then their parameters are averaged",
    }
    assert main(["verify", str(path)]) == 0
    assert main(["simulate", str(path), "--chrome-trace", str(tmp_path / "trace.json")]) == 0
    shown = capsys.readouterr().out
    assert ("steady state" in shown) == (kind == "periodic")
    assert ("of other weights on a device" in shown) == (kind != "several")
    assert main(["explain", str(path), "--what-if", "bandwidth=2"]) == 0
    assert words[kind] in capsys.readouterr().out
    assert main(["report", str(path), "-o", str(tmp_path / "page.html")]) == 0
    assert "double buffered" in (tmp_path / "page.html").read_text() or kind != "periodic"
    assert main(["report", str(path), "-o", str(tmp_path / "plan.svg")]) == 0
    assert "critical path" in (tmp_path / "plan.svg").read_text()
    assert main(["simulate", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["time_per_global_batch_ns"] > 0
