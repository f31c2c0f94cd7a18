"""Tasks that come late, hang, die and fail, for tests of the portfolio; a module, so that processes can load it."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from penstock.schemas.coverage import Covers
from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.model.result import Bound, JudgedPlan
from penstock.solvers.planners.setting import Setting
from penstock.solvers.solve.incumbent import Obstacles, Outcome
from penstock.solvers.solve.judging import Link


@dataclass(frozen=True)
class Late:
    """A task that announces plans, each after a while, but none that is worse than the best plan elsewhere."""

    name: str
    plans: tuple[JudgedPlan, ...]
    delay_s: float = 0.0
    proven: Bound | None = None
    makes: Covers | None = None
    beside: bool = False

    def run(self, setting: Setting, link: Link) -> Outcome:
        """Announce the plans, and return the best."""
        best: JudgedPlan | None = None
        for plan in self.plans:
            time.sleep(self.delay_s)
            known_ns = link.best_ns()
            if known_ns is not None and plan.value_ns > known_ns:
                continue
            if best is None or plan.value_ns < best.value_ns:
                best = plan
                link.announce(plan)
        if self.proven is not None:
            link.proven(self.proven)
        return Outcome(
            best,
            () if self.proven is None else (self.proven,),
            obstacles=Obstacles(proposed=True),
        )


@dataclass(frozen=True)
class Hanging(Late):
    """A task that announces plans and never ends; ``pid_file`` gets its process number."""

    pid_file: str = ""

    def run(self, setting: Setting, link: Link) -> Outcome:
        """Announce the plans, and hang."""
        super().run(setting, link)
        if self.pid_file:
            with Path(self.pid_file).open("a") as file:
                file.write(f"{os.getpid()}\n")
        while True:
            time.sleep(60)


@dataclass(frozen=True)
class Dying(Late):
    """A task that announces plans and ends as a broken native library does."""

    def run(self, setting: Setting, link: Link) -> Outcome:
        """Announce the plans, and kill this process."""
        super().run(setting, link)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


@dataclass(frozen=True)
class Failing(Late):
    """A task that raises an error."""

    def run(self, setting: Setting, link: Link) -> Outcome:
        """Fail."""
        raise ZeroDivisionError("a fault in a task")


@dataclass(frozen=True)
class Refusing(Late):
    """A task that refuses every request."""

    def run(self, setting: Setting, link: Link) -> Outcome:
        """Refuse."""
        return Outcome(refused=UnsupportedRequest("not this one", remedy="another"))


@dataclass(frozen=True)
class Needing(Late):
    """A task that calls a kernel of a module."""

    path: str = ""

    def run(self, setting: Setting, link: Link) -> Outcome:
        """Import the module, and call the kernel."""
        loaded(self.path).steps(40)
        return super().run(setting, link)


def loaded(path: str) -> ModuleType:
    """Import the module at a path, whether it was imported before or not."""
    spec = importlib.util.spec_from_file_location("penstock.solvers.steps_of_halving", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
