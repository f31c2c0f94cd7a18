"""The hardware that a rank reports: kind and model, ranks and cores of its machine, load and clocks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_jobs
from pipelines import Part, programs_of

from penstock.executor.devices import processor_model
from penstock.executor.runtime import hardware
from penstock.executor.runtime.cpu import CPU
from penstock.executor.runtime.hardware import Hardware, Place
from penstock.schemas.program import Needs
from penstock.schemas.trace import Hardware as Document

pytestmark = pytest.mark.tier("quick")

PLACES = [Place("a", frozenset({0, 1})), Place("b", frozenset({0, 1})), Place("a", frozenset({2, 3}))]
"""Ranks 0 and 2 share a machine, and may use different processors there."""


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine of 64 processors whose load grows, and a clock of processor time."""
    loads: Iterator[float] = iter((2.5, 66.0))
    monkeypatch.setattr(os, "getloadavg", lambda: (next(loads), 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(hardware, "processor_numbers", lambda: frozenset({0, 1}))


@pytest.mark.parametrize(("quota", "cores"), [pytest.param(2, 4, id="affinities"), pytest.param(1, 1, id="a quota")])
def test_cores_are_those_of_all_ranks_of_the_machine(
    load: None, monkeypatch: pytest.MonkeyPatch, quota: int, cores: int
) -> None:
    monkeypatch.setattr(hardware, "available_processors", lambda: quota)
    (program,) = programs_of(small_jobs.plain, [Part(6, (0,))], 3)
    rank_hardware = Hardware(CPU, replace(program, needs=Needs("A100", 0)), PLACES)
    rank_hardware.begin()
    one = Document.model_validate(rank_hardware.end())
    assert (one.kind, one.model, one.planned_kind) == ("cpu", processor_model(), "A100")
    assert (one.ranks, one.cores, one.machine_cores) == (2, cores, 64)
    assert (one.load_at_start, one.load_at_end) == (2.5, 66.0)
    assert one.wall_ns > 0


def test_a_gpu_has_its_makers_name(load: None, monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = programs_of(small_jobs.plain, [Part(6, (0,))], 3)
    gpu: Any = SimpleNamespace(kind="H100", model="NVIDIA H100 80GB HBM3")
    rank_hardware = Hardware(gpu, program, PLACES)
    rank_hardware.begin()
    assert (
        rank_hardware.end().items() >= {"kind": "H100", "model": "NVIDIA H100 80GB HBM3", "planned_kind": None}.items()
    )


def test_processors_are_named_by_linux_or_by_their_architecture(tmp_path: Path) -> None:
    text = tmp_path / "cpuinfo"
    text.write_text("processor\t: 0\nmodel name\t: AMD EPYC 7763\nflags\t: fpu\n")
    assert processor_model(str(text)) == "AMD EPYC 7763"
    text.write_text("processor\t: 0\nmodel name\t:\nfeatures\t: fp\n")
    assert processor_model(str(text)) == processor_model(str(tmp_path / "missing")) == os.uname().machine
