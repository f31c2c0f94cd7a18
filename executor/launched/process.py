"""One process of a launch from start to end: it meets the others, takes its rank, trains, and leaves with them.

A process that fails writes the reason to its standard error, and sends it to the others, which report it when they end.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import DistError

from penstock.executor.checkpoints.shutdown import ShutdownRequested
from penstock.executor.devices import number_by_bus, place_among, visible_numbers
from penstock.executor.launched.environment import Launch
from penstock.executor.launched.rank_places import Presence, ranks_of_processes, refuse_differences
from penstock.executor.launched.rendezvous import Rendezvous, bind_to
from penstock.executor.launched.report import check_failure, launch_report
from penstock.executor.node.agent_state import lost_a_peer
from penstock.executor.program.interpreter import InstructionFailed
from penstock.executor.program.neighbours import awaited
from penstock.executor.run.rank_main import Rank
from penstock.executor.runtime.cuda import gpu_count
from penstock.schemas.api.run_options import RunOptions
from penstock.schemas.errors import PenstockError
from penstock.schemas.program import Program
from penstock.schemas.ranks.assignment import RankAssignment
from penstock.schemas.ranks.bundle import JobBundle, LaunchReport

ASKED_TO_END = 143
"""Exit code of a process that was asked to end, and saved: equal to the exit code after SIGTERM."""

LAST_WORDS_S = 2.0
"""Seconds that a process waits for a lost peer's reason, and that the store's process lets others read it."""

_LEAVING_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """The training of a bundle: the same in all processes.

    ``device``: ``cpu``, ``cuda`` or ``auto``, by the kind of device in the plan. ``wait_s``: for the slowest process to
    start. ``timeout_s``: a peer that is silent for longer counts as dead (None: see `watchdog`).
    """

    model: str
    directory: str
    steps: int
    seed: int
    options: RunOptions = field(default_factory=RunOptions)
    device: str = "auto"
    transport: str = "auto"
    check: bool = False
    trace_steps: int = 0
    any_nodes: bool = False
    wait_s: float = 300.0
    timeout_s: float | None = None

    def announced(self) -> dict[str, Any]:
        """Return the values that must be equal in all processes, as plain data."""
        names = ("model", "steps", "seed", "device", "transport", "check", "trace_steps", "any_nodes")
        return {name: getattr(self, name) for name in names} | self.options.model_dump(mode="json")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a process: its exit code, and on rank 0 of a launch that trained, the report.

    ``rank_traces``: ``schemas.trace.RankTrace`` as JSON.
    """

    code: int
    report: LaunchReport | None = None
    rank_traces: tuple[dict[str, Any], ...] = ()


class LaunchedRank(Rank):
    """A rank whose programs come from a bundle."""

    def __init__(
        self, bundle: JobBundle, assignment: RankAssignment, say: Any, give_up: Callable[[Exception], None]
    ) -> None:
        super().__init__(assignment, say, give_up)
        self._bundle = bundle

    def segments(self, first_step: int) -> tuple[int, ...] | None:
        """Return the segments by checkpoint and command line. UnsupportedRequest for a length without a program."""
        return self._bundle.segments(self.assignment.rank, first_step, self.assignment.steps, self.options)


class Process:
    """One process. On rank 0 ``show`` gets each event, and ``on_first`` is called before anything is built."""

    def __init__(
        self,
        bundle: JobBundle,
        digest: str,
        launch: Launch,
        orders: Orders,
        *,
        show: Callable[[Mapping[str, Any]], None],
        on_first: Callable[[], None],
    ) -> None:
        self._bundle = bundle
        self._digest = digest
        self._launch = launch
        self._orders = orders
        self._show = show
        self._on_first = on_first
        self._events: list[Mapping[str, Any]] = []
        self._present: list[Presence] = []
        self._ranks: list[int] = []
        self._ending = threading.Lock()

    def run(self) -> Outcome:
        """Meet, train, report. Errors before the others are met are raised; later failures are outcomes."""
        orders = self._orders
        self._bundle.refuse_options(orders.options)
        self._bundle.refuse_transport(orders.transport)
        if not orders.options.resume:
            self._bundle.segments(0, 0, orders.steps, orders.options)
        self._rendezvous = rendezvous = Rendezvous(self._launch, orders.wait_s)
        self._present, name = rendezvous.present(self._digest, orders.announced())
        try:
            refuse_differences(self._present)
            self._ranks = ranks_of_processes(self._bundle, self._present, any_nodes=orders.any_nodes)
        except PenstockError as error:
            return self._refused(error)
        bind_to(self._present, self._launch.process)
        threading.Thread(target=self._watch, daemon=True).start()
        rank = LaunchedRank(self._bundle, self._assignment(name), self._on_event, lambda error: give_up(error))

        def give_up(error: Exception) -> None:
            os._exit(self._failed(rank, error).code)

        try:
            if self.rank == 0:
                self._on_first()
            self._bundle.ranks[self.rank].refuse_damage()
            rank.run()
        except ShutdownRequested:
            return self._left(ASKED_TO_END)
        except Exception as error:
            return self._failed(rank, error)
        return self._left(0)

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self._ranks[self._launch.process]

    def _assignment(self, name: str) -> RankAssignment:
        orders = self._orders
        return RankAssignment(
            rank=self.rank,
            world_size=len(self._bundle.ranks),
            programs=self._bundle.ranks[self.rank].programs,
            segments=None,
            steps=orders.steps,
            job=orders.model,
            directory=orders.directory,
            options=orders.options.model_dump(mode="json"),
            plan_hash=self._bundle.plan_hash,
            layers=self._bundle.layers,
            boundaries=self._bundle.boundaries,
            seed=orders.seed,
            check=orders.check,
            trace_steps=orders.trace_steps,
            store=self._rendezvous.address,
            prefix=name,
            device=device_of(self._bundle, self.rank, orders.device),
            transport=orders.transport,
            timeout_s=orders.timeout_s,
        )

    def _on_event(self, event: Mapping[str, Any]) -> None:
        self._events.append(event)
        if self.rank == 0:
            self._show(event)

    # Ends

    def _refused(self, error: PenstockError) -> Outcome:
        """End with an error that all processes have; the first one reports it."""
        if self._launch.process == 0:
            _complain(str(error))
            self._rendezvous.publish_failure("said")
        else:
            with suppress(DistError):
                self._rendezvous.failure(LAST_WORDS_S)
            _complain(f"{self._launch} ends: process 0 says why")
        self._rendezvous.leave(LAST_WORDS_S)
        return Outcome(error.exit_code)

    def _failed(self, rank: Rank, error: Exception) -> Outcome:
        event = rank.failure(error)
        where = _where(event)
        if lost_a_peer(str(event["reason"])):
            reported = self._reported()
            how = "it sent nothing for too long" if "timed out" in event["reason"] else "its connection was closed"
            text = reported or f"{self._name(self.rank)} lost {self._peers(error)}{where}: {how} without a word from it"
            message = f"{self._name(self.rank)} ends: {text}" if reported else text
        else:
            remedy = f"\n  try: {event['remedy']}" if event["remedy"] else ""
            text = f"{self._name(self.rank)} failed{where}: {event['detail'] or event['reason']}"
            lines = [] if isinstance(error, PenstockError) else event["traceback"]
            message = "\n    ".join([text, *lines]) + remedy
        if self._ending.acquire(blocking=False):
            _complain(message)
        self._rendezvous.publish_failure(text)
        if self._launch.opens_store:
            time.sleep(LAST_WORDS_S)
        return Outcome(error.exit_code if isinstance(error, PenstockError) else 1)

    def _left(self, code: int) -> Outcome:
        """End after all have trained to the same step: gather rank 0's report, and leave together."""
        self._ending.acquire(blocking=False)
        first = self.rank == 0
        gathered: list[Any] | None = [None] * len(self._ranks) if first else None
        reports = [event for event in self._events if event["kind"] in ("done", "trace")]
        dist.gather_object(reports, gathered, dst=0)
        self._rendezvous.leave(_LEAVING_S)
        if gathered is None:
            return Outcome(code)
        done = [next((event for event in events if event["kind"] == "done"), None) for events in gathered]
        report = launch_report(
            self._bundle,
            self._launch.launcher,
            self._orders.model,
            [self._present[self._ranks.index(part.rank)] for part in self._bundle.ranks],
            self._events,
            done,
        )
        traces = [event["rank_trace"] for events in gathered for event in events if event["kind"] == "trace"]
        traces.sort(key=lambda one: (one["step"], one["rank"]))
        failure = check_failure(done)
        if failure is not None:
            _complain(str(failure))
        return Outcome(code if failure is None else failure.exit_code, report, tuple(traces))

    # Others

    def _watch(self) -> None:
        """End this process when another one has failed, which it might not notice while it computes."""
        try:
            text = self._rendezvous.watch()
        except DistError:
            text = self._store_is_gone()
        time.sleep(LAST_WORDS_S / 2)
        if self._ending.acquire(blocking=False):
            _complain(f"{self._name(self.rank)} ends: {text}")
            os._exit(1)

    def _name(self, rank: int) -> str:
        one = self._present[self._ranks.index(rank)]
        return f"rank {rank} (number {one.local_rank} on {one.node})"

    def _reported(self) -> str | None:
        """Return the first failure that other processes have published."""
        try:
            return self._rendezvous.failure(LAST_WORDS_S)
        except DistError:
            return self._store_is_gone()

    def _store_is_gone(self) -> str:
        keeper = next((number for number, one in enumerate(self._present) if one.opens_store), None)
        who = "torchrun's agent" if keeper is None else self._name(self._ranks[keeper])
        return f"{who} is gone, at whose store ranks met ({self._rendezvous.address})"

    def _peers(self, error: Exception) -> str:
        """Name the silent peers: the ranks that the instruction waits for, or "another rank"."""
        program = Program.from_json(self._bundle.ranks[self.rank].programs[0])
        ranks = awaited(program, error.instruction) if isinstance(error, InstructionFailed) else []
        return " or ".join(map(self._name, ranks)) or "another rank"


def device_of(bundle: JobBundle, rank: int, wanted: str) -> str:
    """Return torch's name of a rank's device. A launcher may show a process only its GPU, the job's GPUs, or all."""
    part = bundle.ranks[rank]
    if wanted == "auto":
        wanted = "cpu" if part.device_kind == "cpu" else "cuda"
    if wanted != "cuda":
        return wanted
    number_by_bus()
    numbers = visible_numbers() or range(gpu_count())
    used = list(dict.fromkeys(bundle.ranks[other].index for other in bundle.nodes()[part.node]))
    return f"cuda:{place_among(part.index, used, numbers)}"


def _where(event: Mapping[str, Any]) -> str:
    """Describe the step and the instruction at which a rank failed, where they are known."""
    step = "" if event["step"] is None else f" in step {event['step']}"
    return step + ("" if event["instruction"] is None else f" at instruction {event['index']} ({event['instruction']})")


def _complain(text: str) -> None:
    sys.stderr.write(f"penstock: {text}\n")
    sys.stderr.flush()
