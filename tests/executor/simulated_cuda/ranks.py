"""The product's ranks on simulated GPUs: with peers in other processes, or alone, with peers that are only imagined.

A rank's requests to its device do not depend on its peers' messages, so a rank without peers logs the same as a rank
with peers: all ranks of a run can be logged one after the other in one process, also with programs that would hang.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from assigned import assigned
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from penstock.executor.run import rank_main as rank_module
from penstock.executor.run.job import Job
from penstock.executor.run.rank_main import Rank
from penstock.executor.runtime.hardware import Place, machine
from penstock.executor.transport import nccl
from penstock.executor.transport.order import digests, messages
from penstock.schemas.machine.processors import processor_numbers
from penstock.schemas.program import Program
from penstock.schemas.ranks.assignment import RankAssignment
from simulated_cuda.entries import Log
from simulated_cuda.groups import HostCollectives, tags_noted
from simulated_cuda.runtime import SimulatedCuda
from simulated_cuda.watch import Watch, without_operations

MakeRuntime = Callable[[int], SimulatedCuda]
"""The simulated GPU of a rank."""


class Logged(NamedTuple):
    """A rank's log. ``races``: accesses without an order. ``timed``: events of its timers. Both peaks are in bytes."""

    log: Log
    races: Sequence[str]
    timed: Sequence[int]
    peak_bytes: int
    peak_reserved_bytes: int


class SimulatedRank(Rank):
    """A rank on a simulated GPU, with peers.

    ``logged``: what it has asked for when it is through, which also goes to the file ``log``-rank.
    """

    logged: Logged

    def __init__(
        self,
        assignment: RankAssignment,
        say: Any,
        give_up: Callable[[Exception], None],
        runtime: SimulatedCuda | None = None,
        log: str | None = None,
    ) -> None:
        super().__init__(assignment, say, give_up)
        self.runtime = runtime or SimulatedCuda(assignment.rank)
        self._log = log

    def run(self) -> None:
        hosts = HostCollectives(self.runtime.recorder, self.imagined())
        with (
            mock.patch.object(rank_module, "open_device", return_value=self.runtime),
            hosts.watching(),
            tags_noted(self.runtime.recorder),
            without_operations(self.runtime.recorder),
            Watch(self.runtime.recorder),
        ):
            super().run()

    def imagined(self) -> float | None:
        """Return the value of sums over hosts where there are no peers."""
        return None

    def _report(self, *arguments: Any) -> None:
        self.logged = self._so_far()
        if self._log is not None:
            Path(f"{self._log}-{self.assignment.rank}").write_bytes(pickle.dumps(self.logged))
        super()._report(*arguments)

    def _so_far(self) -> Logged:
        recorder = self.runtime.recorder
        allocator = recorder.allocator
        peaks = allocator.peak_active, allocator.peak_reserved
        return Logged(tuple(recorder.log), tuple(recorder.ordering.races), tuple(self.runtime.timed), *peaks)


def logged_at(path: Path, world_size: int) -> list[Logged]:
    """Read the logs that ranks with peers wrote to ``log``."""
    return [pickle.loads(Path(f"{path}-{rank}").read_bytes()) for rank in range(world_size)]


class _LoneRank(SimulatedRank):
    """A rank without peers."""

    def _connect(self) -> Any:
        dist.init_process_group("fake", store=FakeStore(), rank=self.program.rank, world_size=self.program.world_size)
        return None

    def imagined(self) -> float:
        """Return the number of terms with which expected and found terms agree, so that no gradient is corrected."""
        return float(self.assignment.job.batch_size)  # type: ignore[attr-defined]

    def _refuse_disagreement(self, job: Any) -> None:
        """Skip the comparison: there are no other ranks."""


def log_alone(
    programs: Sequence[Program], job: Job, *, steps: int = 1, make_runtime: MakeRuntime | None = None, **more: Any
) -> list[Logged]:
    """Log each rank of a run over NCCL, rank after rank. ``more``: further fields of the assignment."""
    order, logs = [digests(messages(program)) for program in programs], []
    for program in programs:
        runtime = (make_runtime or _alone)(program.rank)
        assignment = assigned(rank=program.rank, programs=({},), job=job, steps=steps, **more)
        events: list[Mapping[str, Any]] = []
        rank = _LoneRank(assignment, events.append, _give_up, runtime)
        with _without_peers(program, order):
            rank.run()
        assert events[-1]["kind"] == "done"
        logs.append(rank.logged)
    return logs


def _give_up(error: Exception) -> None:
    raise error


def _alone(rank: int) -> SimulatedCuda:
    return SimulatedCuda(rank, connected=False)


@contextmanager
def _without_peers(program: Program, order: Sequence[Any]) -> Iterator[None]:
    """Replace a rank's agreements with its peers, and restore this process afterwards."""
    nothing = SimpleNamespace(collect=lambda: None, freeze=lambda: None)
    answers = {
        "agree_on_transport": lambda *_: "nccl",
        "wait_for_all": lambda *_: None,
        "load_job": lambda job, _: job,
        "refuse_other_devices": lambda *_, **__: None,
        "gather_places": lambda count: [Place(machine(), processor_numbers())] * count,
        "gc": nothing,
        "keep_freed_memory": lambda: None,
    }
    threads, state = torch.get_num_threads(), torch.default_generator.get_state()
    _clear_sharding_prop_cache()  # in which torch takes the groups of equal meshes for the same
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about names that the product has for older ones
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(rank_module, name, answer))
        stack.enter_context(mock.patch.object(Program, "from_json", return_value=program))
        stack.enter_context(mock.patch.object(nccl, "agree_on_order", return_value=order))
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            torch.set_num_threads(threads)
            torch.default_generator.set_state(state)
