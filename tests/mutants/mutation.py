"""Small changes to functions: listed, drawn, found again by function and statement, and applied to a source text.

A mutant is a statement of a function and what it becomes: a comparison that includes or excludes its limit, a constant
that is one more, a sign that is turned, a statement that is dropped. Of a statement with a body only the head is meant.
"""

from __future__ import annotations

import ast
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from copy import copy, deepcopy
from typing import Literal, NamedTuple, get_args

Kind = Literal["comparison", "constant", "sign", "dropped"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PER_FUNCTION = 2
"""Mutants of one function at most."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
SIGNS: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BODIES = ("body", "orelse", "handlers", "finalbody", "cases")
LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
UNTOUCHED = (ast.Raise, ast.Assert, *FUNCTIONS, ast.ClassDef)
"""Statements without mutations: errors and impossible cases are no behaviour; inner functions count separately."""


class Mutation(NamedTuple):
    """A change to a statement of a function, which has that statement once."""

    function: str
    statement: str
    kind: Kind
    mutated: str


def mutations(source: str) -> list[Mutation]:
    """Return all mutations of the functions of a module, in their order."""
    mutants = []
    for function, node in functions(ast.parse(source)):
        statements = list(_statements(node))
        times = Counter(head(each) for each in statements)
        for statement in statements:
            if times[text := head(statement)] == 1:
                mutants += [Mutation(function, text, kind, mutated) for kind, mutated in _variants(statement)]
    return mutants


def draw(candidates: Iterable[Mutation], number: int, seed: str) -> list[Mutation]:
    """Draw about equally many mutations of each kind, from as many functions as possible."""
    shuffled = sorted(candidates)
    random.Random(seed).shuffle(shuffled)
    chosen: list[Mutation] = []
    met: Counter[str] = Counter()
    while len(chosen) < number and shuffled:
        kind = KINDS[len(chosen) % len(KINDS)]
        fresh = [each for each in shuffled if met[each.function] < PER_FUNCTION]
        if not fresh:
            break
        one = next((each for each in fresh if each.kind == kind), fresh[0])
        chosen.append(one)
        met[one.function] += 1
        shuffled = [each for each in shuffled if each[:2] != one[:2]]
    return chosen


def mutated(source: str, mutation: Mutation) -> str | None:
    """Return the source with the mutation applied, without comments; None unless it has the statement exactly once."""
    tree = ast.parse(source)
    places = [
        (body, number)
        for name, node in functions(tree)
        if name == mutation.function
        for body, number, statement in _places(node)
        if head(statement) == mutation.statement
    ]
    if len(places) != 1:
        return None
    body, number = places[0]
    body[number] = _replaced(body[number], mutation.mutated)
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def functions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield functions with their names: ``Class.method``, ``outer.inner``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            name = f"{within}{node.name}"
            if isinstance(node, FUNCTIONS):
                yield name, node
            yield from functions(node, f"{name}.")
        else:
            yield from functions(node, within)


def head(statement: ast.stmt) -> str:
    """Return the statement as text, on one line where it has a body: ``if a < b:``."""
    text = ast.unparse(_bare(statement))
    return text.removesuffix("pass").strip() if hasattr(statement, "body") else text


def _bare(statement: ast.stmt) -> ast.stmt:
    """Return the statement; where it has a body, a copy of its head."""
    if not hasattr(statement, "body"):
        return statement
    bare = copy(statement)
    for field in BODIES:
        if hasattr(bare, field):
            setattr(bare, field, [ast.Pass()] if field == "body" else [])
    return bare


def _statements(function: ast.AST) -> Iterator[ast.stmt]:
    return (statement for _body, _number, statement in _places(function))


def _places(node: ast.AST) -> Iterator[tuple[list[ast.stmt], int, ast.stmt]]:
    """Yield a function's statements with the lists that contain them, without functions within it."""
    for field in ("body", "orelse", "finalbody"):
        body = getattr(node, field, [])
        for number, statement in enumerate(body):
            if isinstance(statement, UNTOUCHED) or _is_text(statement):
                continue
            yield body, number, statement
            yield from _places(statement)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _variants(statement: ast.stmt) -> Iterator[tuple[Kind, str]]:
    """Yield the mutations of one statement."""
    if _may_go(statement):
        yield "dropped", "pass"
    bare = _bare(statement)
    for number, _node in enumerate(_expressions(bare)):
        other = deepcopy(bare)
        kind = _mutate(next(each for n, each in enumerate(_expressions(other)) if n == number))
        if kind is not None:
            yield kind, head(other)


def _may_go(statement: ast.stmt) -> bool:
    """Return whether names stay defined without a statement: calls, changes in place, guards that leave or refuse."""
    if isinstance(statement, ast.If):
        return not statement.orelse and isinstance(statement.body[-1], LEAVES)
    if isinstance(statement, ast.Assign):
        return all(isinstance(target, ast.Attribute | ast.Subscript) for target in statement.targets)
    return isinstance(statement, ast.Expr | ast.AugAssign)


def _expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the mutable parts of a statement: it, and its expressions but texts, annotations and its body."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop(0)
        yield node
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "body") and isinstance(node, ast.stmt):
                continue
            parts = value if isinstance(value, list) else [value]
            waiting += [p for p in parts if isinstance(p, ast.AST) and not isinstance(p, ast.stmt | ast.JoinedStr)]


def _mutate(node: ast.AST) -> Kind | None:
    """Change a node in place; None where there is nothing to change."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        node.ops[0] = COMPARISONS[type(node.ops[0])]()
        return "comparison"
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
        return "constant"
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in SIGNS:
        node.op = SIGNS[type(node.op)]()
        return "sign"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node.op = ast.UAdd()
        return "sign"
    return None


def _replaced(statement: ast.stmt, text: str) -> ast.stmt:
    """Return the statement that a text contains; where the text is a head, with the old statement's body."""
    if not text.endswith(":"):
        return ast.parse(text).body[0]
    other = ast.parse(f"{text} pass").body[0]
    for field in BODIES:
        if hasattr(statement, field):
            setattr(other, field, getattr(statement, field))
    return other
