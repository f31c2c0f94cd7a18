"""The branches of a shell script: which parts of it run, as far as their conditions can be decided from the text.

Followed are ``if``, ``elif``, ``else`` with the tests ``[ … ]``, ``[[ … ]]``, ``(( … ))`` of texts and whole numbers,
``!``, ``&&`` and ``||``, and ``case``. Loops, tests of files and commands are not decided; nothing is run.
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
    """A test that the text does not decide. ``variable``: the one that would, where that is the reason."""

    def __init__(self, variable: str = "") -> None:
        super().__init__(variable)
        self.variable = variable


class Test(NamedTuple):
    """A condition, or a word and the patterns of a ``case``; ``holds``: what it must be for the arm to run."""

    text: str
    at: int
    holds: bool
    patterns: tuple[str, ...] | None = None


class Arm(NamedTuple):
    """A part of the text that runs where all tests are as they must be; of a loop, whose turns are not known, None."""

    begin: int
    end: int
    tests: tuple[Test, ...] | None


class _Open(NamedTuple):
    """A construct whose end is still to come; ``said``: the test of the arm at hand, ``before``: those that failed."""

    kind: str
    begin: int
    said: Test | None
    before: tuple[Test, ...]


def arms_of(text: str) -> list[Arm]:
    """The arms of a text without its comments, inner ones first; none where constructs do not close each other."""
    found: list[Arm] = []
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
            found += _closed(stack.pop(), match.start())
        elif stack:
            _turn(stack, match, found)
    return found if not stack and len(found) <= _MOST_ARMS else []


def _test(match: re.Match[str]) -> Test:
    return Test(match["test"].strip(), match.start("test"), True)


def _closed(one: _Open, end: int) -> list[Arm]:
    """The last arm of a construct; of a ``case`` the part after its last ``;;`` is none."""
    if one.kind == "done":
        return [Arm(one.begin, end, None)]
    if one.kind == "esac" and (one.said is None or not one.said.patterns):
        return []
    return [Arm(one.begin, end, (*one.before, *([one.said] if one.said else [])))]


def _turn(stack: list[_Open], match: re.Match[str], found: list[Arm]) -> None:
    """The next arm of the innermost construct."""
    one = stack[-1]
    if one.kind == "fi" and (match["open"] or match["else"]):
        found += _closed(one, match.start())
        failed = (*one.before, *([one.said._replace(holds=False)] if one.said else []))
        stack[-1] = _Open("fi", match.end(), _test(match) if match["open"] else None, failed)
    elif one.kind == "esac" and match["pattern"] and one.said is not None and not one.said.patterns:
        patterns = tuple(each.strip().strip("'\"") for each in match["pattern"].split("|"))
        stack[-1] = one._replace(begin=match.end(), said=one.said._replace(patterns=patterns))
    elif one.kind == "esac" and match["end"] and one.said is not None and one.said.patterns:
        found += _closed(one, match.start())
        failed = (*one.before, one.said._replace(holds=False))
        stack[-1] = _Open("esac", match.end(), one.said._replace(patterns=()), failed)


def decided(test: Test, value: Callable[[str, int], str]) -> bool:
    """Whether a test comes out as it must; ``value`` looks up a word at a place. Raises Undecided."""
    if test.patterns is not None:
        word = value(test.text, test.at)
        return any(fnmatchcase(word, pattern) for pattern in test.patterns) == test.holds
    return _any(test.text, test.at, value) == test.holds


def _any(text: str, at: int, value: Callable[[str, int], str]) -> bool:
    """Tests joined by ``||`` and ``&&``, which a shell takes from left to right."""
    if text.startswith("((") and text.endswith("))") and (sign := _SIGN.search(text, 2, len(text) - 2)):
        sides = text[2 : sign.start()].strip(), text[sign.end() : -2].strip()
        return _NUMBERS[sign[1]](*(_number(value(f"$(({each}))", at)) for each in sides))
    words = [word for word in _WORD.findall(text) if word not in (*_OPENED, *_CLOSED)]
    if not text.lstrip("! ").startswith(_OPENED):
        raise Undecided
    outcome, joined, own = True, "&&", list[str]()
    for word in [*words, "&&"]:
        if word not in ("&&", "||"):
            own.append(word)
            continue
        if outcome == (joined == "&&"):
            outcome = _one(own, at, value)
        joined, own = word, []
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
            said, wanted = value(left, at), value(right, at)
            same = fnmatchcase(said, wanted) if "*" in right and right[0] not in "'\"" else said == wanted
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
    """A test with its line, to be named."""
    said = f"case {test.text}" if test.patterns is not None else test.text
    return f"{said}, line {place(text, test.at)[0]}"
