"""The values of the variables of a shell script, where they can be seen without running it.

The reader takes assignments (``NAME=value``, with ``export``, before a command, ``${NAME:=value}``), ``$NAME``,
``${NAME}``, ``${NAME:-default}`` and whole-number arithmetic ``$((…))``. Branches are followed where their conditions
can be decided (``branches.py``). Other assignments further in than the margin may depend on a condition: where they
differ, nothing is guessed.
"""

from __future__ import annotations

import ast
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from penstock.layouts.files.branches import Arm, Test, Undecided, arms_of, decided, named
from penstock.layouts.files.expressions import BINARY
from penstock.layouts.files.positions import place
from penstock.schemas.bounded.budget import Budget

QUOTED = r"\"[^\"\n]*\"|'[^'\n]*'"
EXPANDED = r"\$\(\([^\n]{0,200}?\)\)|\$\{[^}\n]{0,500}\}|\$\([^)\n]{0,500}\)"
"""Arithmetic, look-ups and commands. They are short, as otherwise a line of openings is read to its end for each."""
_ASSIGNED = re.compile(rf"(?m)(?:^|(?<=[\s;&|(\"']))([A-Za-z_]\w*)=(?!\()({QUOTED}|(?:{EXPANDED}|[^\s;&|()\"'])*)")
_DEFAULTED = re.compile(r"\$\{([A-Za-z_]\w{0,200}):?=([^}\n]{0,500})\}")
_USED = re.compile(
    r"\$\(\(([^\n]{0,200}?)\)\)|\$\{(\w+)(?::?[-=]([^}\n]{0,500}))?\}|\$([A-Za-z_]\w*|[0-9@*#])|(\$[({])"
)
_CONDITION = re.compile(r"^\s|&&|\|\||;;|\b(?:if|then|else|elif|case|for|while)\b|^[^=]*\)")
_DEEPEST = 30
_ARMS_A_STEP = 10
"""The number of arms that are looked through in the time of one other step."""
_OPERATORS: dict[type[ast.AST], Callable[[int, int], int]] = BINARY | {ast.Div: operator.floordiv}


class Value(NamedTuple):
    """A word of a text, and its place."""

    text: str
    at: int


class Unsaid(Exception):
    """An error for a variable without a known value; the message says why, and ``variable`` has its name, if any."""

    def __init__(self, why: str, variable: str = "") -> None:
        super().__init__(why)
        self.variable = variable


class _Assignment(NamedTuple):
    value: Value
    conditional: bool


class Condition(NamedTuple):
    """The condition of a place in a script.

    ``runs`` is None where ``test`` is not decided; ``variable`` is the variable that would decide it.
    """

    runs: bool | None
    test: str = ""
    variable: str = ""


_ALWAYS = Condition(True)


class Variables:
    """The assignments of a text without its comments; ``overrides`` are values that count whatever the text assigns.

    All look-ups together draw on one ``budget``: each variable may be made of two others, so that few lines stand for
    more text than any memory holds. Methods raise InvalidDocument where it is spent.
    """

    def __init__(self, text: str, budget: Budget, overrides: Mapping[str, str] = MappingProxyType({})) -> None:
        self._text, self._budget, self._overrides = text, budget, overrides
        self._arms = arms_of(text)
        self._outcomes: dict[Test, Condition] = {}
        self._assigned: dict[str, list[_Assignment]] = defaultdict(list)
        matches = [*_ASSIGNED.finditer(text), *_DEFAULTED.finditer(text)]
        line = end = 0
        condition: re.Match[str] | None = None
        for match in sorted(matches, key=re.Match.start):
            if match.start() >= end:  # another line; each is looked through once
                line = text.rfind("\n", 0, match.start()) + 1
                end = text.find("\n", match.start()) + 1 or len(text) + 1
                condition = _CONDITION.search(text[line:end])
            if around := self._around(match.start()):  # a followed branch: only && or || before it count
                before = text[max(line, around[-1].begin) : match.start()]
                conditional = "&&" in before or "||" in before
            else:
                conditional = condition is not None and line + condition.end() <= match.start()
            self._assigned[match[1]].append(_Assignment(Value(match[2], match.start(2)), conditional))

    def _around(self, at: int) -> list[Arm]:
        """Return the arms around a place, outermost first."""
        self._budget.step(len(self._arms) // _ARMS_A_STEP)
        return [arm for arm in self._arms if arm.begin <= at < arm.end][::-1]

    def condition(self, at: int) -> Condition:
        """Return whether a place of the text is run; a loop has one turn at least."""
        condition = _ALWAYS
        for arm in self._around(at):
            self._budget.step(len(arm.tests or ()))
            for one in map(self._outcome, arm.tests or ()):
                if one.runs is False:
                    return one
                condition = one if condition.runs else condition
        return condition

    def _outcome(self, test: Test) -> Condition:
        if test not in self._outcomes:
            try:
                self._outcomes[test] = Condition(decided(test, self._word), f"by {named(self._text, test)}")
            except Undecided as unsaid:
                self._outcomes[test] = Condition(None, f"by {named(self._text, test)}", unsaid.variable)
        return self._outcomes[test]

    def _word(self, text: str, at: int) -> str:
        """Return the value of a word of a condition. Raises Undecided."""
        try:
            return self.value(Value(text, at)).text
        except Unsaid as unsaid:
            raise Undecided(unsaid.variable) from None

    def value(self, word: Value, depth: int = 0) -> Value:
        """Return the word with its variables looked up, without quotes; a single variable gives its value's place.

        Raises Unsaid.
        """
        if depth > _DEEPEST:
            raise Unsaid(f"variables refer to variables more than {_DEEPEST} times in a row")
        self._budget.step()
        text, at = word
        self._budget.make(len(text))
        if text[:1] == "'" and len(text) > 1:
            return Value(text.strip("'\""), at + len(text) - len(text.lstrip("'\"")))
        bare = text.strip("'\"")
        whole = _USED.fullmatch(bare)
        if whole is not None:
            return self._meaning(whole, Value(bare, at), depth)
        expanded = _USED.sub(lambda match: self._meaning(match, Value(match[0], at), depth).text, bare)
        self._budget.make(len(expanded))
        return Value(expanded, at + len(text) - len(text.lstrip("'\"")))

    def _meaning(self, match: re.Match[str], word: Value, depth: int) -> Value:
        computed, braced, default, plain, command = match.groups()
        if command is not None:
            raise Unsaid("it comes from a command or an expansion, which Penstock does not run")
        if computed is not None:
            return Value(str(self._computed(computed, word.at, depth)), word.at)
        name = braced or plain
        if name in self._overrides:
            return Value(self._overrides[name], word.at)
        assigned = self._assigned.get(name, ())
        self._budget.step(len(assigned))
        earlier = [
            each
            for each in assigned
            if each.value.at + len(each.value.text) <= word.at and self.condition(each.value.at).runs is not False
        ]
        while earlier and earlier[-1].value.text == word.text:  # PP=${PP:-4} has no value but its default
            earlier.pop()
        if not earlier:
            if default is not None:
                return self.value(Value(default, word.at), depth + 1)
            raise Unsaid(f"${name} is not set above it", name)
        settled = max((i for i, each in enumerate(earlier) if not self._maybe(each)), default=0)
        chosen = earlier[settled]
        for other in earlier[settled + 1 :]:
            if other.value.text != chosen.value.text:
                lines = [place(self._text, each.value.at)[0] for each in (chosen, other)]
                under = self.condition(other.value.at)
                raise Unsaid(
                    f"${name} is {chosen.value.text} in line {lines[0]} and {other.value.text} in line {lines[1]}"
                    + (f" ({under.test})" if under.runs is None else ""),
                    under.variable or name,
                )
        value = self.value(chosen.value, depth + 1)
        return self.value(Value(default, word.at), depth + 1) if not value.text and default is not None else value

    def _maybe(self, one: _Assignment) -> bool:
        at = one.value.at
        return one.conditional or self.condition(at).runs is None or any(arm.tests is None for arm in self._around(at))

    def _computed(self, expression: str, at: int, depth: int) -> int:
        """Compute the whole-number arithmetic of a shell."""
        plain = re.sub(
            r"\$\{[^}\n]*\}|\$?[A-Za-z_]\w*",
            lambda match: self.value(Value("$" + match[0].lstrip("$"), at), depth + 1).text,
            expression,
        )
        try:
            return _calculated(ast.parse(plain.strip(), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            raise Unsaid(f"$(({expression})) is not a whole-number sum, product or quotient") from None


def _calculated(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) < 10**9:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_calculated(node.left), _calculated(node.right))
    raise ValueError
