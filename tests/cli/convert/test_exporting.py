"""``penstock export PLAN --to FORM``: forms, files, settings from everywhere, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from repository import ROOT

from penstock.cli.main import main
from penstock.examples.tiny import tiny_plan_file
from penstock.exporting.forms import EXPORTS, FORMS
from penstock.manifests import TARGETS
from penstock.schemas.plan import PlanFile
from penstock.schemas.ranks.launch import LaunchSettings

JOB = ["--job", "m:job", "--steps", "3"]


@pytest.fixture
def plan(tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(tiny_plan_file()))
    return str(path)


def test_help_lists_every_form_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--help"]) == 0
    output = capsys.readouterr().out
    for name, text in EXPORTS.items():
        assert any(line.split(None, 1) == [name, text] for line in output.splitlines())


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["chrome-trace", "two.json"], "`penstock export two.json --to chrome-trace`"),
        (["sbatch", "two.json", "--job", "m:job"], "`penstock export two.json --job m:job --to sbatch`"),
        (["svg"], "`penstock export PLAN --to svg`"),
    ],
)
def test_a_form_in_the_plan_s_place_is_told_the_line(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", *words]) == 64
    assert f"{words[0]} is an export format; the plan comes first: {line}" in capsys.readouterr().err


def test_one_file_goes_to_standard_output_or_where_it_is_told(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", plan, "--to", "hostfile"]) == 0
    assert capsys.readouterr().out == "node0\nnode1\n"
    assert main(["export", "--to", "hostfile", "-o", str(tmp_path / "hosts"), plan]) == 0
    assert (tmp_path / "hosts").read_text() == "node0\nnode1\n"
    assert "SLURM_HOSTFILE=" in capsys.readouterr().out
    assert main(["export", "plan", plan, "--to", "plan", "-o", str(tmp_path)]) == 0
    [written] = tmp_path.glob("plan-*.json")
    assert PlanFile.read(written).plan.planner == "by-hand"


def test_several_files_go_to_a_folder(plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", plan, "--to", "sbatch", *JOB]) == 64
    assert "sbatch is 3 files (job.sbatch, hostfile, job.json)" in capsys.readouterr().err
    folder = tmp_path / "a b" / "c"
    assert main(["export", plan, "--to", "sbatch", *JOB, "-o", str(folder)]) == 0
    assert {path.name for path in folder.iterdir()} == {"job.sbatch", "hostfile", "job.json"}
    assert (folder / "job.sbatch").stat().st_mode & 0o111
    assert f"next: cd '{folder}' && sbatch job.sbatch" in capsys.readouterr().out
    assert main(["export", plan, "--to", "sbatch", *JOB, "-o", plan]) == 1


def test_settings_of_a_file_of_set_and_of_options(plan: str, tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("image: site/image\nnamespace: site\nsteps: 1\nenvironment: [A=1]\n")
    command = ["export", plan, "--to", "jobset", "--settings", str(site), "--set", "namespace=team", "--set", "steps=2"]
    out = tmp_path / "job.yaml"
    assert main([*command, *JOB, "--set", "environment=B=2", "--env", "C=3", "-o", str(out)]) == 0
    job = list(yaml.safe_load_all(out.read_text()))[1]
    container = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    assert (job["metadata"]["namespace"], container["image"], container["command"][-1]) == ("team", "site/image", "3")
    assert [one["name"] for one in container["env"][-2:]] == ["B", "C"]


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        pytest.param(["--to", "jobst"], 64, "did you mean 'jobset'?", id="form"),
        pytest.param([], 64, "Missing option '--to'", id="no export format"),
        pytest.param(["--to", "svg", "--job", "m:a"], 65, "model would have no effect on svg", id="idle"),
        pytest.param(["--to", "jobset"], 65, "jobset needs `model` and `steps` and `image`", id="missing"),
        pytest.param(["--to", "jobset", "--set", "quue=x"], 64, "did you mean 'queue'?", id="unknown setting"),
        pytest.param(
            ["--to", "jobset", "--set", "queue"], 64, "'queue' is not KEY=VALUE, such as partition=gpu", id="no value"
        ),
        pytest.param(["--to", "sbatch", "--set", "steps=x"], 65, "/steps: train up to this step", id="not a number"),
        pytest.param(["--to", "hostfile", "--against", "absent"], 65, "cannot read 'absent'", id="against nothing"),
        pytest.param(
            ["--to", "sbatch", "--nodes", "any", "--against", "x"],
            64,
            "checks the plan's own nodes",
            id="against any",
        ),
        pytest.param(["--to", "hostfile", "--server", "http://127.0.0.1:9"], 64, "not a file", id="a file there"),
    ],
)
def test_refusals(plan: str, capsys: pytest.CaptureFixture[str], more: list[str], code: int, message: str) -> None:
    assert main(["export", plan, *more]) == code
    assert message in capsys.readouterr().err


def test_a_plan_for_nodes_that_are_gone(plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now = tmp_path / "topology.conf"
    now.write_text("SwitchName=leaf Nodes=node[0,2-9]\n")
    assert main(["export", plan, "--to", "hostfile", "--against", str(now)]) == 1
    assert "there is no node 'node1'" in capsys.readouterr().err
    now.write_text("SwitchName=leaf Nodes=node[0-9]\n")
    assert main(["export", plan, "--to", "hostfile", "--against", str(now)]) == 0


def test_a_model_that_ranks_would_not_find_is_noted(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("penstock.cli.run.model_fit._answer", lambda _question: {"kind": "ready"})
    Path("m.py").touch()

    def noted(*more: str) -> bool:
        assert main(["export", plan, *JOB, *more]) == 0
        return f"--directory {tmp_path}" in capsys.readouterr().out

    assert noted("--to", "sbatch", "-o", "job")
    assert not noted("--to", "sbatch", "-o", "job", "--directory", "/shared")
    assert not noted("--to", "sbatch", "-o", ".")
    assert not noted("--to", "jobset", "--image", "i", "-o", "job.yaml")


PAGE = (ROOT / "docs" / "launching.md").read_text(encoding="utf-8")


@pytest.mark.tier("quick")
def test_the_page_has_every_form_and_every_setting() -> None:
    forms, settings = (
        re.findall(rf"^\| {head}.*\n\|-.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)[0] for head in ("form", "setting")
    )
    first_cells = [" ".join(row.split("|")[1] for row in table.splitlines()) for table in (forms, settings)]
    named, set_ = (set(re.findall(r"`([^`]+)`", cells)) for cells in first_cells)
    assert TARGETS.keys() <= named <= EXPORTS.keys()
    assert set_ == set(LaunchSettings.model_fields)


@pytest.mark.tier("quick")
def test_every_setting_has_an_effect_somewhere() -> None:
    names = set().union(*(form.takes for form in (*TARGETS.values(), *FORMS.values())))
    assert names == set(LaunchSettings.model_fields)


MODEL = """\
import torch
from torch import nn
from penstock.executor.run.job import SimpleJob

class Two(SimpleJob):
    def layers(self):
        return [(name, lambda: nn.Linear(2, 2)) for name in {names!r}]

    def batch(self, step, rows):
        return {{"x": torch.zeros(len(rows), 2)}}, torch.zeros(len(rows))

    def optimizer(self, params):
        raise NotImplementedError

    def loss(self, outputs, targets):
        raise NotImplementedError

job = Two("two", batch_size=64)
"""


COMMAND = ["--job", "mine:job", "--steps", "3", "-o"]


def test_a_model_with_other_layers_is_refused(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MODEL.format(names=["other", "names"]))
    monkeypatch.delattr("penstock.planning.programs.bundles.make_bundle")
    assert main(["export", plan, "--to", "sbatch", *COMMAND, "made"]) == 1, "before the programs of all ranks are made"
    assert "layer 0 of model 'mine:job' is 'other'" in capsys.readouterr().err
    assert not Path("made").exists(), "nothing is written"


@pytest.mark.tier("nightly")
def test_a_model_that_cannot_be_compared_is_said_and_one_that_fits_is_not(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["export", plan, "--to", "sbatch", *COMMAND]
    assert main([*command, "without"]) == 0
    assert "were not compared with the plan's (there is no module 'mine' here)" in capsys.readouterr().err
    Path("mine.py").write_text(MODEL.format(names=["other", "names"]))
    assert main(["export", plan, "--to", "jobset", *COMMAND, "job.yaml", "--image", "i"]) == 0
    assert "warning: the mine that lies here does not fit the plan" in capsys.readouterr().err
    layers = PlanFile.read(plan).request.profile.layers  # type: ignore[union-attr]
    Path("mine.py").write_text(MODEL.format(names=[layer.name for layer in layers]))
    assert main([*command, "fits"]) == 0
    assert "mine" not in capsys.readouterr().err
    Path("mine.py").write_text("raise RuntimeError('no GPU')")
    assert main([*command, "raises"]) == 0
    assert "were not compared with the plan's" in capsys.readouterr().err
