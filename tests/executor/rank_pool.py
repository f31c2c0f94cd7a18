"""A pool of up to six rank processes that serve all cases of a test module."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from assigned import PLAIN
from forked import Forked, ForkedProcesses
from torch._C._distributed_c10d import TCPStore
from torch.utils._pytree import tree_map_only

from penstock.schemas.program import Program

JOBS = Path(__file__).parent / "jobs"
SEED = 5
MOST_RUNS = 24
"""Runs of a rank process: torch keeps a group or so of each, whose threads wake up a hundred times a second."""


class RankPool:
    """Processes 0 … 5, started when first needed; ``train`` makes the first of them the ranks of a run."""

    def __init__(self, processes: ForkedProcesses) -> None:
        self._processes = processes
        self._workers: list[Forked] = []
        self._runs = 0
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))

    def train(
        self, programs: Sequence[Program], job: str, *, steps: int = 1, trace_steps: int = 0, **more: Any
    ) -> list[dict[str, Any]]:
        """Train ``small_jobs:job``, or ``module:job``; the ranks' last events, with the others under ``events``."""
        self._runs += 1
        self._grow(len(programs))
        for program, worker in zip(programs, self._workers, strict=False):
            assignment = PLAIN | {
                "rank": program.rank,
                "world_size": len(programs),
                "store": f"127.0.0.1:{self._store.port}",
                "prefix": f"run{self._runs}",
                "programs": [program.to_json()],
                "job": job if ":" in job else f"small_jobs:{job}",
                "directory": str(JOBS),
                "steps": steps,
                "seed": SEED,
                "check": True,
                "trace_steps": trace_steps,
            }
            worker.stdin.write(json.dumps(assignment | _of_rank(more, program.rank)) + "\n")
            worker.stdin.flush()
        results = [_last_event(worker) for worker in self._workers[: len(programs)]]
        if any(one["kind"] != "done" for one in results):
            self.close()
        return results

    def record(
        self,
        programs: Sequence[Sequence[Program]],
        job: str,
        directory: Path,
        *,
        uses: Sequence[int] = (0,),
        **more: Any,
    ) -> list[dict[str, Any]]:
        """Train ``rule_jobs:job`` and keep everything (``rule_rank``); ``programs``: lists of programs of all ranks."""
        self._runs += 1
        size = len(programs[0])
        self._grow(size)
        files = [directory / f"record{self._runs}-{rank}.pt" for rank in range(size)]
        for rank, worker in zip(range(size), self._workers, strict=False):
            assignment = {
                "store": f"127.0.0.1:{self._store.port}",
                "prefix": f"run{self._runs}",
                "programs": [of_all[rank].to_json() for of_all in programs],
                "job": f"rule_jobs:{job}",
                "directory": str(JOBS),
                "seed": SEED,
                "uses": list(uses),
                "record": str(files[rank]),
            }
            worker.stdin.write(json.dumps(assignment | more) + "\n")
            worker.stdin.flush()
        results = [_last_event(worker) for worker in self._workers[:size]]
        if any(one["kind"] != "done" for one in results):
            self.close()
            raise AssertionError(results)
        return [_recorded(file) for file in files]

    def close(self) -> None:
        """End the ranks; others are started when they are needed."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def _grow(self, size: int) -> None:
        if self._runs % MOST_RUNS == 0:
            self.close()
        while len(self._workers) < size:
            self._workers.append(self._processes.start("rank_worker"))


def differences(results: list[dict[str, Any]]) -> tuple[float, float]:
    """Return the differences of gradients and loss, on which all ranks must agree."""
    assert [one["kind"] for one in results] == ["done"] * len(results), results
    assert len({(one["gradient_check"], one["loss_check"], tuple(one["losses"])) for one in results}) == 1
    return results[0]["gradient_check"], results[0]["loss_check"]


def _of_rank(more: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return fields of a rank's assignment; names in ``_of_rank`` have one value per rank."""
    end = "_of_rank"
    return {key.removesuffix(end): value[rank] if key.endswith(end) else value for key, value in more.items()}


def _recorded(file: Path) -> dict[str, Any]:
    """Read the record of a rank, as tensors."""
    record: dict[str, Any] = tree_map_only(np.ndarray, torch.from_numpy, pickle.loads(file.read_bytes()))
    return record


def _last_event(worker: Forked) -> dict[str, Any]:
    events: list[dict[str, Any]] = []
    for line in worker.stdout:
        event = json.loads(line)
        if event["kind"] in ("done", "failed"):
            return event | {"events": events}
        events.append(event)
    return {"kind": "failed", "reason": "its process has ended", "events": events}
