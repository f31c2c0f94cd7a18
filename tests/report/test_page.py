"""The HTML report as text: one file, nothing from outside, names that stay names."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from penstock.planning.judge import judge
from penstock.planning.sentences import subtitle, used
from penstock.report.device_names import together
from penstock.report.drawing.picture import picture_of_timeline, rows_in_words
from penstock.report.page import html_report
from penstock.schemas.plan import PlanFile, Stage
from penstock.schemas.topology import ClusterTopology
from penstock.schemas.trace import Hardware, Trace
from penstock.schemas.transformers.degrees import Degrees
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.timeline import Timeline


class Parts(HTMLParser):
    """Collects scripts by id (the page's own under ``code``) and everything that would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: dict[str, str] = {}
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self._open: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append(tag)
        self.fetched += [str(attributes[name]) for name in ("src", "href", "data", "action") if name in attributes]
        self._open = (attributes.get("id") or "code") if tag == "script" else None

    def handle_endtag(self, tag: str) -> None:
        self._open = None

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self.scripts[self._open] = self.scripts.get(self._open, "") + data


@pytest.fixture
def page(file: PlanFile, problem: Problem, timeline: Timeline) -> str:
    return html_report(file, file.plan, problem, timeline)


def _parts(page: str) -> Parts:
    parts = Parts()
    parts.feed(page)
    return parts


def test_nothing_is_fetched(page: str) -> None:
    parts = _parts(page)
    assert parts.fetched == []
    assert "link" not in parts.tags
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org)", page)


def test_names_cannot_break_out(page: str) -> None:
    assert "alert(1)" in page
    assert "<script>alert" not in page
    assert "<b>" not in page
    assert len(_parts(page).scripts) == 2


def test_tables_hold_what_the_timeline_shows(page: str) -> None:
    for text in ("node0/2", "forward", "every plan of this request", "25.0 %", "80 ns", "round robin", "100 ns"):
        assert text in page


def test_what_the_search_said_is_listed_clause_by_clause(
    file: PlanFile, page: str, problem: Problem, timeline: Timeline
) -> None:
    assert 'id="search"' not in page, "of a plan that was not searched for nothing is said"
    searched = file.model_copy(update={"why": ("gpipe: one stage", "not asked, as 8 < 9 devices: relax")})
    shown = html_report(searched, file.plan, problem, timeline)
    assert '<span class="gist">gpipe: one stage</span>' in shown
    assert "<li>not asked, as 8 &lt; 9 devices: relax</li>" in shown


def test_a_trace_adds_the_measured_timeline(file: PlanFile, problem: Problem, timeline: Timeline) -> None:
    trace = Trace.parse(
        {
            "plan_hash": file.plan.content_hash(),
            "predicted_time_per_global_batch_ns": 100,
            "measured_times_per_global_batch_ns": [125, 120, 130],
            "ranks": [
                {
                    "rank": 0,
                    "device": "node0/0",
                    "step": 1,
                    "events": [{"instruction": "0F0", "start_ns": 0, "end_ns": 11}],
                }
            ],
        }
    )
    page = html_report(file, file.plan, problem, timeline, trace=trace)
    assert "125 ns" in page
    assert "-20.0 %" in page
    data = json.loads(_parts(page).scripts["timeline-data"])
    twins = [lane["measured"] for lane in data["lanes"]]
    assert [twin is not None for twin in twins] == [True, False, False]
    assert data["strips"][twins[0]]["compute"] == {"kind": "F", "stage": 0, "number": 0, "gap": 0, "length": 11}
    assert "measured ones" in page
    loads = {"load_at_start": 0.0, "load_at_end": 0.0, "cpu_ns": 1, "wall_ns": 4}
    cpu = {"kind": "cpu", "model": "cpu", "planned_kind": "A100", "ranks": 1, "cores": 1, "machine_cores": 1, **loads}
    (rank,) = trace.ranks
    elsewhere = rank.model_copy(update={"hardware": Hardware.model_validate(cpu)})
    page = html_report(file, file.plan, problem, timeline, trace=trace.model_copy(update={"ranks": (elsewhere,)}))
    assert "-20.0 %" not in page
    assert (data["comparable"], json.loads(_parts(page).scripts["timeline-data"])["comparable"]) == (True, False)
    assert "ranks computed on cpu, and the plan is for A100: the two times cannot be compared" in page


def test_the_map_shows_who_holds_what(page: str) -> None:
    assert "<title>node0/1 (cpu): stage 1</title>" in page
    assert page.count('<rect class="device ') == 3


def test_idle_devices_stand_beside_those_that_are_used(file: PlanFile) -> None:
    """The plan uses three devices; the second topology has two nodes of three."""
    topology = file.request.topology
    assert isinstance(topology, ClusterTopology)
    assert topology.uniform is not None
    doubled = topology.model_copy(update={"uniform": topology.uniform.model_copy(update={"nodes": 2})})
    assert doubled.num_devices == doubled.expanded().num_devices == 6
    assert used(file.plan, topology) == used(file.plan, "sha256:0") == "2 stages on 3 devices"
    assert used(file.plan, doubled) == "2 stages on 3 devices; 3 of the cluster's 6 stay idle"
    assert subtitle(file.plan, doubled).startswith(used(file.plan, doubled) + "; a global batch of 2 in ")


def test_the_headline_says_what_is_sharded_and_how_many_layers_are_recomputed(file: PlanFile) -> None:
    """And of many different stages only how many recompute."""
    stage = file.plan.pipelines[0].stages[0]
    ranged = stage.model_copy(update={"layers": (0, 7), "recompute": ((0, 0), (3, 4))})

    def subtitle_of(*stages: Stage) -> str:
        pipeline = file.plan.pipelines[0].model_copy(update={"stages": stages})
        changed = {"pipelines": (pipeline,), "degrees": Degrees(), "sharding": "parameters"}
        return subtitle(file.plan.model_copy(update=changed), "sha256:0").partition("; a global batch")[0]

    assert subtitle_of(ranged) == "one device, parameters sharded, recomputing 3 of 8 layers"
    assert subtitle_of(stage, ranged).endswith(", parameters sharded, recomputing 3 of 8 layers on 1 of 2 stages")
    many = [ranged.model_copy(update={"recompute": ((0, last),)}) for last in range(5)]
    assert subtitle_of(*many).endswith(", recomputing some layers on every stage")


def test_a_row_of_many_devices_says_so(file: PlanFile, page: str, problem: Problem, timeline: Timeline) -> None:
    """Devices that hold a stage together share a row, which has the first one's name."""
    assert "A row shows" not in page
    stages = tuple(
        stage.model_copy(update={"devices": tuple(f"{name}{k}" for name in stage.devices for k in range(4))})
        for stage in file.plan.pipelines[0].stages
    )
    pipeline = file.plan.pipelines[0].model_copy(update={"stages": stages})
    plan = file.plan.model_copy(update={"pipelines": (pipeline,)})
    alone = judge(file).plan
    assert together(alone) == 1
    plan = plan.model_copy(update={"prediction": alone.prediction})
    sentence = rows_in_words(replace(picture_of_timeline(problem, timeline), together=together(plan)))
    assert sentence == "A row shows 4 devices that do the same at the same time, under the name of the first."
