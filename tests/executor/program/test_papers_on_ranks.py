"""Each paper's system from request to gradients: planned, verified, lowered and run on ranks."""

from __future__ import annotations

import pytest
import torch
from rank_pool import RankPool, differences

from penstock.executor.profiling.analytic import analytic_profile
from penstock.executor.run.check import TOLERANCE
from penstock.executor.run.job import load_job
from penstock.planning.judge import judge
from penstock.planning.programs.lower import programs
from penstock.questions.answer import plan
from penstock.schemas.topology import ClusterTopology, Fabric, UniformCluster

JOB = "examples.gpt:tiny"
BATCHES = 3
FABRIC = Fabric(bandwidth_bytes_per_s=10**9)
TWO = ClusterTopology(
    name="two",
    uniform=UniformCluster(nodes=1, devices_per_node=2, kind="V100", memory_bytes=2**30, fabric=FABRIC),
)


@pytest.mark.parametrize(
    ("planner", "rule"),
    [
        ("dapple", "synchronous"),
        ("spp", "synchronous"),
        ("madpipe", "double_buffered"),
        ("wpipe", "double_grouped"),
        ("avgpipe", "elastic_averaging"),
    ],
)
def test_its_plan_trains_what_one_process_trains(world: RankPool, planner: str, rule: str) -> None:
    """Compare gradients and losses with one process by the same update rule, after every global batch."""
    job = load_job(JOB)
    file = plan(
        analytic_profile(job, "V100", (2,)),
        TWO,
        global_batch_size=job.batch_size,
        micro_batch_sizes=(2,),
        planner=planner,
        update_rules=(rule,),
        max_plans=4,
    ).file
    judgement = judge(file)
    assert judgement.faults == ()
    is_flushed = rule in ("synchronous", "elastic_averaging")
    lowered = programs(file) if is_flushed else programs(file, batches=BATCHES)
    assert len(lowered) >= 2
    assert {(program.update_rule, program.world_size) for program in lowered} == {(rule, len(lowered))}
    segments = {} if is_flushed else {"segments": [0]}
    done = world.train(lowered, f"penstock.{JOB}", steps=BATCHES, **segments)
    assert max(differences(done)) <= TOLERANCE[torch.float32]
