"""The branches of a shell script: the parts of it that run, where the text decides their conditions.

The reader follows ``if``, ``elif``, ``else`` with the tests ``[ … ]``, ``[[ … ]]``, ``(( … ))`` of texts and whole
numbers, ``!``, ``&&`` and ``||``, and ``case``. Loops, tests of files and commands are not decided; nothing is run.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import NamedTuple

from penstock.layouts.files.positions import place

_BEGIN = r"(?:^|(?<=[;&|({\n]))[ \t]*(?:(?:then|else|do)[ \t]+)?"
_TOKEN = re.compile(
    rf"{_BEGIN}(?:(?P<open>if|elif)\b(?P<test>[^\n]{{1,300}}?)(?:;|\n)\s*then\b|(?P<else>else)\b|(?P<close>fi|done|esac)\b"
    r"|(?P<loop>for|while|until)\b|case[ \t]+(?P<word>[^\n]{1,200}?)[ \t]+in\b)"
    r"|(?:^|(?<=;;)|(?<=\sin))[ \t]*\(?(?P<pattern>[^\s()\n;&|$`=#-][^()\n;&`=]{0,200}?)\)|(?P<end>;;)",
    re.MULTILINE,
)
_WORD = re.compile(r"\"[^\"\n]*\"|'[^'\n]*'|\$\{[^}\n]{0,500}\}|\$\(\([^\n]{0,200}?\)\)|&&|\|\||[^\s&|]+")
_MOST_ARMS = 2_000
_OPENED, _CLOSED = ("[", "[["), ("]", "]]")
_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_SIGN = re.compile(r"(?<=.)(==|!=|>=|<=|>|<)(?=.)")


class Undecided(Exception):
    """A test that the text does not decide; ``variable`` names the variable that would decide it, if there is one."""

    def __init__(self, variable: str = "") -> None:
        super().__init__(variable)
        self.variable = variable


class Test(NamedTuple):
    """A condition, or a word and the patterns of a ``case``; ``holds`` is the outcome with which the arm runs."""

    text: str
    at: int
    holds: bool
    patterns: tuple[str, ...] | None = None


class Arm(NamedTuple):
    """A part of the text that runs where all tests have their outcomes; ``tests`` is None for a loop.

    The turns of a loop are not known.
    """

    begin: int
    end: int
    tests: tuple[Test, ...] | None


class _Open(NamedTuple):
    """A construct without its end; ``test`` is the test of the current arm, ``before`` has the tests that failed."""

    kind: str
    begin: int
    test: Test | None
    before: tuple[Test, ...]


def arms_of(text: str) -> list[Arm]:
    """Return the arms of a text without its comments, inner ones first.

    The list is empty where constructs do not close each other.
    """
    arms: list[Arm] = []
    stack: list[_Open] = []
    for match in _TOKEN.finditer(text):
        if match["open"] == "if":
            stack.append(_Open("fi", match.end(), _test(match), ()))
        elif match["loop"]:
            stack.append(_Open("done", match.end(), None, ()))
        elif match["word"]:
            stack.append(_Open("esac", match.end(), Test(match["word"], match.start("word"), True, ()), ()))
        elif match["close"]:
            if not stack or stack[-1].kind != match["close"]:
                return []
            arms += _closed(stack.pop(), match.start())
        elif stack:
            _turn(stack, match, arms)
    return arms if not stack and len(arms) <= _MOST_ARMS else []


def _test(match: re.Match[str]) -> Test:
    return Test(match["test"].strip(), match.start("test"), True)


def _closed(one: _Open, end: int) -> list[Arm]:
    """Return the last arm of a construct; in a ``case`` the part after the last ``;;`` is no arm."""
    if one.kind == "done":
        return [Arm(one.begin, end, None)]
    if one.kind == "esac" and (one.test is None or not one.test.patterns):
        return []
    return [Arm(one.begin, end, (*one.before, *([one.test] if one.test else [])))]


def _turn(stack: list[_Open], match: re.Match[str], arms: list[Arm]) -> None:
    """Start the next arm of the innermost construct."""
    one = stack[-1]
    if one.kind == "fi" and (match["open"] or match["else"]):
        arms += _closed(one, match.start())
        failed = (*one.before, *([one.test._replace(holds=False)] if one.test else []))
        stack[-1] = _Open("fi", match.end(), _test(match) if match["open"] else None, failed)
    elif one.kind == "esac" and match["pattern"] and one.test is not None and not one.test.patterns:
        patterns = tuple(each.strip().strip("'\"") for each in match["pattern"].split("|"))
        stack[-1] = one._replace(begin=match.end(), test=one.test._replace(patterns=patterns))
    elif one.kind == "esac" and match["end"] and one.test is not None and one.test.patterns:
        arms += _closed(one, match.start())
        failed = (*one.before, one.test._replace(holds=False))
        stack[-1] = _Open("esac", match.end(), one.test._replace(patterns=()), failed)


def decided(test: Test, value: Callable[[str, int], str]) -> bool:
    """Return whether a test has its required outcome; ``value`` looks up a word at a place. Raises Undecided."""
    if test.patterns is not None:
        word = value(test.text, test.at)
        return any(fnmatchcase(word, pattern) for pattern in test.patterns) == test.holds
    return _any(test.text, test.at, value) == test.holds


def _any(text: str, at: int, value: Callable[[str, int], str]) -> bool:
    """Evaluate tests joined by ``||`` and ``&&``, which a shell takes from left to right."""
    if text.startswith("((") and text.endswith("))") and (sign := _SIGN.search(text, 2, len(text) - 2)):
        sides = text[2 : sign.start()].strip(), text[sign.end() : -2].strip()
        return _NUMBERS[sign[1]](*(_number(value(f"$(({each}))", at)) for each in sides))
    words = [word for word in _WORD.findall(text) if word not in (*_OPENED, *_CLOSED)]
    if not text.lstrip("! ").startswith(_OPENED):
        raise Undecided
    outcome, joined, clause = True, "&&", list[str]()
    for word in [*words, "&&"]:
        if word not in ("&&", "||"):
            clause.append(word)
            continue
        if outcome == (joined == "&&"):
            outcome = _one(clause, at, value)
        joined, clause = word, []
    return outcome


def _one(words: list[str], at: int, value: Callable[[str, int], str]) -> bool:
    match words:
        case ["!", *rest]:
            return not _one(rest, at, value)
        case ["-z", word]:
            return not value(word, at)
        case ["-n", word] | [word]:
            return bool(value(word, at))
        case [left, "=" | "==" | "!=" as sign, right]:
            left_value, right_value = value(left, at), value(right, at)
            same = (
                fnmatchcase(left_value, right_value)
                if "*" in right and right[0] not in "'\""
                else left_value == right_value
            )
            return same == (sign != "!=")
        case [left, sign, right] if sign in _NUMBERS and sign.startswith("-"):
            return _NUMBERS[sign](_number(value(left, at)), _number(value(right, at)))
        case _:
            raise Undecided


def _number(word: str) -> int:
    if re.fullmatch(r"-?\d{1,12}", word.strip()) is None:
        raise Undecided
    return int(word)


def named(text: str, test: Test) -> str:
    """Name a test with its line."""
    shown = f"case {test.text}" if test.patterns is not None else test.text
    return f"{shown}, line {place(text, test.at)[0]}"
