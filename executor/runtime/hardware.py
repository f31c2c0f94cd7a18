"""The hardware on which a rank computes, and the load of its machine while the rank trains."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from penstock.executor.runtime.interface import Runtime
from penstock.schemas.machine.processors import available_processors, processor_numbers
from penstock.schemas.program import Program


class Place(NamedTuple):
    """The machine of a rank, and the numbers of the processors that the rank may use there."""

    machine: str
    processors: frozenset[int]


def machine() -> str:
    """Return a text that is equal in all processes of one machine and network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"


def gather_places(world_size: int) -> list[Place]:
    """Return the places of all ranks. Collective."""
    places: list[Any] = [None] * world_size
    dist.all_gather_object(places, Place(machine(), processor_numbers()))
    return places


class Hardware:
    """One rank's hardware, with its clocks and its machine's load from ``begin`` on."""

    def __init__(self, runtime: Runtime, program: Program, places: list[Place]) -> None:
        here = [place for place in places if place.machine == places[program.rank].machine]
        usable = available_processors()
        # A quota holds for all ranks of a container together; affinities may differ from rank to rank.
        has_quota = usable < len(processor_numbers())
        self._facts = {
            "kind": runtime.kind,
            "model": runtime.model,
            "planned_kind": None if program.needs is None else program.needs.kind,
            "ranks": len(here),
            "cores": usable if has_quota else len(frozenset[int]().union(*(place.processors for place in here))),
            "machine_cores": os.cpu_count() or 1,
        }

    def begin(self) -> None:
        """Read the clocks and the load before the first step."""
        self._load = os.getloadavg()[0]
        self._wall_ns, self._cpu_ns = time.perf_counter_ns(), time.process_time_ns()

    def end(self) -> dict[str, Any]:
        """Return a ``schemas.trace.Hardware`` as JSON, after the last step."""
        return self._facts | {
            "load_at_start": self._load,
            "load_at_end": os.getloadavg()[0],
            "wall_ns": time.perf_counter_ns() - self._wall_ns,
            "cpu_ns": time.process_time_ns() - self._cpu_ns,
        }
