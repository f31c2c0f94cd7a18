"""Tests from ``scontrol`` to trained ranks on a real Slurm; and the same ranks started by torchrun."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, chdir
from pathlib import Path
from typing import Any

import pytest
from cluster import LIMIT_S, Slurm, why_not
from orphans import no_orphans
from ports import keep_port
from repository import ROOT

from penstock.cli.main import main
from penstock.schemas.plan import PlanFile
from penstock.schemas.profile import BoundaryTensor, Layer, LayerMeasurement, Measurement, ModelProfile, ProfileSource
from penstock.schemas.ranks.bundle import JobBundle, LaunchReport
from penstock.schemas.trace import Trace

STEPS = 6
LAYERS, WIDTH, BATCH = 8, 12, 16
DEVICES = (
    "--device-kind",
    "cpu",
    "--memory",
    "1GiB",
    "--fabric",
    "bus",
    "--fabric-bandwidth",
    "2GB/s",
    "--nic",
    "10Gbit/s",
)
PENSTOCK = f"{sys.executable} -P -m penstock.cli.main"
HERE = ("--directory", str(Path(__file__).parent), "--set", f"command={PENSTOCK}")


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """Three nodes, of which n1 and n2 share a switch."""
    lacking = why_not()
    if lacking is not None:
        pytest.skip(lacking)
    directory = Path(tempfile.mkdtemp(prefix="penstock-slurm-"))
    with no_orphans(within_s=10):
        started = Slurm(directory, (("n0",), ("n1", "n2")))
        yield started
        started.close()
    assert started.left_over() == []
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of the job in ``toy.py``, all layers equally slow, so that four devices are better than one."""
    cost = LayerMeasurement(forward_ns=2_000_000, backward_ns=4_000_000, stash_bytes=1000)
    model = ModelProfile(
        name="toy",
        layers=tuple(Layer(name=f"block{i}", parameter_bytes=4 * (WIDTH * WIDTH + 3 * WIDTH)) for i in range(LAYERS)),
        boundaries=tuple(
            (BoundaryTensor(name="x", bytes_per_sample=4 * WIDTH, gradient_bytes_per_sample=4 * WIDTH),)
            for _ in range(LAYERS - 1)
        ),
        measurements=(Measurement(device_kind="cpu", micro_batch_size=1, layers=(cost,) * LAYERS),),
        source=ProfileSource(method="imported", expected_error=0.9),
    )
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    model.write(path)
    return path


@pytest.fixture(scope="module")
def commands() -> list[list[str]]:
    """Slurm's first block of docs/launching.md, a command each, with the values of this cluster and of this job."""
    page = (ROOT / "docs" / "launching.md").read_text(encoding="utf-8")
    section = page.partition("## Slurm: from `scontrol` to a training job\n")[2]
    block = re.split(r"```(?:bash)?\n", section)[1].replace("--checkpoint /shared/run1 ", "")
    for shown, here in (("-b 256", f"-b {BATCH} --planner dapple"), ("1000", str(STEPS)), ("mytrain:job", "toy:job")):
        assert shown in block
        block = block.replace(shown, here)
    return [shlex.split(line) for line in block.replace("&&", "\n").splitlines()]


@pytest.fixture(scope="module")
def followed(commands: list[list[str]], profile: Path, slurm: Slurm) -> Path:
    """The folder in which the page's commands were typed, up to the plan."""
    folder = slurm.directory / "followed"
    folder.mkdir()
    shutil.copy(profile, folder / "profile.json")
    show_topology, show_nodes, importing, placing, *_ = commands
    for command in (show_topology, show_nodes):
        (folder / command[-1]).write_text(slurm.run(*command[: command.index(">")]))
    with chdir(folder):
        assert main([*importing[1:], *DEVICES]) == 0
        assert main(placing[1:]) == 0
    return folder


@pytest.fixture(scope="module")
def topology(followed: Path) -> Path:
    """The import of the cluster as Slurm's own commands describe it."""
    return followed / "cluster.json"


@pytest.fixture(scope="module")
def placed(followed: Path) -> list[str]:
    """The nodes of the plan, in the order of its stages."""
    return nodes_of(followed / "plan.json")


@pytest.fixture(scope="module")
def turned(followed: Path, placed: list[str]) -> list[str]:
    """Exchange the plan's two nodes: its last stages are where Slurm begins to count, unless they were before."""
    first, second = sorted(placed)
    path = followed / "plan.json"
    data = json.loads(path.read_text())
    if placed == [first, second]:
        text = json.dumps(data["plan"]).replace(f'"{first}/', '"?/').replace(f'"{second}/', f'"{first}/')
        data["plan"] = json.loads(text.replace('"?/', f'"{second}/'))
        del data["plan"]["prediction"]
        path.write_text(json.dumps(data))
    return nodes_of(path)


@pytest.fixture(scope="module")
def narrow(profile: Path, topology: Path, slurm: Slurm) -> Path:
    """A plan of one stage on n0 and one on n1."""
    data = json.loads(topology.read_text())
    for node in data["nodes"]:
        node["devices"] = node["devices"][:1]
    data["nodes"] = [node for node in data["nodes"] if node["name"] != "n2"]
    data["links"] = [link for link in data["links"] if "n2" not in (link["a"], link["b"])]
    smaller, path = slurm.directory / "narrow-cluster.json", slurm.directory / "narrow.json"
    smaller.write_text(json.dumps(data))
    arguments = ["--profile", str(profile), "--topology", str(smaller), "--global-batch-size", str(BATCH)]
    assert main(["plan", *arguments, "--planner", "dapple", "--json", "-o", str(path)]) in (0, 2)
    return path


def nodes_of(plan: Path) -> list[str]:
    """Return the nodes of a plan in the order of its stages."""
    devices = [
        device
        for pipeline in PlanFile.read(plan).plan.pipelines
        for stage in pipeline.stages
        for device in stage.devices
    ]
    return list(dict.fromkeys(device.partition("/")[0] for device in devices))


def exported(plan: Path, to: str, folder: Path, *, job: str = "toy:job", **settings: Any) -> Path:
    """Export a plan, and return its script, beside its bundle."""
    settings_of_command = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    arguments = ["--job", job, "--steps", str(STEPS), *HERE, *settings_of_command]
    assert main(["export", str(plan), "--to", to, *arguments, "-o", str(folder)]) == 0
    (script,) = [*folder.glob("*.sbatch"), *folder.glob("torchrun.sh")][:1]
    return script


def log_of(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("*.log")))


def report_of(path: Path) -> LaunchReport:
    return LaunchReport.parse_json(path.read_text())


@pytest.fixture(scope="module")
def trained(commands: list[list[str]], followed: Path, turned: list[str], slurm: Slurm) -> LaunchReport:
    """The report of the turned plan, exported and submitted as the page says, and compared with a single process."""
    *_, exporting, change, submit = commands
    assert turned == ["n2", "n1"], "Slurm sorts"
    with chdir(followed):
        assert main([*exporting[1:], *HERE]) == 0
    folder = followed / change[-1]
    script = folder / submit[-1]
    script.write_text(script.read_text().rstrip("\n") + " --check --trace trace.json --plan ../plan.json\n")
    code = slurm.finished(slurm.submit(script))
    assert code == 0, log_of(folder)
    assert [one.rank for one in Trace.read(folder / "trace.json").ranks] == [0, 1, 2, 3]
    return report_of(folder / "report.json")


def test_a_job_is_placed_where_slurm_says_that_nodes_are_near(placed: list[str], topology: Path) -> None:
    data = json.loads(topology.read_text())
    assert [node["name"] for node in data["nodes"]] == ["n0", "n1", "n2"]
    assert sorted(placed) == ["n1", "n2"]


def test_stages_are_where_the_plan_puts_them_and_not_where_slurm_counts(trained: LaunchReport) -> None:
    assert (trained.launcher, trained.state, trained.steps_done) == ("srun", "succeeded", STEPS)
    assert {f"{one.node}/{one.local_rank}": one.device for one in trained.ranks} == {
        f"n{i}/{k}": f"n{i}/{k}" for i in (1, 2) for k in (0, 1)
    }
    assert len(trained.losses) == STEPS
    assert trained.losses[-1] < trained.losses[0]  # type: ignore[operator]
    assert trained.gradient_check is not None
    assert trained.gradient_check < 1e-5


def test_other_nodes_are_refused_with_what_can_be_done(narrow: Path, slurm: Slurm) -> None:
    folder = slurm.directory / "refused"
    bundle = exported(narrow, "sbatch", folder).with_name("job.json")
    script = folder / "elsewhere.sh"
    prolog = ROOT / "examples" / "schedulers" / "slurm" / "task-prolog.sh"
    command = f"srun --task-prolog={prolog} {PENSTOCK} rank {bundle} --job toy:job {shlex.join(HERE[:2])} --steps 1"
    script.write_text(f"#!/bin/bash\n{command}\n")
    where = ["--nodes=1", "--ntasks-per-node=1", "--nodelist=n2", f"--output={folder}/elsewhere.log"]
    assert slurm.finished(slurm.submit(script, *where)) == 65
    log = log_of(folder)
    assert "penstock: the plan does not name n2 (at spine.leaf1.n2)" in log, "the prolog"
    assert "the plan does not name n2: processes were started on n2 (1)" in log
    assert "sbatch --nodelist=n0,n1" in log
    assert "or add --any-nodes" in log


def test_a_job_that_is_cancelled_goes_on_when_it_is_submitted_again(
    narrow: Path, slurm: Slurm, trained: LaunchReport
) -> None:
    folder, gate = slurm.directory / "cancelled", slurm.directory / "gate"
    gate.touch()
    settings = {"report": folder / "report.json", "checkpoint": folder / "checkpoints"}
    script = exported(narrow, "sbatch", folder, environment=f"PENSTOCK_TEST_GATE={gate}", **settings)
    job = slurm.submit(script)
    slurm.until("a step is trained", lambda: "step 1 of" in log_of(folder))
    slurm.run("scancel", job)
    gate.unlink()
    slurm.finished(job)
    first = report_of(folder / "report.json")
    assert first.state == "left", log_of(folder)
    assert first.checkpoint_step == first.steps_done
    assert 1 <= first.steps_done < STEPS
    assert slurm.finished(slurm.submit(script)) == 0, log_of(folder)
    second = report_of(folder / "report.json")
    assert (second.state, second.first_step, second.steps_done) == ("succeeded", first.steps_done, STEPS)
    assert [*first.losses, *second.losses] == pytest.approx(trained.losses, rel=1e-4)


def started_by_torchrun(script: Path, folder: Path, nodes: Sequence[str]) -> list[int]:
    """Return the statuses of an agent of torchrun for each node."""
    with ExitStack() as ports:
        return [agent.wait(LIMIT_S) for agent in agents_of_torchrun(script, folder, nodes, keep_port(ports))]


def agents_of_torchrun(script: Path, folder: Path, nodes: Sequence[str], port: int) -> list[subprocess.Popen[bytes]]:
    """Start an agent of torchrun for each node."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PATH": path, "OMP_NUM_THREADS": "1"}
    agents = []
    for node in nodes:
        with (folder / f"{node}.log").open("wb") as log:
            environment = os.environ | meeting | {"NODE_NAME": node}
            agents.append(subprocess.Popen(["bash", str(script)], env=environment, stdout=log, stderr=log))
    return agents


def test_torchrun_starts_the_same_ranks(narrow: Path, slurm: Slurm, trained: LaunchReport) -> None:
    """Two agents of torchrun stand for two nodes, the plan's second one first."""
    folder = slurm.directory / "torchrun"
    script = exported(narrow, "torchrun", folder, report=folder / "report.json")
    assert started_by_torchrun(script, folder, ("n1", "n0")) == [0, 0], log_of(folder)
    report = report_of(folder / "report.json")
    assert report.launcher == "torchrun"
    bundle = JobBundle.read(folder / "job.json")
    assert [(one.node, one.device) for one in report.ranks] == [(part.node, part.device) for part in bundle.ranks]
    assert report.losses == pytest.approx(trained.losses, rel=1e-4)


@pytest.fixture(scope="module")
def shared_layers(topology: Path, slurm: Slurm) -> Path:
    """A plan of two stages, each on two GPUs of a node that share its layers."""
    folder = slurm.directory / "degrees"
    folder.mkdir()
    arguments = [
        "--job",
        "examples.llama:tiny",
        "--analytic",
        "H100",
        "--micro-batch-size",
        "1",
        "--micro-batch-size",
        "4",
    ]
    profile, plan = folder / "profile.json", folder / "plan.json"
    assert main(["profile", *arguments, "--tensor", "2", "-o", str(profile)]) == 0
    profile.write_text(profile.read_text().replace("H100", "cpu"))
    arguments = ["--profile", str(profile), "--topology", str(topology), "-b", str(BATCH), "--tensor", "2"]
    how = ["--sharding", "none", "--planner", "gpipe", "--set", "stages=2", "--max-plans", "20"]
    assert main(["plan", *arguments, *how, "-o", str(plan)]) == 0
    assert PlanFile.read(plan).plan.degrees.tensor == 2  # type: ignore[union-attr]
    assert len(nodes_of(plan)) == 2
    return plan


def test_ranks_that_share_layers_train_under_srun(shared_layers: Path, slurm: Slurm) -> None:
    """Compared with a single process, in the same job."""
    folder = slurm.directory / "degrees-srun"
    script = exported(shared_layers, "sbatch", folder, job="examples.llama:tiny", report=folder / "report.json")
    script.write_text(script.read_text().rstrip("\n") + " --check\n")
    assert slurm.finished(slurm.submit(script)) == 0, log_of(folder)
    report = report_of(folder / "report.json")
    assert (report.launcher, report.state, report.steps_done) == ("srun", "succeeded", STEPS)
    assert len(report.ranks) == 4
    assert report.gradient_check is not None
    assert report.gradient_check <= 1e-5


def test_ranks_that_share_layers_train_under_torchrun(shared_layers: Path, slurm: Slurm) -> None:
    folder = slurm.directory / "degrees-torchrun"
    script = exported(shared_layers, "torchrun", folder, job="examples.llama:tiny", report=folder / "report.json")
    assert started_by_torchrun(script, folder, nodes_of(shared_layers)) == [0, 0], log_of(folder)
    report = report_of(folder / "report.json")
    assert (report.launcher, report.state, len(report.ranks)) == ("torchrun", "succeeded", 4)
    assert report.losses == pytest.approx(report_of(slurm.directory / "degrees-srun" / "report.json").losses, rel=1e-5)
