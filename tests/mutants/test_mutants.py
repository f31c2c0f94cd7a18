"""The list of mutants is one that can be run: each is found in the sources, and changes what it says."""

from __future__ import annotations

import ast
import json
from collections import Counter
from functools import cache
from pathlib import Path
from textwrap import dedent

import pytest
from mutation import Mutation, draw, mutated, mutations
from run_mutants import COUNT, GROUPS, LIST, ROOT, TESTS, chosen_tests, place_of

SOURCE = dedent('''
    class Line:
        def take(self, bytes_: int) -> int:
            """What is left, 1 at least."""
            if bytes_ < self.least:
                raise ValueError(f"{bytes_} < {self.least}")
            for each in range(2):
                self.left -= each + 1
            return -bytes_
    ''')
TAKE = {
    ("if bytes_ < self.least:", "comparison", "if bytes_ <= self.least:"),
    ("if bytes_ < self.least:", "dropped", "pass"),
    ("for each in range(2):", "constant", "for each in range(3):"),
    ("self.left -= each + 1", "sign", "self.left += each + 1"),
    ("self.left -= each + 1", "sign", "self.left -= each - 1"),
    ("self.left -= each + 1", "constant", "self.left -= each + 2"),
    ("self.left -= each + 1", "dropped", "pass"),
    ("return -bytes_", "sign", "return +bytes_"),
}


def test_every_change_to_a_function_is_listed_once() -> None:
    mutants = mutations(SOURCE)
    assert {each.function for each in mutants} == {"Line.take"}
    assert len(mutants) == len(TAKE)
    assert {each[1:] for each in mutants} == TAKE


@pytest.mark.parametrize("mutation", mutations(SOURCE), ids=lambda each: each.mutated)
def test_a_mutant_changes_its_statement_and_keeps_the_body(mutation: Mutation) -> None:
    text = mutated(SOURCE, mutation)
    assert text is not None
    compile(text, "mutant", "exec")
    assert mutated(text, mutation) is None
    assert ("self.left" in text) == (mutation.mutated != "pass" or "left" not in mutation.statement)
    assert ("raise ValueError" in text) == (mutation[1:3] != ("if bytes_ < self.least:", "dropped"))


def test_a_statement_that_stands_twice_is_left_alone() -> None:
    twice = "def f(a):\n    a += 1\n    a += 1\n    return a\n"
    assert {each.statement for each in mutations(twice)} == set()
    assert mutated(twice, Mutation("f", "a += 1", "dropped", "pass")) is None


def test_kinds_are_drawn_in_turn_and_the_same_each_time() -> None:
    many = mutations("".join(f"def f{n}(a):\n    a.x = a.y + {n}\n    return a.y < {n}\n" for n in range(20)))
    drawn = draw(many, 20, "seed")
    assert drawn == draw(reversed(many), 20, "seed")
    assert set(Counter(each.kind for each in drawn).values()) == {5}
    assert max(Counter(each.function for each in drawn).values()) <= 2


ENTRIES = json.loads(LIST.read_text())


def test_the_list_has_as_many_mutants_of_each_group() -> None:
    assert len({(each["function"], each["statement"]) for each in ENTRIES}) == len(ENTRIES) == COUNT
    sizes = Counter(each["group"] for each in ENTRIES)
    assert set(sizes) == set(GROUPS)
    assert min(sizes.values()) >= COUNT // len(GROUPS)


@pytest.mark.parametrize("number", range(COUNT))
def test_every_mutant_of_the_list_is_found_and_has_tests(number: int) -> None:
    entry = ENTRIES[number]
    assert entry["mutated"] != entry["statement"]
    _path, text = place_of(entry, ROOT)
    compile(text, entry["function"], "exec")
    assert all((ROOT / path).is_file() for path in chosen_tests(entry, ROOT)), entry["group"]


@pytest.mark.parametrize("number", range(COUNT))
def test_the_test_that_killed_a_mutant_is_there(number: int) -> None:
    result = ENTRIES[number]["result"]
    if result is None or result["status"] != "killed":
        return
    path, _, test = result["by"].partition("::")
    functions = [node.name for node in ast.walk(_tree(path)) if isinstance(node, ast.FunctionDef)]
    assert not test or test.partition("[")[0] in functions, result["by"]


@cache
def _tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def test_a_mutant_is_found_where_its_file_has_moved(tmp_path: Path) -> None:
    for package in ("solvers", "convert"):
        (tmp_path / "src" / "penstock" / package).mkdir(parents=True)
    (tmp_path / "src" / "penstock" / "solvers" / "moved.py").write_text(SOURCE)
    entry = {"module": "penstock.solvers.line", **mutations(SOURCE)[0]._asdict()}
    assert place_of(entry, tmp_path)[0].name == "moved.py"
    (tmp_path / "src" / "penstock" / "convert" / "twice.py").write_text(SOURCE)
    with pytest.raises(LookupError, match="2 files"):
        place_of(entry, tmp_path)


def test_every_result_says_what_is_needed() -> None:
    """Which test killed a mutant, which test is missing where it survives, or why one that changes nothing does not."""
    needed = {"killed": "by", "survived": "missing", "equivalent": "reason", "out of time": "tests"}
    for entry in ENTRIES:
        result = entry["result"]
        if result is not None:
            assert result[needed[result["status"]]], entry["statement"]


def test_groups_have_tests() -> None:
    assert set(TESTS) == set(GROUPS)
