"""The pages on adding a schedule and a planner, word for word: what they add is built, asked, judged and exported.

Their files and rows are put beside the package's own, in the way that the pages tell, and a fresh interpreter reads
them in place of these.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT, Piece, pieces_of_section

pytestmark = pytest.mark.tier("ci")

PAGE = ROOT / "docs/extending.md"
SECTIONS = ("Adding a schedule", "Adding a planner")
FOLDERS = ("schedules", "planners")

BEGIN = """
import json, sys
from dataclasses import replace
from pathlib import Path
import penstock.solvers.planners, penstock.solvers.schedules

for package in (penstock.solvers.planners, penstock.solvers.schedules):
    package.__path__.insert(0, str(Path("solvers", package.__name__.rpartition(".")[2]).resolve()))

from penstock.solvers.planners.catalogue import PLANNERS
from penstock.solvers.schedules.catalogue import SCHEDULES

calls = {"two-more": 0, "equal": 0}

def counted(name, function):
    def call(*args, **more):
        calls[name] += 1
        return function(*args, **more)
    return call

def taken():
    found = dict(calls)
    calls.update(dict.fromkeys(calls, 0))
    return found

SCHEDULES["two-more"] = replace(SCHEDULES["two-more"], build=counted("two-more", SCHEDULES["two-more"].build))
PLANNERS["equal"] = replace(PLANNERS["equal"], proposals=counted("equal", PLANNERS["equal"].proposals))
said = {}
"""

ASK = """
import penstock
from penstock.planning.judge import judge
from penstock.planning.programs.lower import programs
from penstock.schemas.plan import PlanFile

how = {"global_batch_size": 32, "micro_batch_sizes": [2], "degrees": {"tensor": 1}}
said["auto"] = penstock.plan("gpt2-small", "1x4xV100", **how).status, taken()
asked = penstock.plan("gpt2-small", "1x4xV100", schedule="two-more", **how)
said["two-more"] = asked.file.plan.schedule.name, asked.file.plan.planner, taken()
alone = penstock.plan("gpt2-small", "1x4xV100", planner="equal", **how)
said["equal"] = alone.file.plan.schedule.name, alone.file.plan.planner, taken()
for name, file in (("two-more", asked.file), ("equal", alone.file)):
    judged = judge(file)
    said[name + " judged"] = list(judged.faults), judged.timeline.time_per_global_batch_ns, len(programs(file))
"""

LIST = """
from penstock.cli import completion
from penstock.service.jobs.judging import planners

rows = {row.name: row for row in planners()}
said["listed"] = rows["equal"].schedules, list(rows["equal"].options), rows["dapple"].schedules, rows["auto"].schedules
said["completed"] = completion.planners("eq"), completion.schedules("two")
"""

COMMANDS = """
from penstock.cli.main import main

said["commands"] = [(words, main(words)) for words in json.loads(sys.argv[1])]
"""

END = """
Path("said.json").write_text(json.dumps(said))
"""


def added() -> list[Piece]:
    """Return files and rows of both pages."""
    return [
        piece for section in SECTIONS for piece in pieces_of_section(PAGE, section) if piece.file.startswith("solvers/")
    ]


def put(piece: Piece, place: Path) -> None:
    """Write a file as it stands, or a row at the end of the table, with its import above."""
    path = place / piece.file
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name != "catalogue.py":
        path.write_text(piece.text)
        return
    table = (ROOT / piece.file).read_text()
    (module,) = (each.file for each in added() if Path(each.file).parent == Path(piece.file).parent and each != piece)
    package, name = f"penstock.solvers.{path.parent.name}", Path(module).stem
    line = f"from {package} import {name}" if path.parent.name == "planners" else f"from {package}.{name} import {name}"
    begun, end, rest = table.partition("\n    )\n}\n")
    first, future, imports = begun.partition("from __future__ import annotations\n")
    assert end
    assert future
    row = textwrap.indent(piece.text.rstrip(), " " * 8)
    path.write_text(f"{first}{future}{line}\n{imports}\n{row},{end}{rest}")


def commands(section: str) -> list[list[str]]:
    """Return the commands in which the page shows the additions."""
    return [piece.words[1:] for piece in pieces_of_section(PAGE, section) if piece.kind == "shell" and _of_added(piece)]


def _of_added(piece: Piece) -> bool:
    return any(name in piece.bare for name in ("two-more", "equal"))


def interpreted(place: Path, *scripts: str, arguments: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return what a fresh interpreter with both rows writes."""
    for piece in added():
        put(piece, place)
    text = "\n".join((BEGIN, *scripts, END))
    paths = [str(ROOT / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-c", text, *arguments]
    ended = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    results: dict[str, Any] = json.loads((place / "said.json").read_text())
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    words = [line for section in SECTIONS for line in commands(section)]
    place = tmp_path_factory.mktemp("added")
    results = interpreted(place, ASK, LIST, COMMANDS, arguments=(json.dumps(words),))
    return results | {"place": str(place), "words": words}


@pytest.mark.tier("quick")
def test_each_page_shows_one_file_and_one_row() -> None:
    assert [Path(piece.file).name for piece in added()] == ["two_more.py", "catalogue.py", "equal.py", "catalogue.py"]
    assert [len(commands(section)) for section in SECTIONS] == [4, 3]


@pytest.mark.tier("nightly")
def test_auto_builds_the_schedule_and_asks_the_planner(results: dict[str, Any]) -> None:
    status, calls = results["auto"]
    assert status in ("feasible", "optimal")
    assert calls["two-more"] > 0
    assert calls["equal"] == 1


@pytest.mark.tier("nightly")
def test_what_is_asked_for_is_what_the_answer_has(results: dict[str, Any]) -> None:
    schedule, planner, calls = results["two-more"]
    assert (schedule, planner) == ("two-more", "dapple")
    assert calls["two-more"] > 0
    schedule, planner, calls = results["equal"]
    assert (schedule, planner) == ("early-backward", "equal")
    assert calls == {"two-more": 0, "equal": 1}


def test_answers_are_judged_and_lowered(results: dict[str, Any]) -> None:
    for name in ("two-more", "equal"):
        faults, time_ns, ranks = results[f"{name} judged"]
        assert faults == []
        assert time_ns > 0
        assert ranks == 4


def test_listings_and_completion_have_both(results: dict[str, Any]) -> None:
    schedules, options, of_dapple, of_auto = results["listed"]
    assert schedules == ["auto", "early-backward", "gpipe"]
    assert options == ["stages"]
    assert "two-more" in of_dapple
    assert "two-more" in of_auto
    assert results["completed"] == [["equal"], ["two-more"]]


def test_the_commands_of_the_pages_run(results: dict[str, Any]) -> None:
    assert [words for words, _code in results["commands"]] == results["words"]
    assert all(code == 0 for _words, code in results["commands"]), results["commands"]
    place = Path(results["place"])
    job = json.loads((place / "two-more-job.json").read_text())
    assert len(job["ranks"]) == 4
    assert len(json.loads((place / "two-more-trace.json").read_text())["traceEvents"]) > 100
    plan = json.loads((place / "equal.json").read_text())["plan"]
    assert (plan["planner"], plan["schedule"]["name"]) == ("equal", "gpipe")
