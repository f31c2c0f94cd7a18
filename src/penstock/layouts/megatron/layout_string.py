"""Megatron-Core's ``--pipeline-model-parallel-layout``: ``Et*3|(tt|)*29|L``.

``E`` is the embedding, ``t`` a transformer layer, ``m`` multi-token prediction, ``L`` final norm, output layer and
loss. ``|`` ends a stage, and ``*n`` repeats the letter or the group in parentheses before it. Commas have no meaning,
and groups do not nest. Stages are dealt to the pipeline ranks in turn, so more stages than ranks are virtual ones.

.. [1] Megatron-LM, ``core/transformer/pipeline_parallel_layer_layout.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from penstock.convert.layer_roles import Roles
from penstock.importers.lines import Faults
from penstock.layouts.files.positions import place

LETTERS = {"E": "embedding", "t": "transformer layer", "m": "multi-token prediction", "L": "head and loss"}
_Fault = Callable[[int, str], None]
MOST = 100_000
"""The most letters of a layout; more is a slip of a repetition."""


class Letter(NamedTuple):
    """One letter after repetitions are written out, and its place in the text."""

    letter: str
    at: int


def print_layout(stages: Sequence[tuple[int, int]], roles: Roles) -> str:
    """Return the string of stages, by first and last layer; equal neighbours are taken together."""
    texts = []
    for first, last in stages:
        count = min(last, roles.last) - max(first, roles.first) + 1
        letters = ("E" if first < roles.first else "") + _repeated("t", max(0, count))
        if first <= roles.last + roles.mtp and last > roles.last:
            letters += _repeated("m", roles.mtp)
        texts.append(letters + ("L" if last > roles.last + roles.mtp else ""))
    parts = [(text, len(list(group))) for text, group in groupby(texts)]
    written, last_part = "", len(parts) - 1
    for p, (text, count) in enumerate(parts):
        times = count - (1 if p == last_part else 0)
        written += f"({text}|)*{times}" if times > 1 else f"{text}|" * times
        written += text if p == last_part else ""
    return written


def _repeated(letter: str, count: int) -> str:
    return letter * count if count <= 2 else f"{letter}*{count}"


def read_layout(text: str, roles: Roles, whole: str | None = None, offset: int = 0) -> tuple[tuple[int, int], ...]:
    """Return first and last layer of each stage; ``text`` is in ``whole`` from ``offset`` on.

    Raises InvalidDocument with line and column for a text that is no layout, and for a layout of another model.
    """
    faults = Faults(f"the layout {text[:80]!r}")

    def fault(at: int, detail: str) -> None:
        line, column = place(text if whole is None else whole, at if whole is None else offset + at)
        faults.add(line, detail, column=column, code="layout")

    letters = _letters(text, fault)
    faults.stop("letters E, t, m and L, stages ended by |, repetitions *n, such as 'Ettt|(tt|)*4tL'")
    stages = _stages(letters, len(text), roles, fault)
    several = f", {roles.mtp} times m" if roles.mtp else ""
    faults.stop(
        f"E, {roles.number} times t{several}, and L: the profile's layers 0–{roles.first - 1}, "
        f"{roles.first}–{roles.last} and those after"
    )
    return stages


def _letters(text: str, fault: _Fault) -> list[Letter]:
    """Return all letters with their repetitions written out."""
    letters: list[Letter] = []
    at = 0
    while at < len(text):
        items, after = _item(text, at, fault)
        count, at = _count(text, after, fault)
        if len(letters) + len(items) * count > MOST:
            fault(after, f"more than {MOST} letters")
            return letters
        letters += items * count
    return letters


def _item(text: str, at: int, fault: _Fault) -> tuple[list[Letter], int]:
    """Return a letter, or a group, and where it ends."""
    letter = text[at]
    if letter == "(":
        end = text.find(")", at)
        inside = text[at + 1 : end]
        if end < 0 or not inside or "(" in inside or text[end + 1 : end + 2] != "*":
            fault(at, "a group is (letters)*n, and holds no other group")
            return [], len(text) if end < 0 else end + 1
        items: list[Letter] = []
        inner = at + 1
        while inner < end:
            one, after = _item(text, inner, fault)
            count, inner = _count(text, after, fault)
            items += one * min(count, MOST)
            if len(items) > MOST:
                fault(after, f"more than {MOST} letters")
                return [], end + 1
        return items, end + 1
    if letter == ",":
        return [], at + 1
    if letter not in LETTERS and letter != "|":
        alphabet = ", ".join(f"{each} ({what})" for each, what in LETTERS.items())
        fault(at, f"{letter!r} is no letter of a layout; it has {alphabet} and |")
    return [Letter(letter, at)], at + 1


def _count(text: str, at: int, fault: _Fault) -> tuple[int, int]:
    """Return n of ``*n`` after an item, 1 where it is missing, and where it ends."""
    if text[at : at + 1] != "*":
        return 1, at
    end = at + 1
    while end < len(text) and text[end].isascii() and text[end].isdigit():
        end += 1
    digits = text[at + 1 : end]
    if not digits or len(digits) > 6 or int(digits) < 1:
        fault(at, f"a repetition is *n, n from 1 to 999999, not {text[at:end]!r}")
        return 1, end
    return int(digits), end


def _stages(letters: list[Letter], end: int, roles: Roles, fault: _Fault) -> tuple[tuple[int, int], ...]:
    plain = [each for each in letters if each.letter != "|"]
    _check_ends(plain, end, fault)
    _check_numbers(plain, end, roles, fault)
    stages, layer = [], 0
    width = {"E": roles.first, "t": 1, "m": 1, "L": roles.after - roles.mtp}
    for number, (stage_letters, at) in enumerate(_split(letters, end)):
        if not stage_letters:
            fault(at, f"stage {number} is empty; the stages of a plan hold a layer at least")
            continue
        if sum(each.letter == "m" for each in stage_letters) not in (0, roles.mtp):
            fault(at, f"stage {number} holds some of the layers of multi-token prediction; one stage holds them all")
        layers = sum(width.get(each.letter, 0) for each in stage_letters)
        stages.append((layer, layer + layers - 1))
        layer += layers
    return tuple(stages)


def _check_ends(plain: list[Letter], end: int, fault: _Fault) -> None:
    for each in plain[1:]:
        if each.letter == "E":
            fault(each.at, "E, the embedding, is the first letter and occurs once")
    for each in plain[:-1]:
        if each.letter == "L":
            fault(each.at, "L, head and loss, is the last letter and occurs once")
    if not plain or plain[0].letter != "E":
        fault(plain[0].at if plain else 0, "the first letter is E, the embedding")
    if not plain or plain[-1].letter != "L":
        fault(plain[-1].at if plain else end, "the last letter is L, head and loss")
    early = next((i for i, each in enumerate(plain) if each.letter == "m"), len(plain))
    if after := [each for each in plain[early:] if each.letter == "t"]:
        fault(after[0].at, "t comes after m; multi-token prediction comes after all transformer layers")


def _check_numbers(plain: list[Letter], end: int, roles: Roles, fault: _Fault) -> None:
    for letter, what, expected in (("t", "transformer layers", roles.number), ("m", "m", roles.mtp)):
        there = [each for each in plain if each.letter == letter]
        if len(there) != expected:
            at = there[expected].at if len(there) > expected else end
            more = ""
            if letter == "m" and not expected:
                more = "; multi-token prediction is a layer called mtp, between the others and the head"
            fault(at, f"the layout has {len(there)} {what}, the profile {expected or 'none'}{more}")


def _split(letters: list[Letter], end: int) -> Iterator[tuple[list[Letter], int]]:
    """Yield the letters of each stage, and where it ends."""
    stage_letters: list[Letter] = []
    for each in letters:
        if each.letter == "|":
            yield stage_letters, each.at
            stage_letters = []
        else:
            stage_letters.append(each)
    yield stage_letters, end
