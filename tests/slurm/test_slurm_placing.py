"""The Slurm examples of placement on a real Slurm: jobs held by the plugin, then placed; and a wrapper of sbatch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import LIMIT_S, Slurm, why_not
from orphans import no_orphans
from repository import ROOT

from penstock.cli.main import main
from penstock.examples.tiny import tiny_profile

EXAMPLES = ROOT / "examples/schedulers/slurm"
DEVICES = (
    "--device-kind",
    "V100",
    "--memory",
    "16GiB",
    "--fabric",
    "bus",
    "--fabric-bandwidth",
    "2GB/s",
    "--nic",
    "10Gbit/s",
)


class WithPlugin(Slurm):
    """A Slurm with ``job_submit.lua``."""

    def _write(self, leaves: tuple[tuple[str, ...], ...]) -> None:
        super()._write(leaves)
        shutil.copy(EXAMPLES / "job_submit.lua", self.directory)
        with (self.directory / "slurm.conf").open("a") as conf:
            conf.write("JobSubmitPlugins=lua\n")


@pytest.fixture(scope="module")
def slurm() -> Iterator[WithPlugin]:
    """Three nodes, of which n1 and n2 share a switch; with their topology, a profile and ``penstock`` beside them."""
    lacking = why_not()
    if lacking is not None:
        pytest.skip(lacking)
    directory = Path(tempfile.mkdtemp(prefix="penstock-slurm-"))
    with no_orphans(within_s=10):
        started = WithPlugin(directory, (("n0",), ("n1", "n2")))
        _prepare(started)
        yield started
        started.close()
    assert started.left_over() == []
    shutil.rmtree(directory)


def _prepare(slurm: Slurm) -> None:
    here = slurm.directory
    (here / "nodes.txt").write_text(slurm.run("scontrol", "show", "nodes"))
    (here / "tree.txt").write_text(slurm.run("scontrol", "show", "topology"))
    sources = [str(here / "nodes.txt"), str(here / "tree.txt")]
    assert main(["import", "topology", *sources, *DEVICES, "-o", str(here / "cluster.json")]) == 0
    (here / "profile.json").write_text(json.dumps(tiny_profile()))
    command = here / "penstock"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m penstock.cli.main "$@"\n')
    command.chmod(0o755)
    slurm.environment["PENSTOCK"] = str(command)
    script = here / "job.sh"
    script.write_text("#!/bin/sh\nscontrol show hostnames > ran-on-$SLURM_JOB_ID\n")
    script.chmod(0o755)


def _example(slurm: Slurm, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(EXAMPLES / name), *arguments],
        env=slurm.environment | {"PATH": os.environ["PATH"]},
        cwd=slurm.directory,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_a_held_job_runs_on_the_nodes_that_were_chosen(slurm: Slurm) -> None:
    wish = "--comment=penstock profile=profile.json batch=16 nodes=2"
    where = f"--chdir={slurm.directory}"
    job = slurm.submit(slurm.directory / "job.sh", wish, where)
    assert "JobState=PENDING Reason=JobHeld" in slurm.run("scontrol", "show", "job", job)
    other = slurm.submit(slurm.directory / "job.sh", wish.replace("nodes=2", "nodes=1"), where)
    greedy = slurm.submit(slurm.directory / "job.sh", wish.replace("nodes=2", "nodes=4"), where)
    slurm.environment["PLAN_DIRECTORY"] = str(slurm.directory)
    done = _example(slurm, "place-held-jobs", str(slurm.directory / "cluster.json"), "--planner", "gpipe")
    assert done.returncode == 0, done.stderr
    del slurm.environment["PLAN_DIRECTORY"]
    assert f"job {job}: n[1-2]" in done.stdout
    assert f"job {other}: n0" in done.stdout, "what was promised a moment ago is not free"
    assert f"job {greedy} stays held" in done.stderr
    assert "needs at least 4 nodes" in done.stderr or "every node is promised" in done.stderr
    assert slurm.finished(job) == 0
    assert slurm.finished(other) == 0
    plan = slurm.directory / f"plan-{job}.json"
    assert main(["verify", str(plan)]) == 0
    plan.unlink()
    (slurm.directory / f"plan-{other}.json").unlink()
    assert (slurm.directory / f"ran-on-{job}").read_text().split() == ["n1", "n2"]
    slurm.run("scancel", greedy)


@pytest.mark.parametrize(
    ("comment", "words"),
    [
        ("penstock model=bert-48", "give batch=SAMPLES"),
        ("penstock batch=8", "give model=NAME or profile=FILE"),
        ("penstock model=bert-48 batch=8 nodes=many", "nodes=many is not a number of nodes"),
        ("penstock model=bert-48 batch=8 -x", "'-x' is none of"),
    ],
)
def test_a_comment_that_says_too_little_is_refused_at_once(slurm: Slurm, comment: str, words: str) -> None:
    done = subprocess.run(
        ["sbatch", f"--comment={comment}", str(slurm.directory / "job.sh")],
        env=slurm.environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode != 0
    assert words in done.stderr


def test_other_jobs_are_left_alone(slurm: Slurm) -> None:
    job = slurm.submit(slurm.directory / "job.sh", "--comment=penstocks are pipes")
    assert slurm.finished(job) == 0


def test_the_wrapper_submits_for_the_chosen_nodes(slurm: Slurm) -> None:
    options = ["--profile", f"{slurm.directory}/profile.json", "--global-batch-size", "16", "--nodes", "2"]
    where = ["cluster.json", "--planner", "gpipe", *options, "--", "--parsable", "job.sh"]
    done = _example(slurm, "penstock-sbatch", *where)
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    assert slurm.finished(job) == 0
    assert (slurm.directory / f"ran-on-{job}").read_text().split() == ["n1", "n2"]
    (plan,) = slurm.directory.glob("plan-*.json")
    assert main(["verify", str(plan)]) == 0
    refused = _example(slurm, "penstock-sbatch", "cluster.json", *options[:-1], "4", "--", "job.sh")
    assert refused.returncode == 1
    assert "needs at least 4 nodes" in refused.stderr
    assert list(slurm.directory.glob("plan-*.json")) == [plan]
    assert _example(slurm, "penstock-sbatch", "cluster.json").returncode == 64
