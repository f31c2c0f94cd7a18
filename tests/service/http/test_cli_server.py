"""Commands with ``--server``: the same answers from a service as from this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from service_process import Server

from penstock.cli.main import main
from penstock.examples.tiny import tiny_request
from penstock.schemas.api.jobs import JobOut, JobPage
from penstock.schemas.plan import PlanFile


@pytest.fixture(scope="module")
def planned(shared_server: Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, str]:
    """The service's URL, a plan that it found, and its job."""
    place = tmp_path_factory.mktemp("planned")
    request = place / "request.json"
    request.write_text(json.dumps({**tiny_request(), "planner": "dapple", "seed": 5}))
    plan = place / "plan.json"
    assert main(["plan", "--request", str(request), "--server", shared_server.url, "-o", str(plan)]) == 0
    (job,) = shared_server.client.jobs.page(limit=1).items
    return shared_server.url, plan, job.id


def test_plan_there_is_plan_here(planned: tuple[str, Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    url, plan, job = planned
    request = str(plan.with_name("request.json"))
    code = main(["plan", "--request", request, "--json", "-o", str(tmp_path / "here.json")])
    assert code in (0, 2)
    here = PlanFile.read(tmp_path / "here.json")
    assert PlanFile.read(plan).plan.pipelines == here.plan.pipelines
    capsys.readouterr()
    assert main(["plan", "--request", request, "--server", url, "--verbose"]) == code
    out = capsys.readouterr().out
    for words in ("dapple, ", "predicted", "bound", "stage"):
        assert words in out
    assert main(["plan", "--request", request, "--server", url, "--workers", "2"]) == 64
    assert "--workers" in capsys.readouterr().err
    assert main(["jobs", "show", job, "--server", url]) == 0
    assert "predicted" in capsys.readouterr().out


@pytest.mark.cases(1)
@pytest.mark.parametrize("source", ["file", "job"])
def test_the_judge_there(planned: tuple[str, Path, str], source: str, capsys: pytest.CaptureFixture[str]):
    url, plan, job = planned
    named = str(plan) if source == "file" else job
    assert main(["verify", named, "--server", url]) == 0
    assert capsys.readouterr().out == ""
    assert main(["verify", named, "--server", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["valid"] is True
    assert main(["simulate", named, "--server", url, "--json"]) == 0
    prediction = json.loads(capsys.readouterr().out)
    assert main(["simulate", str(plan), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == prediction
    assert main(["simulate", named, "--server", url]) == 0
    assert "predicted" in capsys.readouterr().out
    assert main(["explain", named, "--server", url, "--what-if", "none"]) == 0
    assert "critical path" in capsys.readouterr().out
    assert main(["explain", named, "--server", url, "--cuts", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layout"]["theirs"] is not None


def test_forms_of_a_stored_plan(planned: tuple[str, Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    url, plan, job = planned
    page, drawn, chrome, rows = (tmp_path / name for name in ("page.html", "plan.svg", "chrome.json", "rows.csv"))
    for command in (["report"], ["export", "chrome"], ["export", "schedule"]):
        assert main([*command, str(plan), "-o", str(page), "--server", url]) == 64
        assert "the hash or the job" in capsys.readouterr().err
    assert main(["report", job, "-o", str(page), "--server", url]) == 0
    assert page.read_text().startswith("<!doctype html>")
    assert main(["report", job, "-o", str(drawn), "--server", url]) == 0
    assert "<svg" in drawn.read_text()
    assert main(["export", "chrome", PlanFile.read(plan).plan.content_hash(), "-o", str(chrome), "--server", url]) == 0
    assert json.loads(chrome.read_text())["traceEvents"]
    assert main(["export", "schedule", job, "-o", str(rows), "--server", url]) == 0
    assert main(["export", "schedule", str(plan)]) == 0
    assert rows.read_text() == capsys.readouterr().out


@pytest.mark.tier("nightly")
def test_compare_and_sweep_there(planned: tuple[str, Path, str], capsys: pytest.CaptureFixture[str]):
    url, plan, _ = planned
    request = ["--request", str(plan.with_name("request.json"))]
    assert main(["compare", *request, "--planner", "dp", "--planner", "gpipe", "--json", "--server", url]) == 0
    there = json.loads(capsys.readouterr().out)
    assert {row["planner"] for row in there} == {"dp", "gpipe"}
    axes = ["-b", "4", "-b", "8", "--planner", "dp", "--planner", "gpipe", "--json"]
    tables = []
    for where in (["--server", url], ["--executor", "local:1"]):
        assert main(["sweep", *request, *axes, *where]) == 0
        tables.append(json.loads(capsys.readouterr().out)["rows"])
    assert [(row["global_batch_size"], row["planner"]) for row in tables[0]] == [
        (4, "dp"), (4, "gpipe"), (8, "dp"), (8, "gpipe")
    ]  # fmt: skip
    assert [row["plan_hash"] for row in tables[0]] == [row["plan_hash"] for row in tables[1]]
    assert any(row["pareto"] for row in tables[0])
    assert main(["sweep", *request, *axes[:-1], "--server", url]) == 0
    assert "samples/s" in capsys.readouterr().out


def test_jobs_from_first_to_last(planned: tuple[str, Path, str], capsys: pytest.CaptureFixture[str]):
    url, _, job = planned
    there = ["--server", url]
    assert main(["jobs", "list", *there, "--planner", "dapple", "--json"]) == 0
    items = JobPage.model_validate_json(capsys.readouterr().out).items
    assert {one.planner for one in items} == {"dapple"}
    assert job in {one.id for one in items}
    assert main(["jobs", "list", *there]) == 0
    assert "succeeded" in capsys.readouterr().out
    assert main(["jobs", "watch", job, *there, "--json"]) == 0
    assert JobOut.model_validate_json(capsys.readouterr().out).state == "succeeded"
    assert main(["jobs", "finish", job, *there]) == 0, "it has its best plan already"
    for command in ("cancel", "retry"):
        assert main(["jobs", command, job, *there]) == 1
        assert "succeeded" in capsys.readouterr().err
    assert main(["jobs", "show", "nothing", *there]) == 1
    assert main(["jobs", "delete", job, *there]) == 0
    assert main(["jobs", "show", job, *there]) == 1


def test_a_service_that_is_not_there(capsys: pytest.CaptureFixture[str]):
    assert main(["jobs", "list", "--server", "http://127.0.0.1:1"]) == 1
    assert "does not answer" in capsys.readouterr().err
