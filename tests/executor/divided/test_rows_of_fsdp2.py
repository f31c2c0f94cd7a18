"""What ranks share out by rows against torch's own ``fully_shard``: collectives, their bytes, and each rank's rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import mesh_jobs
import pytest
import torch
from pipelines import Part, programs_of

from penstock.executor.divided.inventory import Prediction
from penstock.executor.divided.layout import traced_layers
from penstock.executor.run.chain import Chain
from penstock.executor.run.local import loopback_interface

WORLD, ROWS = 3, 1
"""Of three ranks none has equally many rows of the jobs' matrices."""
JOB = "mesh_jobs:llama_float64"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of the loop with ``fully_shard`` found."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    here = Path(__file__).parent
    ranks = [
        subprocess.Popen(
            [sys.executable, str(here / "fsdp2_rank.py"), str(rank), str(WORLD), str(store), JOB, str(ROWS)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=here,
            env=os.environ | {"GLOO_SOCKET_IFNAME": loopback_interface()},
        )
        for rank in range(WORLD)
    ]
    try:
        lines = [rank.communicate(timeout=240)[0].splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * WORLD
    return [json.loads(each[-1]) for each in lines]


def test_collectives_are_those_of_fsdp2(ran: list[dict[str, Any]]) -> None:
    """Of one micro-batch: what runs is compared with this prediction wherever ranks are checked."""
    job = mesh_jobs.JOBS["llama_float64"]
    programs = programs_of(job, [Part(len(Chain(job).specs), tuple(range(WORLD)))], 1, sharding="parameters")
    for program, one in zip(programs, ran, strict=True):
        names = {f"group {number}": number for number in range(len(program.groups))}
        predicted = Prediction(program, Chain(job), None, names).collectives()
        assert Counter(map(tuple, one["collectives"])) == Counter(each.sent[::2] for each in predicted)


def test_each_rank_has_the_rows_that_fsdp2_gives_it(ran: list[dict[str, Any]]) -> None:
    job = mesh_jobs.JOBS["llama_float64"]
    chain = Chain(job)
    layers = traced_layers(chain, None, [ROWS])[ROWS]
    for rank, one in enumerate(ran):
        for spec, layer in zip(chain.specs, layers, strict=True):
            for name, parameter in layer.parameters.items():
                shape = one["held"][f"{spec.name}.{name}"]
                assert parameter.bytes_of(rank, WORLD) == torch.Size(shape).numel() * parameter.dtype.itemsize
