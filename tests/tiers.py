"""The four tiers of tests. Each contains the one before.

quick        no processes, browsers, database servers, torch or whole searches (three seeds)
ci           one case of each system and question on real parts (four seeds)
nightly      whole searches, all exchanges, faults that take long to happen, other trainers' code (twelve seeds)
everything   every seed and case, new draws of hypothesis, Slurm, soaking, each command of the documentation

A test belongs to the tier of its folder (``FOLDERS``), unless its function or module has ``@pytest.mark.tier``. The
quick tier refuses to start processes and names tests that take more than ``LIMIT_S`` of CPU time, so a test that
belongs elsewhere is found when it runs. ``@pytest.mark.cases(n)`` limits the ci tier to ``n`` cases of a test.
"""

from __future__ import annotations

import re
import sys
from typing import Literal, get_args

import pytest

Tier = Literal["quick", "ci", "nightly", "everything"]
TIERS: tuple[Tier, ...] = get_args(Tier)
FOLDERS: dict[str, Tier] = {
    "": "quick",
    "cli": "ci",
    "executor": "ci",
    "executor/links": "quick",
    "executor/node": "quick",
    "layouts/referees": "nightly",
    "planning": "ci",
    "service": "ci",
    "slurm": "everything",
    "solvers/solve": "ci",
}
"""The tier of the tests below a folder of ``tests/``; the longest name that fits decides."""
SEEDS: dict[Tier, int] = {"quick": 3, "ci": 4, "nightly": 12, "everything": sys.maxsize}
"""Seeds of a test that draws, with each choice of its other parameters."""
LIMIT_S = 1.0
"""CPU time of a test in the quick tier."""
SLOW = frozenset(
    {
        "tests/docs/test_citations.py::test_every_cited_section_is_in_the_theory",
        "tests/executor/node/test_state.py::TestNode::runTest",
        "tests/executor/node/test_state_exhaustive.py::test_every_story_of_three_from_each_place_of_the_life_of_a_run",
        "tests/solvers/planners/dapple/test_dapple_search.py::test_pruning_changes_no_value",
        "tests/solvers/judge/clocks/test_worklist.py::test_the_drawn_plans_have_what_the_worklist_must_handle",
        "tests/solvers/judge/page/test_judge_page.py::test_the_worked_example_is_the_judges",
        "tests/solvers/lowering/test_lowering_random.py::test_plans_lower_exactly_when_their_orders_have_no_circle",
        "tests/solvers/lowering/test_lowering_random.py::test_the_checks_say_what_the_reference_says",
        "tests/solvers/lowering/test_lowering_random.py::test_what_one_process_could_run_its_ranks_can",
        "tests/placing/test_place_command.py::test_jobs_share_no_device_and_jointly_they_do_at_least_as_much",
        "tests/test_house.py::test_no_modules_import_each_other_in_a_circle",
    }
)
"""Tests of the quick tier that take longer."""
IMPORTS = re.compile(r"^(?:from|import) (?:torch|playwright|distributed|schemathesis)\b", re.MULTILINE)
"""Imports that take seconds; the quick tier does not collect a file that has one."""


def tier_of(item: pytest.Item) -> Tier:
    """Return the first tier that runs a test.

    Raises
    ------
    pytest.UsageError
        Its marker names no tier.
    """
    marker = item.get_closest_marker("tier")
    if marker is None:
        return tier_of_folder(item.nodeid.partition("::")[0].removeprefix("tests/"))
    if marker.args[0] not in TIERS:
        raise pytest.UsageError(f"{item.nodeid}: {marker.args[0]!r} is not a tier; the tiers are {', '.join(TIERS)}")
    tier: Tier = marker.args[0]
    return tier


def tier_of_folder(path: str) -> Tier:
    """Return the tier of a file that has no marker; ``path`` is relative to ``tests/``."""
    while path not in FOLDERS:
        path = path.rpartition("/")[0]
    return FOLDERS[path]
