"""Shell scripts of every target: what shellcheck says, and which words reach the commands in them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from plans import plan_on

from penstock.importers.cluster.hostlist import expand
from penstock.manifests import File, make
from penstock.schemas.errors import InvalidDocument, UnsupportedRequest
from penstock.schemas.plan import PlanFile
from penstock.schemas.ranks.launch import LaunchSettings

SHELLCHECK = Path(sys.executable).parent / "shellcheck"
EQUAL = {"gpu2": 2, "gpu10": 2}
UNEQUAL = {"b": 1, "a": 3}
NASTY = 'it\'s $(touch /tmp/penstock-was-here) `x` "$HOME" ; * \\ &'
ODD = {
    "directory": NASTY,
    "checkpoint": f"/data/{NASTY}",
    "environment": [f"ODD={NASTY}", "TWO=line one\nline two"],
    "command": f"env 'A B={NASTY.replace(chr(39), '')}' penstock",
    "name": NASTY,
    "report": "-r.json",
}


def launch(**more: object) -> LaunchSettings:
    return LaunchSettings.parse({"model": "train.jobs:gpt", "steps": 7, **more})


def files_of(to: str, file: PlanFile, **more: object) -> dict[str, File]:
    return {each.name: each for each in make(file, to, launch(**more))}


@pytest.mark.tier("ci")
def test_shellcheck_finds_nothing_in_any_script(tmp_path: Path) -> None:
    """All at once: a process costs more than a script."""
    scripts = []
    for number, (to, used, more) in enumerate(
        [
            ("sbatch", EQUAL, {}),
            ("sbatch", EQUAL, ODD | {"partition": "gpu", "time_limit": "1-00:30:00", "cpus_per_task": 8}),
            ("sbatch", EQUAL, {"nodes": "any", "switches": 1, "port": 1234, "setup": ["module load cuda"]}),
            ("sbatch", UNEQUAL, {}),
            ("sbatch-torchrun", UNEQUAL, ODD),
            ("sbatch-torchrun", EQUAL, {"nodes": "any"}),
            ("torchrun", EQUAL, ODD),
            ("torchrun", UNEQUAL, {}),
            ("torchrun", EQUAL, {"nodes": "any"}),
        ]
    ):
        for each in make(plan_on(used), to, launch(**more)):
            if each.is_executable:
                scripts.append(tmp_path / f"{number}-{each.name}")
                scripts[-1].write_text(each.text)
    assert len(scripts) == 11
    not_about_values = ["-e", "SC2016"]  # "expressions don't expand in single quotes": dollars of values shall not
    done = subprocess.run([SHELLCHECK, *not_about_values, *scripts], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_sbatch_asks_for_the_plans_nodes_and_orders_ranks_by_a_hostfile() -> None:
    files = files_of("sbatch", plan_on({"gpu10": 2, "gpu2": 2}), partition="gpu", account="team")
    script = files["job.sbatch"].text
    options = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2] for line in script.splitlines() if "#SBATCH" in line
    )
    assert expand(options["nodelist"]) == ["gpu2", "gpu10"]
    assert (options["nodes"], options["ntasks-per-node"], options["gpus-per-node"]) == ("2", "2", "2")
    assert (options["partition"], options["account"], options["exclusive"]) == ("gpu", "team", "")
    assert "requeue" not in options
    assert files["hostfile"].text.split() == ["gpu10", "gpu10", "gpu2", "gpu2"]
    assert "--distribution=arbitrary" in script
    assert set(files) == {"job.sbatch", "hostfile", "job.json"}


def test_unequal_nodes_and_parts_of_nodes() -> None:
    script = files_of("sbatch", plan_on(UNEQUAL, devices={"b": 4}))["job.sbatch"].text
    assert "#SBATCH --ntasks=4\n" in script
    assert "#SBATCH --gpus=4\n" in script
    assert "--exclusive" not in script
    assert "--ntasks-per-node" not in script


def test_cpus_are_no_gpus() -> None:
    assert "--gpus" not in files_of("sbatch", plan_on(EQUAL, kind="cpu"))["job.sbatch"].text


def test_any_nodes_are_not_named() -> None:
    files = files_of("sbatch", plan_on(EQUAL), nodes="any", segment=2)
    assert set(files) == {"job.sbatch", "job.json"}
    script = files["job.sbatch"].text
    assert "gpu2" not in script
    assert "--nodelist" not in script
    assert "#SBATCH --segment=2" in script
    assert script.rstrip().endswith("--any-nodes")


def test_checkpoints_make_a_job_that_slurm_may_start_again() -> None:
    script = files_of("sbatch", plan_on(EQUAL), checkpoint="/data/run", checkpoint_every=5)["job.sbatch"].text
    assert "#SBATCH --requeue" in script
    assert "--checkpoint /data/run --checkpoint-every 5 --resume auto" in script


@pytest.mark.tier("ci")
@pytest.mark.parametrize(("node", "started"), [("b", 1), ("a", 3), ("a.cluster.example", 3)])
def test_each_node_starts_its_own_number_with_every_word_as_it_was_given(
    tmp_path: Path, node: str, started: int
) -> None:
    for each in make(plan_on(UNEQUAL), "torchrun", launch(**ODD)):
        (tmp_path / each.name).write_text(each.text)
    process = _ran(tmp_path, node)
    assert process.returncode == 0, process.stderr
    *words, odd, two, master = process.stdout.split("\0")[:-1]
    assert f"--nproc-per-node={started}" in words
    assert "--nnodes=2" in words
    rank = words[words.index("--no-python") + 1 :]
    assert rank[:4] == [*shlex.split(ODD["command"]), "rank"]
    assert rank[4] == str(tmp_path / "job.json")
    assert rank[rank.index("--directory") + 1] == NASTY
    assert rank[rank.index("--checkpoint") + 1] == ODD["checkpoint"]
    assert (odd, two, master) == (NASTY, "line one\nline two", "b")
    assert not Path("/tmp/penstock-was-here").exists()


@pytest.mark.tier("ci")
def test_a_node_that_the_plan_does_not_have(tmp_path: Path) -> None:
    for each in make(plan_on(UNEQUAL), "torchrun", launch()):
        (tmp_path / each.name).write_text(each.text)
    process = _ran(tmp_path, "c")
    assert process.returncode == 65
    assert process.stderr == "the plan has no node c; it runs on b, a\n"
    (tmp_path / "job.json").unlink()
    assert "keep job.json next to this script" in _ran(tmp_path, "b").stderr


def _ran(folder: Path, node: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the script on a node, with a torchrun that prints its arguments and environment."""
    recorder = folder / "bin" / "torchrun"
    recorder.parent.mkdir(exist_ok=True)
    recorder.write_text('#!/bin/bash\nprintf "%s\\0" "$@" "${ODD-}" "${TWO-}" "$MASTER_ADDR"\n')
    recorder.chmod(0o755)
    environ = {"PATH": f"{recorder.parent}:{os.environ['PATH']}", "NODE_NAME": node} | more
    return subprocess.run(["bash", folder / "torchrun.sh"], env=environ, capture_output=True, text=True, check=False)


@pytest.mark.tier("ci")
def test_nodes_know_their_places_whatever_form_their_names_have(tmp_path: Path) -> None:
    names = {"gpu-b.east.example": 2, "gpu-a.east.example": 2, "twin.east.example": 2, "twin.west.example": 2, "7": 2}
    for each in make(plan_on(names), "torchrun", launch()):
        (tmp_path / each.name).write_text(each.text)
    for node, place in (
        ("gpu-b", 0),
        ("gpu-a.east.example", 1),
        ("gpu-a.other", 1),
        ("twin.west.example", 3),
        ("7", 4),
    ):
        words = _ran(tmp_path, node).stdout.split("\0")
        assert f"--node-rank={place}" in words
        assert "--master-addr=gpu-b.east.example" in words
    assert _ran(tmp_path, "twin").returncode == 65
    for each in make(plan_on(names), "torchrun", launch(nodes="any")):
        (tmp_path / each.name).write_text(each.text)
    assert "say in MASTER_ADDR the address of node 0" in _ran(tmp_path, "x").stderr
    assert "which node this is, from 0 to 4" in _ran(tmp_path, "x", MASTER_ADDR="m").stderr
    assert "--node-rank=3" in _ran(tmp_path, "x", MASTER_ADDR="m", NODE_RANK="3").stdout.split("\0")


@pytest.mark.tier("ci")
def test_what_a_site_adds_to_its_scripts(tmp_path: Path) -> None:
    setup = ["export ODD=$UNSET_HERE$NODE_NAME", 'TWO="it\'s" && export TWO']
    for each in make(plan_on(EQUAL), "torchrun", launch(setup=setup)):
        (tmp_path / each.name).write_text(each.text)
    assert _ran(tmp_path, "gpu2").stdout.split("\0")[-4:-1] == ["gpu2", "it's", "gpu2"]
    options = {
        "sbatch_options": ["--reservation=night", "--mem=900G"],
        "srun_options": ["--container-image=registry.example#train:1", "--mpi=none"],
    }
    for to, tasks in (("sbatch", 4), ("sbatch-torchrun", 4 * 3)):
        script = files_of(to, plan_on(UNEQUAL), cpus_per_task=4, setup=setup, **options)["job.sbatch"].text
        memory = [line for line in script.splitlines() if "--mem" in line]
        assert memory == ["#SBATCH --mem=0", "#SBATCH --mem=900G"], "the last one counts"
        assert "#SBATCH --reservation=night\n" in script
        assert script.index(setup[0]) < script.index("  '--container-image=registry.example#train:1' --mpi=none")
        assert f"#SBATCH --cpus-per-task={tasks}\n" in script


def test_names_that_would_mean_something_to_a_shell_are_refused() -> None:
    for name in ("a b", "a;rm", "-n", "$(x)", "a\nb", "x" * 256, "ü"):
        with pytest.raises(UnsupportedRequest, match="cannot name the plan's node"):
            make(plan_on({name: 1, "other": 1}), "sbatch", launch())


def test_what_is_missing_idle_or_contradictory_is_named() -> None:
    file = plan_on(EQUAL)
    with pytest.raises(InvalidDocument, match="sbatch needs `model` and `steps`"):
        make(file, "sbatch", LaunchSettings())
    with pytest.raises(InvalidDocument, match="image would have no effect on sbatch"):
        make(file, "sbatch", launch(image="x"))
    with pytest.raises(InvalidDocument, match="switches would have no effect on named nodes"):
        make(file, "sbatch", launch(switches=1))
    with pytest.raises(UnsupportedRequest, match="different numbers of ranks"):
        make(plan_on(UNEQUAL), "sbatch", launch(nodes="any"))
    with pytest.raises(InvalidDocument, match="No closing quotation"):
        make(file, "torchrun", launch(command="'x"))
    with pytest.raises(InvalidDocument) as caught:
        launch(partition="a b", time_limit="soon", model="x", environment=["1=2"])
    assert {fault.pointer for fault in caught.value.faults} == {"/partition", "/time_limit", "/model", "/environment/0"}
    assert "what is trained, as module:attribute" in str(caught.value)


@pytest.mark.tier("ci")
def test_a_unit_that_systemd_takes(tmp_path: Path) -> None:
    files = files_of("systemd", plan_on(EQUAL), name="a job", restarts=3, checkpoint="/data/x")
    unit = next(name for name in files if name.endswith(".service"))
    text = files[unit].text
    assert "Restart=on-failure" in text
    assert "StartLimitBurst=4" in text
    assert "EnvironmentFile=-/etc/penstock/" in text
    (tmp_path / unit).write_text(text)
    analyze = "/usr/bin/systemd-analyze"
    if not Path(analyze).exists():
        pytest.skip("systemd-analyze is not installed")
    done = subprocess.run([analyze, "verify", "--man=no", tmp_path / unit], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
