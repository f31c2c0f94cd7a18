"""Fixtures and options of all tests: which tests a tier runs, in which order, and what they take of the processor."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cpu_time import CpuTimes
from hypothesis import HealthCheck, settings
from tiers import IMPORTS, LIMIT_S, SEEDS, SLOW, TIERS, Tier, tier_of

LONGEST = (
    "scripts/test_soak.py",
    "slurm/test_slurm.py",
    "test_end_to_end.py",
    "solve/test_portfolio.py",
    "planners/test_planners.py",
    "jobs/test_solve_processes.py",
    "run/test_launch.py",
    "recorded/test_recorded.py",
)
SHORTEST = "solvers"
"""A folder of many short files, which fill what is left at the end."""
HERE = Path(__file__).parent
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded: its threads would wait for each other, spinning
TOGETHER = re.compile(r'@pytest\.fixture\(scope="(?:module|package)".*\)\ndef (\w+)')
STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system")
"""Audit events of a process that starts another one."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, default="ci", help="which tests run, and with how many seeds")
    parser.addoption(
        "--mesh-seed",
        type=int,
        default=date.today().toordinal(),
        help="in tier everything, draws the cases of the matrix of meshes, with every triple of values: the day",
    )
    parser.addoption("--all-meshes", action="store_true", help="every product of that matrix: half a day of CPU time")


def pytest_configure(config: pytest.Config) -> None:
    """Register the tiers' markers and hypothesis profiles: it draws new examples only where everything runs."""
    config.addinivalue_line("markers", "tier(name): the first tier that runs the test (tests/tiers.py)")
    config.addinivalue_line("markers", "cases(n): how many cases of the test the ci tier runs at most")
    tier: Tier = config.getoption("--tier")
    untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("everything", untimed)
    settings.register_profile("nightly", untimed, derandomize=True)
    settings.register_profile("ci", untimed, derandomize=True)
    settings.register_profile("quick", untimed, derandomize=True, max_examples=10)
    settings.load_profile(tier)
    limit_s, slow = (LIMIT_S, SLOW) if tier == "quick" else (None, ())
    config.pluginmanager.register(CpuTimes(limit_s, slow), "cpu times")
    if tier == "quick":
        config.pluginmanager.register(NoProcesses(), "no processes")
    else:
        config.pluginmanager.import_plugin("browser")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files out of the quick tier whose imports take seconds."""
    if config.getoption("--tier") != "quick":
        return None
    path = collection_path / "conftest.py" if collection_path.is_dir() else collection_path
    return (path.suffix == ".py" and path.is_file() and bool(IMPORTS.search(path.read_text()))) or None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give processes function after function, and whole files where tests share what is made once for a file."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFunction(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return path if shares_fixtures(path) else nodeid.partition("[")[0]

    return ByFunction(config, log)


@cache
def shares_fixtures(path: str) -> bool:
    """Return whether a file names a fixture that lives as long as the tests of a file or a folder."""
    text = (HERE.parent / path).read_text()
    return bool(TOGETHER.search(text)) or any(re.search(rf"\b{name}\b", text) for name in _long_lived())


@cache
def _long_lived() -> frozenset[str]:
    shared = [*HERE.glob("**/conftest.py"), HERE / "browser.py"]
    return frozenset(name for path in shared for name in TOGETHER.findall(path.read_text()))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the tier, with as many seeds as it has; the longest first."""
    tier: Tier = config.getoption("--tier")
    tiers = TIERS[: TIERS.index(tier) + 1]
    killers = _killers() if tier != "quick" else frozenset()
    kept = _sampled([item for item in items if tier_of(item) in tiers or item.nodeid in killers], tier)
    chosen = set(kept)
    if left := [item for item in items if item not in chosen]:
        config.hook.pytest_deselected(items=left)
    items[:] = sorted(kept, key=_turn)


def _sampled(items: list[pytest.Item], tier: Tier) -> list[pytest.Item]:
    """Return the cases of the tier: of tests with too many some at equal distances, and cases that kill a mutant."""
    tests = [_sampled_as(item, tier) for item in items]
    numbers = Counter(test for test, _ in tests)
    met: Counter[str] = Counter()
    kept = []
    for item, (test, most) in zip(items, tests, strict=True):
        if met[test] % math.ceil(numbers[test] / most) == 0 or item.nodeid in _killers():
            kept.append(item)
        met[test] += 1
    return kept


@cache
def _killers() -> frozenset[str]:
    """Return the tests that ``mutants.json`` names."""
    results = (each["result"] for each in json.loads((HERE / "mutants/mutants.json").read_text()))
    return frozenset(result["by"] for result in results if result is not None and "by" in result)


def _sampled_as(item: pytest.Item, tier: Tier) -> tuple[str, int]:
    """Return the name under which the cases of a test are counted, and how many of them run at most."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    test = item.nodeid.partition("[")[0]
    cases = item.get_closest_marker("cases")
    if cases is not None and tier == "ci":
        return test, cases.args[0]
    if "seed" in params:
        return f"{test}{[value for name, value in params.items() if name != 'seed']}", SEEDS[tier]
    return test, sys.maxsize


def _turn(item: pytest.Item) -> int:
    path = item.path.as_posix()
    if path.endswith(LONGEST):
        return 0
    return 2 if SHORTEST in item.path.parent.relative_to(HERE).parts else 1


class NoProcesses:
    """Refuses to start a process while a test runs."""

    def __init__(self) -> None:
        self._test = ""
        sys.addaudithook(self._refuse)

    def _refuse(self, event: str, _args: tuple[Any, ...]) -> None:
        if self._test and event in STARTS:
            raise RuntimeError(
                f"{self._test} starts a process ({event}); mark it with pytest.mark.tier, see tests/tiers.py"
            )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._test = item.nodeid
        try:
            return (yield)
        finally:
            self._test = ""
