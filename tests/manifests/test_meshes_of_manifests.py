"""Plans whose layers several GPUs share: a process on each GPU of each node, according to the plan's devices."""

from __future__ import annotations

import json
from functools import cache

import pytest
import yaml
from test_kubernetes import KINDS, validator

import penstock
from penstock.examples import catalogue
from penstock.examples.shapes import SHAPES
from penstock.manifests import make
from penstock.schemas.plan import PlanFile
from penstock.schemas.program import Program
from penstock.schemas.ranks.bundle import JobBundle
from penstock.schemas.ranks.launch import LaunchSettings
from penstock.schemas.request import PlanRequest
from penstock.shapes.profiles import profile_of

LAUNCH = LaunchSettings.parse({"model": "train.jobs:llama", "steps": 7})


@cache
def plan_at_tensor(degree: int) -> PlanFile:
    """Plan two stages of two replicas on two nodes of eight GPUs."""
    shape = SHAPES["llama-3-8b"].model_copy(update={"layers": 6})
    profile = profile_of(shape, "megatron", ("H100",), micro_batch_sizes=(1, 2))
    request = PlanRequest.model_validate(
        {"profile": profile, "topology": catalogue.cluster("2x8xH100"), "global_batch_size": 16}
    )
    return penstock.even_layout(request, tensor=degree, pipeline=2).file


def text_of(to: str, name: str, degree: int) -> str:
    return next(each.text for each in make(plan_at_tensor(degree), to, LAUNCH) if each.name == name)


@pytest.mark.parametrize("degree", [2, 4])
def test_every_gpu_of_a_cell_has_a_process_in_the_order_of_the_plans_devices(degree: int) -> None:
    file = plan_at_tensor(degree)
    bundle = JobBundle.parse(json.loads(text_of("sbatch", "job.json", degree)))
    assert [part.device for part in bundle.ranks] == [
        device for stage in file.plan.pipelines[0].stages for device in stage.devices
    ]
    assert bundle.nodes() == {"node0": tuple(range(8)), "node1": tuple(range(8, 16))}
    for rank, part in enumerate(bundle.ranks):
        mesh = Program.from_json(part.programs[0]).mesh
        assert mesh is not None
        assert (mesh.tensor, mesh.tensor_rank) == (degree, rank % degree)
        together = Program.from_json(part.programs[0]).groups[mesh.tensor_group]
        assert together == tuple(range(rank - rank % degree, rank - rank % degree + degree))


def test_launchers_start_a_process_on_every_gpu_of_every_node() -> None:
    script = text_of("sbatch", "job.sbatch", 4)
    for option in ("--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8"):
        assert f"#SBATCH {option}\n" in script
    assert text_of("sbatch", "hostfile", 4).split() == ["node0"] * 8 + ["node1"] * 8
    assert text_of("torchrun", "torchrun.sh", 4).count("count=8 ;;") == 2


@pytest.mark.parametrize("to", KINDS)
@pytest.mark.parametrize("degree", [2, 8])
def test_manifests_at_degrees_keep_their_schemas(to: str, degree: int) -> None:
    """Minima and rules in CEL are not in these schemas."""
    more = {"image": "registry.example/train:1"} | ({"queue": "gpus"} if to == "kueue" else {})
    settings = LaunchSettings.parse({"model": "train.jobs:llama", "steps": 7} | more)
    (written,) = make(plan_at_tensor(degree), to, settings)
    _config_map, job = yaml.safe_load_all(written.text)
    assert [fault.message for fault in validator(KINDS[to]).iter_errors(job)] == []
