"""A process that is a rank of one run after another, so that many cases share the cost of importing torch."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import rule_rank
import torch.distributed as dist
from simulated_cuda.ranks import SimulatedRank

from penstock.executor.divided.inventory import Inventory as Inventory  # loads DTensor before processes are forked
from penstock.executor.run.rank_main import Rank
from penstock.schemas.ranks.assignment import RankAssignment


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(event: Mapping[str, Any]) -> None:
        out.write(json.dumps(event) + "\n")
        out.flush()

    gc.freeze()
    gc.freeze = _freeze_nothing  # what a run freezes would stay for ever, with its groups and their threads
    for line in sys.stdin:
        order = json.loads(line)
        if "record" in order:
            rule_rank.run(order)
            say({"kind": "done"})
            _leave()
            continue

        def give_up(error: Exception) -> None:
            assert rank is not None  # noqa: B023  # before the next rank is made
            say(rank.failure(error))  # noqa: B023
            os._exit(1)

        rank: Rank | None = _rank(order, say, give_up)
        try:
            rank.run()
        except Exception as error:
            give_up(error)
        rank = None
        _leave()


def _freeze_nothing() -> None:
    """Leave objects to the collector."""


def _rank(order: dict[str, Any], say: Any, give_up: Callable[[Exception], None]) -> Rank:
    simulated = order.pop("simulated", None)
    assignment = RankAssignment.from_json(order)
    if simulated is not None:
        return SimulatedRank(assignment, say, give_up, log=simulated)
    return (HeldRank if assignment.count_memory else Rank)(assignment, say, give_up)


class HeldRank(Rank):
    """A rank that also tells, as ``held`` of its last event, the bytes of its tensors when each instruction begins."""

    def __init__(self, assignment: RankAssignment, say: Any, give_up: Callable[[Exception], None]) -> None:
        super().__init__(assignment, say, give_up)
        self.mark = Watched(self)

    def run(self) -> None:
        """Run as a rank does, and stop counting afterwards."""
        try:
            super().run()
        finally:
            self._peak.__exit__(None, None, None)  # type: ignore[attr-defined]

    def _report(self, *order: Any) -> None:
        say, self.say = self.say, lambda event: say({**event, "held": self.mark.seen})  # type: ignore[union-attr]
        super()._report(*order)


class Watched(list[int]):
    """A mark: index of the running instruction, step; ``seen``: step, index and bytes held."""

    def __init__(self, rank: Rank) -> None:
        super().__init__([0, 0])
        self.rank = rank
        self.seen: list[tuple[int, int, int]] = []

    def __setitem__(self, place: Any, value: Any) -> None:
        super().__setitem__(place, value)
        if place == 0:
            while _gloo_works():
                os.sched_yield()
            self.seen.append((self[1], value, self.rank._peak.held_bytes()))  # type: ignore[attr-defined]


def _gloo_works() -> bool:
    """Return whether a thread of gloo is at work: it lets go of what it sent a moment after it has said so."""
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that has ended
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            if name.startswith("pt_gloo") and rest.split()[0] != "S":
                return True
    return False


def _leave() -> None:
    """Leave the run; torch remembers meshes by their ranks, with groups that the next run does not have."""
    dist.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        _forget_meshes()
    gc.collect()


def _forget_meshes() -> None:
    """Clear what DTensor keeps of the last run."""
    from torch.distributed.tensor import DTensor, debug

    if hasattr(debug, "_clear_fast_path_sharding_prop_cache"):
        debug._clear_python_sharding_prop_cache()
        debug._clear_fast_path_sharding_prop_cache()
    else:  # torch 2.9
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
