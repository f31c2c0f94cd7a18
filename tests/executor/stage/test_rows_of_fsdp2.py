"""Rows that ranks share out against torch's ``fully_shard``: collectives, their bytes, and each rank's rows."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tensor_jobs
import torch
from fsdp2_rank import MICRO_BATCHES, RESHARDED
from peers import printed_by_ranks
from pipelines import Part, programs_of

from penstock.executor.divided.crossing_tensors import traced_layers
from penstock.executor.divided.inventory import Prediction
from penstock.executor.run.chain import Chain
from penstock.schemas.program import Sharding

WORLD, ROWS = 3, 1
"""Three ranks, of which no two have equally many rows of the jobs' matrices."""
JOB, JOBS = "tensor_jobs:llama", Path(tensor_jobs.__file__).parent


pytestmark = pytest.mark.tier("nightly")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of each rank of the loop with ``fully_shard``."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    lines = printed_by_ranks(Path(__file__).with_name("fsdp2_rank.py"), WORLD, store, JOB, str(JOBS), str(ROWS))
    return [json.loads(each[-1]) for each in lines]


@pytest.mark.parametrize("sharding", RESHARDED)
def test_collectives_are_those_of_fsdp2(ran: list[dict[str, Any]], sharding: Sharding) -> None:
    """Of a step: what runs is compared with this prediction wherever ranks are checked.

    Kept parameters move by buckets, of which one layer's are one here. FSDP2 gathers what a step has changed in the
    next forward, ranks that share out gradients when they have stepped.
    """
    job = tensor_jobs.llama
    parts = [Part(len(Chain(job).specs), tuple(range(WORLD)))]
    programs = programs_of(job, parts, MICRO_BATCHES, sharding=sharding, bucket_bytes=1)
    for program, one in zip(programs, ran, strict=True):
        names = {f"group {number}": number for number in range(len(program.groups))}
        predicted = Prediction(program, Chain(job), None, names).collectives()
        assert Counter(map(tuple, one["collectives"][sharding])) == Counter(each.sent[::2] for each in predicted)


def test_each_rank_has_the_rows_that_fsdp2_gives_it(ran: list[dict[str, Any]]) -> None:
    job = tensor_jobs.llama
    chain = Chain(job)
    layers = traced_layers(chain, None, [ROWS])[ROWS]
    for rank, one in enumerate(ran):
        for spec, layer in zip(chain.specs, layers, strict=True):
            for name, parameter in layer.parameters.items():
                shape = one["local_shapes"][f"{spec.name}.{name}"]
                assert parameter.bytes_of(rank, WORLD) == torch.Size(shape).numel() * parameter.dtype.itemsize
