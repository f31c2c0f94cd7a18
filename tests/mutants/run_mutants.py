"""Draws mutants of what judges, proves, lowers and converts, and runs the tests that should notice each of them.

    scripts/mutants               runs mutants without a result, for ``--minutes``, and continues at the next call
    scripts/mutants --again       runs killed mutants once more, after files have moved, and exits with 1 where one
                                  survives. The test that killed a mutant comes first, if it passes without mutants
    scripts/mutants --draw        draws a new list, without results

Each mutant is applied to a copy of this checkout in a temporary folder; kernels that are compiled here serve the copy.
``mutants.json`` has the list: module, function, statement and what it becomes, and which test killed it. A survivor
says which test is missing; one that changes nothing that can be seen says why. The module is only where a mutant was
drawn: it is found again by function and statement wherever these are.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mutation import Mutation, draw, mutated, mutations

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
LIST = HERE / "mutants.json"
SEED = "penstock"
COUNT = 140
CPU_LIMIT_S = 400
"""CPU seconds of one mutant's tests; a mutant that is still running then has not been killed."""
TEST_LIMIT_S = 200
"""Seconds of one test, on the clock: a hanging test is killed."""
PACKAGES = ("src/penstock/solvers", "src/penstock/convert")
"""Folders of the package in which mutants are drawn, so that modules have the names that they are imported by."""

GROUPS: dict[str, tuple[str, ...]] = {
    "judge": ("solvers/judge/simulate", "solvers/judge/lanes", "solvers/judge/deadlock", "solvers/judge/memory_curve",
              "solvers/judge/shared_processor", "solvers/model/unroll", "solvers/model/timeline"),
    "verify": ("solvers/verify/*",),
    "costs": ("solvers/costs/stage", "solvers/costs/transfer", "solvers/costs/collectives", "solvers/costs/buckets",
              "solvers/costs/reductions", "solvers/costs/codecs", "solvers/costs/utilisation", "solvers/costs/charges",
              "solvers/costs/tables/step_graph"),
    "memory": ("solvers/costs/memory", "solvers/costs/memory_budget", "solvers/judge/shared_memory"),
    "bounds": ("solvers/bounds/schedule_bound", "solvers/bounds/stage_windows", "solvers/bounds/split_windows",
               "solvers/bounds/stage_times", "solvers/bounds/steady_state", "solvers/bounds/trainer",
               "solvers/bounds/contiguous/*"),
    "lowering": ("solvers/lowering/*",),
    "convert": ("convert/*",),
    "search": ("solvers/bounds/race", "solvers/degrees/axes", "solvers/solve/asking", "solvers/solve/choices",
               "solvers/solve/searched", "solvers/solve/incumbent", "solvers/solve/judging", "solvers/solve/driver"),
}  # fmt: skip
"""The modules that mutants are drawn from; none that is compiled."""

TESTS: dict[str, tuple[str, ...]] = {
    "judge": ("test_simulate", "test_drawn_plans", "test_page_simulator", "test_unroll", "test_memory_curve",
              "test_sharing", "test_verify", "test_periodic", "test_verify_periodic"),
    "verify": ("test_drawn_plans", "test_verify", "test_verify_periodic", "test_verify_pipelines",
               "test_verify_sharing", "test_codecs", "test_ties", "test_page_simulator"),
    "costs": ("test_costs", "test_simulate", "test_charges", "test_codecs", "test_page_simulator", "test_ties",
              "test_jobshop"),
    "memory": ("test_room", "test_simulate", "test_memory_curve", "test_page_simulator", "test_verify", "test_sharing",
               "test_feasibility", "test_eager", "test_advance_forward"),
    "bounds": ("test_drawn_plans", "test_bounds", "test_windows", "test_split_windows", "test_steady_bounds",
               "test_request_bound", "test_spread", "test_within"),
    "lowering": ("test_lowering", "test_lowering_kinds", "test_lowering_periodic", "test_lowering_random",
                 "test_programs"),
    "convert": ("test_convert", "test_convert_periodic", "test_api", "test_codecs", "test_documents",
                "test_explanation", "test_explanations"),
    "search": ("test_race", "test_choices", "test_axes", "test_auto", "test_effort", "test_planners_not_asked",
               "test_portfolio", "test_walk", "test_kinds_left_out", "test_open_is_never_worse",
               "test_claims_over_choices", "test_why_not", "test_limits", "test_auto_never_worse"),
}  # fmt: skip
"""Files of the tests that should kill a group's mutants; files that import the mutated module come first."""

Entry = dict[str, Any]


def drawn() -> list[Entry]:
    """Draw the list without results: about equally many mutants of each group."""
    entries = []
    for number, (group, patterns) in enumerate(GROUPS.items()):
        share = COUNT // len(GROUPS) + (number < COUNT % len(GROUPS))
        sources = {module: path.read_text() for module, path in _modules(patterns)}
        mutants = {(module, each) for module, source in sources.items() for each in mutations(source)}
        modules = {each: module for module, each in mutants}
        for each in draw(modules, share, f"{SEED} {group}"):
            entries.append({"group": group, "module": modules[each], **each._asdict(), "result": None})
    return entries


def _modules(patterns: Sequence[str]) -> Iterator[tuple[str, Path]]:
    for pattern in patterns:
        for path in sorted((ROOT / "src" / "penstock").glob(f"{pattern}.py")):
            yield _name_of(path, ROOT), path


def _name_of(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root / "src").with_suffix("").parts).removesuffix(".__init__")


def place_of(entry: Entry, root: Path) -> tuple[Path, str]:
    """Return the file that has the mutant's function and statement, and its mutated text.

    This is the file where the mutant was drawn, if it still has them. Raises LookupError where no file has them, or
    several do.
    """
    mutation = Mutation(*(entry[field] for field in Mutation._fields))
    for ending in (".py", "/__init__.py"):
        original = root / "src" / f"{entry['module'].replace('.', '/')}{ending}"
        if original.is_file() and (text := mutated(original.read_text(), mutation)):
            return original, text
    mutated_texts = {}
    for package in PACKAGES:
        for folder, _folders, names in os.walk(root / package, followlinks=True):
            for path in (Path(folder, name) for name in sorted(names) if name.endswith(".py")):
                source = path.read_text()
                if f"def {mutation.function.rpartition('.')[2]}(" in source and (text := mutated(source, mutation)):
                    mutated_texts[path] = text
    if len(mutated_texts) != 1:
        raise LookupError(f"{mutation.function}: {mutation.statement!r} stands in {len(mutated_texts)} files")
    return next(iter(mutated_texts.items()))


def chosen_tests(entry: Entry, root: Path) -> list[str]:
    """Return the files that should kill a mutant: its group's files, and first of these the files that import its
    module.
    """
    chosen = [_places_of_tests(root)[name] for name in TESTS[entry["group"]]]
    chosen.sort(key=lambda path: entry["module"] not in _imported(path))
    return [path.relative_to(root).as_posix() for path in chosen]


@cache
def _places_of_tests(root: Path) -> dict[str, Path]:
    return {path.stem: path for path in (root / "tests").rglob("test_*.py")}


@cache
def _imported(path: Path) -> frozenset[str | None]:
    """Return the modules that a file imports names from."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return frozenset(node.module for node in nodes if isinstance(node, ast.ImportFrom))


def copied(directory: Path) -> dict[str, str]:
    """Copy what git knows of this checkout, with the kernels that are compiled; the environment that uses it."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        target = directory / "tree" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    from penstock.solvers.compiled import kept

    cache, (_number, kernels) = directory / "kernels", kept.kept()
    for folder, _folders, _names in os.walk(ROOT / "src" / "penstock", followlinks=True):
        own_name = kept.folder(str(Path(folder, "any.py"))) or _cache_name(Path(folder))
        if (compiled := kernels / own_name).is_dir():
            there = directory / "tree" / Path(folder).relative_to(ROOT)
            shutil.copytree(compiled, cache / _cache_name(there))
    variables = {
        "PYTHONPATH": str(directory / "tree" / "src"),
        "PENSTOCK_KERNELS": str(cache),
        "PYTHONDONTWRITEBYTECODE": "",
    }
    return {**os.environ, **variables}


def _cache_name(folder: Path) -> str:
    """Return numba's name for the compiled code of the files of a folder."""
    from numba.core.caching import _CacheLocator

    name: str = _CacheLocator.get_suitable_cache_subpath(str(folder / "any.py"))
    return name


def run(entry: Entry, tree: Path, environment: dict[str, str], first: str = "") -> Entry:
    """Return the result of a mutant's tests: the test that killed it, or that it survived. The copy is unchanged after.

    ``first``: a test that runs before all others, which do not run if it kills the mutant.
    """
    path, text = place_of(entry, tree)
    before, stamp = path.read_bytes(), path.stat().st_mtime_ns
    path.write_text(text)
    try:
        result = tested([first], tree, environment) if first else {"status": "survived"}
        return result if result["status"] == "killed" else tested(chosen_tests(entry, tree), tree, environment)
    finally:
        path.write_bytes(before)
        os.utime(path, ns=(stamp, stamp))


def passing(tests: Iterable[str], tree: Path, environment: dict[str, str]) -> frozenset[str]:
    """Return the tests that exist and pass in the unchanged copy: a test that fails anyway kills no mutant."""
    files = sorted({test.partition("::")[0] for test in tests})
    listed = _pytest(["--collect-only", *files], tree, environment).stdout.splitlines()
    done = _pytest(["-rp", *sorted(set(tests) & set(listed))], tree, environment)
    return frozenset(re.findall(r"^PASSED (.+)$", done.stdout, re.MULTILINE))


def tested(tests: Sequence[str], tree: Path, environment: dict[str, str]) -> Entry:
    """What pytest finds, up to the first failure. Raises RuntimeError where it does not come to run the tests."""
    started = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = _pytest(["-x", f"--timeout={TEST_LIMIT_S}", *tests], tree, environment)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = round(ended.ru_utime + ended.ru_stime - started.ru_utime - started.ru_stime)
    if done.returncode == 0:
        return {"status": "survived", "tests": list(tests), "cpu_s": seconds}
    if failed := re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE):
        return {"status": "killed", "by": failed[1], "cpu_s": seconds}
    if done.returncode < 0:
        return {"status": "out of time", "tests": list(tests), "cpu_s": seconds}
    raise RuntimeError(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")


def _pytest(words: Sequence[str], tree: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no", *words],
        cwd=tree, env=environment, capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S)),
    )  # fmt: skip


def write(entries: Sequence[Entry]) -> None:
    """Write one line per mutant."""
    LIST.write_text("[\n" + ",\n".join(json.dumps(each) for each in entries) + "\n]\n")


def main() -> int:
    """Run the command; return 1 where a mutant that was killed survives."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draw", action="store_true", help="draw a new list, without results")
    parser.add_argument("--again", action="store_true", help="run killed mutants; write nothing")
    parser.add_argument("--only", default="", help="numbers in the list, separated by commas")
    parser.add_argument("--minutes", type=float, default=60, help="start no mutant after this many")
    options = parser.parse_args()
    if options.draw:
        write(drawn())
        return 0
    entries: list[Entry] = json.loads(LIST.read_text())
    only = {int(number) for number in options.only.split(",") if number}
    until, survivors = time.monotonic() + 60 * options.minutes, 0
    with tempfile.TemporaryDirectory(prefix="penstock-mutants-") as directory:
        environment, tree = copied(Path(directory)), Path(directory, "tree")
        killers = [each["result"]["by"] for each in entries if "by" in (each["result"] or {})] if options.again else []
        passing_tests = passing(killers, tree, environment) if killers else frozenset()
        for number, entry in enumerate(entries):
            was = (entry["result"] or {}).get("status")
            wanted = number in only if only else was == ("killed" if options.again else None)
            if not wanted or time.monotonic() > until:
                continue
            by = (entry["result"] or {}).get("by", "")
            result = run(entry, tree, environment, first=by if by in passing_tests else "")
            print(number, entry["module"], entry["function"], entry["kind"], result, flush=True)
            survivors += was == "killed" != result["status"]
            if not options.again:
                entry["result"] = result
                write(entries)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
