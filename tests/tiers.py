"""Three tiers of tests, chosen by what a test uses: the names that it, its fixtures and its helpers load.

quick        no processes, browsers, database servers, torch or whole searches; three seeds
standard     all but Slurm, soaking and the documentation's commands; a sample of the seeds
everything   all of it, every seed, and new draws of hypothesis

No test is put into a tier by hand; ``FEWER`` and ``SLOW`` name those that run fewer cases or may take longer. A test
that uses something dear without loading one of the names below is found when it runs: the quick tier refuses to start
processes, and fails where a test takes more than ``LIMIT_S`` of CPU time.
"""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Iterator
from functools import cache
from inspect import isclass, isfunction, ismodule
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Literal, get_args

import pytest

Tier = Literal["quick", "standard", "everything"]
TIERS: tuple[Tier, ...] = get_args(Tier)
SEEDS: dict[Tier, int] = {"quick": 3, "standard": 12, "everything": sys.maxsize}
"""Of a test that draws, with each choice of its other parameters."""
FEWER = {
    "test_recorded.py::test_a_request_is_answered_as_recorded": 12,
    "test_jobshop_kinds.py::test_the_optimum_is_the_best_of_every_order": 2,
    "test_all_plans.py::test_never_above_any_planners_plan": 2,
    "test_chunked_planners.py::test_plans_are_judged_verified_and_above_the_bounds": 2,
    "test_claims_over_choices.py::test_no_plan_with_experts_refutes_the_answer": 8,
    "test_exact.py::test_proofs_hold_for_what_other_planners_find": 1,
    "test_feasibility.py::test_auto_finds_a_plan_wherever_there_is_one": 3,
    "test_mesh_memory.py::test_ranks_hold_what_is_counted_after_two_micro_batches_and_at_the_step": 8,
    "test_mesh_memory.py::test_under_autocast_ranks_hold_what_is_counted": 4,
    "test_over_time.py::test_no_plan_is_quicker_in_the_memory_that_it_takes": 2,
    "test_over_time.py::test_no_plan_is_quicker_where_larger_slices_are_cheaper": 1,
    "test_overtaking.py::test_no_longer_than_published_in_the_same_room": 7,
    "test_overtaking.py::test_orders_found_run_and_keep_to_the_room": 3,
    "test_portfolio.py::test_auto_gives_the_same_bytes_with_any_number_of_workers": 1,
    "test_pipedream_planner.py::test_plans_fit_in_less_and_less_memory": 2,
    "test_request_bound.py::test_never_above_the_job_shop_of_any_plan": 2,
    "test_request_bound.py::test_no_planner_has_a_better_plan": 4,
    "test_spp_planner.py::test_memory_is_respected_or_the_reason_is_said": 4,
    "test_simulated_degrees.py::test_ranks_that_share_layers_come_to_their_end": 4,
    "test_update_rules.py::test_periodic_rules_train_their_equations": 5,
    "test_update_rules_at_degrees.py::test_every_rule_trains_its_equations_at_degrees": 5,
}
"""Cases in the standard tier of tests whose cases take long: seeds, with each choice of the other parameters; without
seeds, choices of parameters at distances that share no factor with the number of values of the inner ones."""
LIMIT_S = 1.5
"""CPU time of a test in the quick tier: a second, and half of one for what a busy machine adds."""
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
        "tests/test_import_rules.py::test_no_bare_import",
        "tests/convert/test_plan_size.py::test_a_plan_of_1024_rows_and_4096_micro_batches_is_below_1_mb",
    }
)
"""Tests of the quick tier that may take longer."""

HERE = str(Path(__file__).parent)
NOTHING = ModuleType("nothing")
STARTERS = {"subprocess", "multiprocessing", "Forkserver", "executor_of", "solve_case", "torch"}
"""What modules import that start processes or take seconds to import; whoever uses their functions does so as well."""
PROCESSES = STARTERS | {
    "fork",
    "LocalCluster",
    "sync_playwright",
    "serve",
    "create_app",
    "exec",
    "background",
    "run_node",
    "SlowWay",
}
IMPORTS = re.compile(r"^(?:from|import) (?:torch|playwright|distributed|schemathesis)\b", re.MULTILINE)
"""Of files that the quick tier does not even import."""
SERVERS = {"postgresql"}
"""Values of parameters that ask for a database server."""
SEARCHES = {
    *("PLANNERS", "resolve", "Session", "Question", "optimise_order", "periodic_ilp", "plan", "compare", "solve"),
    *("prove", "Relaxation", "BestFirstSearch", "SearchResult", "ShapeSearch", "ThresholdSearch", "improve", "warm"),
    *(
        "main",
        "cp_model",
        "tune",
        "sweep",
        "place",
        "imported",
        "searched",
        "found_overtaking",
        "by_spp",
        "_fewest",
        "every_set",
    ),
}
NIGHTLY = {"Slurm", "Sandbox"}
GLOBAL, ATTRIBUTE = dis.opmap["LOAD_GLOBAL"], dis.opmap["LOAD_ATTR"]
IMPORTED = (dis.opmap["IMPORT_NAME"], dis.opmap["IMPORT_FROM"])
SHIFTS = dict.fromkeys(IMPORTED, 0) | {GLOBAL: 1, ATTRIBUTE: int(sys.version_info >= (3, 12))}
if "LOAD_METHOD" in dis.opmap and sys.version_info < (3, 12):
    SHIFTS[dis.opmap["LOAD_METHOD"]] = 0
"""Of instructions with a name: by how many bits its number is shifted in their argument."""
LONG_S = 600
"""A test with a limit of its own that is as long soaks, or waits for several hosts."""


def tier_of(item: pytest.Item) -> Tier:
    """The first tier that runs a test."""
    names = uses(item)
    patience = item.get_closest_marker("timeout")
    if names & NIGHTLY or (patience is not None and patience.args[0] >= LONG_S):
        return "everything"
    return "standard" if names & (PROCESSES | SEARCHES | SERVERS) else "quick"


def uses(item: pytest.Item) -> frozenset[str]:
    """The names that a test loads, with those of its fixtures and of what they call in the tests' own modules."""
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    functions = [item.function, *(one.func for several in fixtures for one in several)]  # type: ignore[attr-defined]
    params = getattr(getattr(item, "callspec", None), "params", {}).values()
    functions += [value for value in params if isfunction(value)]
    names = frozenset(value for value in params if isinstance(value, str))
    return names.union(*map(_reached, functions))


@cache
def _reached(function: FunctionType) -> frozenset[str]:
    """The names that a function loads, and all functions of the tests that it reaches."""
    names: set[str] = set()
    waiting, met = [_plain(function)], set()
    while waiting:
        one = waiting.pop()
        if one not in met:
            met.add(one)
            of_its_own, next_ones = _uses_itself(one)
            names |= of_its_own
            waiting += next_ones
    return frozenset(names)


@cache
def _uses_itself(function: FunctionType) -> tuple[frozenset[str], tuple[FunctionType, ...]]:
    """The names that a function loads itself, and the functions of the tests among them."""
    names: set[str] = set()
    functions: list[FunctionType] = []
    for name, value in _loaded(function):
        names.add(name)
        if not _is_ours(value):
            names |= STARTERS & vars(_module_of(value)).keys()
            continue
        family = value.__mro__ if isclass(value) else ()
        names.update(one.__name__ for one in family)
        parts = [part for one in family for part in vars(one).values()] if family else [value]
        functions += [_plain(part) for part in parts if isfunction(_plain(part)) and _is_ours(part)]
    return frozenset(names), tuple(functions)


def _loaded(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Names that the code of a function loads from its module or imports, with what they are."""
    for code in _codes(function.__code__):
        module: object = None
        for opcode, name in _named(code):
            if opcode == GLOBAL:
                module = function.__globals__.get(name)
                yield name, module
            elif opcode in IMPORTED:
                yield from ((part, None) for part in name.split("."))
            elif ismodule(module):
                yield name, getattr(module, name, None)
                module = None


def _named(code: CodeType) -> Iterator[tuple[int, str]]:
    """Instructions that load a name, import it or read an attribute, with the name; ``dis`` takes ten times as long."""
    more = 0
    for opcode, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument = more | low
        more = argument << 8 if opcode == dis.EXTENDED_ARG else 0
        if opcode in SHIFTS:
            yield opcode, code.co_names[argument >> SHIFTS[opcode]]


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _plain(value: object) -> FunctionType:
    """What a decorator, a descriptor or hypothesis wraps."""
    value = getattr(getattr(value, "hypothesis", None), "inner_test", value)
    for name in ("fget", "__func__", "func", "__wrapped__"):
        value = getattr(value, name, value)
    return value  # type: ignore[return-value]


def _module_of(value: object) -> ModuleType:
    """The module that defines a function or class of ours or of the package's; elsewhere one that has nothing."""
    name = getattr(_plain(value), "__module__", None) or ""
    known = name.startswith("penstock") or (getattr(sys.modules.get(name), "__file__", None) or "").startswith(HERE)
    return sys.modules.get(name, NOTHING) if known and (isclass(value) or isfunction(_plain(value))) else NOTHING


def _is_ours(value: object) -> bool:
    """Whether a function or class is defined in the tests."""
    return (getattr(_module_of(value), "__file__", None) or "").startswith(HERE)
