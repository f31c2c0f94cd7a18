"""Prose and names of a Python module: docstrings, comments, bound names and help texts."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

_COMMENT = re.compile(r"(?:^|\s)#\s*(?!!)(.*)", re.MULTILINE)
_TOOLS = re.compile(r"#\s*(?:noqa|type:|fmt:|ruff:|mypy:|pragma|shellcheck|!|-{3})")
_PROPERTIES = ("property", "fixture", "setter", "overload")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_BINDERS = (
    *_FUNCTIONS, ast.Name, ast.Attribute, ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar, ast.MatchMapping,
    ast.Import, ast.ImportFrom,
)  # fmt: skip
_LEAVES = (ast.expr_context, ast.Constant, ast.operator, ast.cmpop)


class Docstring(NamedTuple):
    """``kind``: function, test, property, class, module, constant or bool; ``lines`` with their numbers, dedented."""

    kind: str
    lines: list[tuple[int, str]]


class Name(NamedTuple):
    """A name and where its scope binds it first; ``public`` for a parameter of a public function."""

    line: int
    name: str
    public: bool = False


def docstrings(tree: ast.Module, *, tests: bool) -> Iterator[Docstring]:
    """Yield the docstrings of a module, its classes and functions, and the strings below assignments."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        body: list[ast.stmt] = []
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, field, None)
            if isinstance(inner, list):
                body += inner
        todo += reversed(body)
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and body and (text := _string(body[0])):
            yield Docstring(_kind(node, tests), _lines(text))
        if isinstance(node, ast.Module | ast.ClassDef):
            for before, after in pairwise(body):
                if isinstance(before, ast.Assign | ast.AnnAssign) and (text := _string(after)):
                    yield Docstring(_kind(before, tests), _lines(text))


def _string(node: ast.stmt) -> ast.Constant | None:
    value = node.value if isinstance(node, ast.Expr) else None
    return value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def _kind(node: ast.AST, tests: bool) -> str:
    if isinstance(node, _FUNCTIONS):
        decorators = [ast.unparse(each) for each in node.decorator_list]
        if any(word in decorator for decorator in decorators for word in _PROPERTIES):
            return "bool" if node.returns is not None and ast.unparse(node.returns) == "bool" else "property"
        return "test" if tests and node.name.startswith("test") else "function"
    if isinstance(node, ast.AnnAssign) and re.search(r"\bbool\b", ast.unparse(node.annotation)):
        return "bool"
    return {ast.ClassDef: "class", ast.Module: "module"}.get(type(node), "constant")


def _lines(string: ast.Constant) -> list[tuple[int, str]]:
    lines = str(string.value).expandtabs().splitlines()
    margin = min((len(line) - len(line.lstrip()) for line in lines[1:] if line.strip()), default=0)
    return [(string.lineno + at, line[margin:] if at else line.lstrip()) for at, line in enumerate(lines)]


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield each comment with its line; comment lines in a row are one comment."""
    run: list[str] = []
    start = last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or _TOOLS.match(token.string):
            continue
        if run and token.start[0] != last + 1:
            yield start, "\n".join(run)
            run = []
        start = start if run else token.start[0]
        last = token.start[0]
        run.append(token.string.lstrip("#: "))
    if run:
        yield start, "\n".join(run)


def rough_comments(text: str) -> str:
    """Return what follows each number sign, in strings too; a search of this text decides whether to tokenize."""
    return "\n".join(_COMMENT.findall(text))


def bound_names(tree: ast.Module) -> Iterator[Name]:
    """Yield the names that each scope binds, once a scope: parameters, variables, attributes, functions, classes."""
    todo: list[tuple[ast.AST, ast.AST, set[str]]] = [(tree, tree, set())]
    while todo:
        node, scope, seen = todo.pop()
        for name in _binds(node, scope) if isinstance(node, _BINDERS) else ():
            if name.name not in seen:
                seen.add(name.name)
                yield name
        if isinstance(node, (*_FUNCTIONS, ast.Lambda, ast.ClassDef)):
            scope, seen = node, set()
            if not isinstance(node, ast.ClassDef):
                parameters = list(_parameters(node))
                seen |= {parameter.name for parameter in parameters}
                yield from parameters
        inner = (node.value,) if isinstance(node, ast.AugAssign) else ast.iter_child_nodes(node)
        todo += [(child, scope, seen) for child in inner if not isinstance(child, _LEAVES)]


def _binds(node: ast.AST, scope: ast.AST) -> Iterator[Name]:
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            yield Name(node.lineno, name, public=isinstance(scope, ast.ClassDef))
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield Name(node.lineno, name)
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            yield Name(node.lineno, name)
        case ast.MatchMapping(rest=str(name)):
            yield Name(node.lineno, name)
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            yield from (Name(node.lineno, alias.asname) for alias in aliases if alias.asname)


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> Iterator[Name]:
    each = node.args
    public = not isinstance(node, ast.Lambda) and not node.name.startswith("_")
    for argument in (*each.posonlyargs, *each.args, *each.kwonlyargs, each.vararg, each.kwarg):
        if argument is not None:
            yield Name(argument.lineno, argument.arg, public)


def help_texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the strings that calls take as ``help``; parts of an f-string that are computed count as nothing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "help":
            parts = node.value.values if isinstance(node.value, ast.JoinedStr) else [node.value]
            text = "".join(
                part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)
            )
            yield node.value.lineno, text
