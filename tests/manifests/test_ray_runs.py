"""An exported job on a real Ray of two nodes: layers that ranks share, on each node a stage, trained and compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from repository import ROOT

from penstock.cli.main import main
from penstock.schemas.plan import PlanFile
from penstock.schemas.ranks.bundle import LaunchReport

sys.path.append(str(ROOT / "scripts"))
from trainers import INSTALLED, RELEASES

pytestmark = pytest.mark.tier("everything")

RELEASE = f"ray-{RELEASES['ray'][0]}"
CLUSTER = """
import os, subprocess, sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
cluster.add_node(num_cpus=2)
cluster.wait_for_nodes()
try:
    done = subprocess.run([sys.executable, "ray_job.py"], env=os.environ | {"RAY_ADDRESS": cluster.address})
finally:
    cluster.shutdown()
sys.exit(done.returncode)
"""
"""Two nodes of two CPUs each, as processes of this host, and the exported script among them."""


def planned(folder: Path) -> Path:
    """Plan two stages at tensor 2, one on each of two nodes of two devices."""
    profile, plan = (folder / f"{name}.json" for name in ("profile", "plan"))
    job = ["--job", "examples.llama:tiny", "--analytic", "H100", "--tensor", "2"]
    assert main(["profile", *job, "--micro-batch-size", "1", "--micro-batch-size", "2", "-o", str(profile)]) == 0
    profile.write_text(profile.read_text().replace('"H100"', '"cpu"'))
    hosts = ROOT / "examples" / "topologies" / "cpu-2-hosts.yaml"
    options = ["--profile", str(profile), "--topology", str(hosts), "-b", "8", "--planner", "gpipe", "--tensor", "2"]
    assert main(["plan", *options, "--sharding", "none", "-o", str(plan)]) in (0, 2)
    assert len(PlanFile.read(plan).plan.pipelines[0].stages) == 2
    return plan


@pytest.mark.timeout(600)
def test_ray_starts_the_ranks_of_every_node_and_they_train(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    release = INSTALLED / RELEASE
    if not release.is_dir():
        say = pytest.fail if pytestconfig.getoption("tier") == "everything" else pytest.skip
        say(f"{RELEASE} is not installed: scripts/trainers")
    command = f"{sys.executable} -P -m penstock.cli.main"
    options = ["--to", "ray", "--job", "examples.llama:tiny", "--steps", "2", "--directory", str(ROOT)]
    for setting in (f"command={command}", "nodes=any", f"report={tmp_path}/report.json"):
        options += ["--set", setting]
    assert main(["export", str(planned(tmp_path)), *options, "-o", str(tmp_path / "job")]) == 0
    launch = tmp_path / "job" / "launch.json"
    launched = json.loads(launch.read_text())
    assert [(node["ranks"], node["resources"]) for node in launched["nodes"]] == [
        ([0, 1], {"CPU": 2}),
        ([2, 3], {"CPU": 2}),
    ]
    launch.write_text(json.dumps(launched | {"options": [*launched["options"], "--check"]}))
    paths = [str(release), *filter(None, [os.environ.get("PYTHONPATH")])]
    with TemporaryDirectory(prefix="ray-") as short:  # the names of its sockets hold 107 bytes
        quiet = {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "RAY_TMPDIR": short}
        done = subprocess.run(
            [sys.executable, "-c", CLUSTER],
            cwd=tmp_path / "job",
            env=os.environ | quiet | {"PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            check=False,
            timeout=500,
        )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    report = LaunchReport.parse_json((tmp_path / "report.json").read_text())
    assert (report.state, report.steps_done, len(report.ranks)) == ("succeeded", 2, 4)
    assert report.gradient_check is not None
    assert report.gradient_check < 1e-5
