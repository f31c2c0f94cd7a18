"""Plans on other devices than theirs: refused by kind and by memory, before anything is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import small_jobs
from pipelines import Part, programs_of

from penstock.executor.run import device_fit
from penstock.executor.run.device_fit import _RankDevice, _refuse_kinds, _refuse_memory, refuse_other_devices
from penstock.executor.runtime.cpu import CPU
from penstock.executor.transport import GlooTransport
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.program import Needs

GIB = 2**30


def device(rank: int = 0, **more: Any) -> _RankDevice:
    """Return a rank on an idle H100 of 80 GiB, of which the plan needs 60."""
    alone = {"gpu": "GPU-a", "kind": "H100", "planned": f"n/{rank}", "planned_kind": "H100"}
    sizes = {"needed_bytes": 60 * GIB, "free_bytes": 79 * GIB, "total_bytes": 80 * GIB}
    return _RankDevice(rank, **(alone | sizes | more))


@pytest.fixture(autouse=True)
def _others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_fit, "_processes", lambda: "4711, python, 30000 MiB")


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        pytest.param([device()], None, id="as planned"),
        pytest.param(
            [device(), device(1, kind="A100")],
            "rank 1 is planned for n/1, of kind H100, but its GPU is of kind A100",
            id="no",
        ),
        pytest.param([device(planned_kind="my own")], None, id="a kind that no table knows"),
        pytest.param([device(planned_kind=None)], None, id="of no plan"),
    ],
)
def test_other_kinds_are_refused(ranks: Sequence[_RankDevice], words: str | None) -> None:
    if words is None:
        _refuse_kinds(ranks)
        return
    with pytest.raises(UnsupportedRequest, match=words) as caught:
        _refuse_kinds(ranks)
    assert caught.value.remedy is not None
    assert caught.value.remedy.startswith("plan for GPUs of kind A100")


TOO_SMALL = "plan with the memory that the GPU has"
FILLED = "end other processes on the GPU"


@pytest.mark.parametrize(
    ("ranks", "words", "remedy"),
    [
        pytest.param([device()], None, None, id="fits"),
        pytest.param([device(needed_bytes=79 * GIB)], None, None, id="to the byte"),
        pytest.param(
            [device(needed_bytes=90 * GIB)],
            "rank 0 needs 90.0 GiB by the plan's prediction; the GPU has 80.0 GiB",
            TOO_SMALL,
            id="too small in total",
        ),
        pytest.param(
            [device(free_bytes=50 * GIB)],
            "rank 0 needs 60.0 GiB by the plan's prediction; the GPU has 80.0 GiB, of which 50.0 GiB are free: "
            "4711, python, 30000 MiB",
            FILLED,
            id="filled by others",
        ),
        pytest.param(
            [device(2), device(5)],
            "ranks 2, 5, on one GPU, need 120.0 GiB by the plan's prediction; the GPU has 80.0 GiB",
            TOO_SMALL,
            id="ranks on one GPU add up",
        ),
        pytest.param([device(2, planned="n/0"), device(5, planned="n/0")], None, None, id="one planned device, once"),
        pytest.param(
            [device(0, needed_bytes=30 * GIB), device(1, needed_bytes=30 * GIB, free_bytes=55 * GIB)],
            "ranks 0, 1, on one GPU, need 60.0 GiB .* of which 55.0 GiB are free",
            FILLED,
            id="the least that one of them saw free",
        ),
    ],
)
def test_memory_is_asked_for_gpu_by_gpu(ranks: Sequence[_RankDevice], words: str | None, remedy: str | None) -> None:
    if words is None:
        _refuse_memory(ranks)
        return
    with pytest.raises(UnsupportedRequest, match=words) as caught:
        _refuse_memory(ranks)
    assert remedy is not None
    assert str(caught.value.remedy).startswith(remedy)


class Gpu(SimpleNamespace):
    """A runtime as the check uses it: an H100 of 80 GiB, with changes by ``more``."""

    def __init__(self, **more: Any) -> None:
        memory = SimpleNamespace(free_bytes=lambda: 79 * GIB, total_bytes=lambda: 80 * GIB)
        super().__init__(**({"gpu": "GPU-a", "kind": "H100", "memory": memory} | more))


@pytest.mark.parametrize(
    ("needs", "runtime", "kinds_differ", "words"),
    [
        pytest.param(None, Gpu(), False, None, id="of no plan"),
        pytest.param(Needs("A100", GIB), Gpu(), False, "of kind A100, but its GPU is of kind H100", id="another kind"),
        pytest.param(Needs("A100", GIB), Gpu(), True, None, id="another kind, as asked for"),
        pytest.param(Needs("A100", 90 * GIB), Gpu(), True, "needs 90.0 GiB", id="memory all the same"),
        pytest.param(Needs("H100", 90 * GIB), CPU, False, None, id="a CPU is not asked"),
    ],
)
def test_a_rank_asks_before_it_builds(
    transport: GlooTransport, needs: Needs | None, runtime: Any, kinds_differ: bool, words: str | None
) -> None:
    (program,) = programs_of(small_jobs.plain, [Part(6, (0,))], 3)
    program = replace(program, needs=needs)
    if words is None:
        refuse_other_devices(runtime, program, kinds_differ=kinds_differ)
        return
    with pytest.raises(UnsupportedRequest, match=words):
        refuse_other_devices(runtime, program, kinds_differ=kinds_differ)
