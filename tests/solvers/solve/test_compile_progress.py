"""Progress while the compiler runs: it names each kernel, here and in workers, but no kernel that is on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from numba.core import config
from portfolio_tasks import Hanging, Needing, loaded
from problems import make_problem

from penstock.solvers.compiled.progress import listening, tell
from penstock.solvers.model.deadline import Deadline
from penstock.solvers.planners.setting import Setting
from penstock.solvers.solve import workers as crew
from penstock.solvers.solve.driver import run
from penstock.solvers.solve.incumbent import State
from penstock.solvers.solve.workers import Here, Workers, Workforce

STEPS = """
from penstock.solvers.compiled.decorators import compiled, loop

@loop
def half(n):
    return n // 2

@compiled
def steps(n):
    count = 0
    while n > 1:
        n, count = half(n), count + 1
    return count
"""
ENDLESS = """
from penstock.solvers.compiled.progress import tell

def steps(n):
    tell("steps")
    while True:
        pass
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file in which a test writes its kernels; no kernel is on disk."""
    monkeypatch.setenv("PENSTOCK_KERNELS", str(tmp_path / "cache"))
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "cache"))  # read again only where numba next compiles
    monkeypatch.setattr(crew, "one_thread", lambda: True)
    return tmp_path / "kernels.py"


@pytest.mark.tier("quick")
def test_only_a_kernel_that_is_not_on_disk_is_reported(place: Path) -> None:
    """Kernels that a kernel calls are compiled with it, and not reported separately."""
    place.write_text(STEPS)
    heard: list[str | None] = []
    with listening(heard.append):
        module = loaded(str(place))
        assert heard == []
        assert module.steps(40) == 5
        assert heard == ["steps_of_halving.steps", None]
        assert module.steps(70) == 6
        assert loaded(str(place)).steps(70) == 6
    assert heard == ["steps_of_halving.steps", None]


@pytest.mark.tier("quick")
def test_the_last_listener_is_told_until_it_leaves() -> None:
    outer: list[str | None] = []
    inner: list[str | None] = []
    with listening(outer.append):
        with listening(inner.append):
            tell("one")
        tell(None)
    tell("after all")
    assert (inner, outer) == (["one"], [None])


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_worker_compiles_is_told_where_the_solve_began(workers: int, place: Path) -> None:
    place.write_text(STEPS)
    setting = Setting(make_problem([10, 12], nodes=(2,), global_batch_size=4))
    workforce: Workforce = Workers(setting, workers) if workers else Here(setting)
    heard: list[str | None] = []
    with listening(heard.append), workforce as ready:
        run(State(setting), [[Needing("needing", (), path=str(place))]], ready)
    assert heard == ["steps_of_halving.steps", None]


@pytest.mark.tier("nightly")
def test_nothing_is_compiled_once_the_worker_is_killed(place: Path) -> None:
    place.write_text(ENDLESS)
    heard: list[str | None] = []
    limit = Deadline(10**8, clock=lambda: 10**9 if heard else 0)  # it is over once the kernel is reported
    setting = Setting(make_problem([10, 12], nodes=(2,), global_batch_size=4), limit)
    with listening(heard.append), Workers(setting, 2) as ready:
        state = State(setting)
        run(state, [[Needing("needing", (), path=str(place)), Hanging("hanging", ())]], ready)
    assert heard == ["steps", None]
    assert set(state.unfinished) == {"needing", "hanging"}
