"""Long runs of a pattern as a loop: a short run is lowered and checked, and its steady state is repeated.

Operations of a pattern follow each other in the same order in every period. The instructions between two operations
depend on these operations, on the steps so far and on the latest versions, so they repeat as well once the pipeline is
full. A run of c more global batches has one more repetition of the same body, where c is the number of global batches
after which the pattern, the row classes and all turns of replicas repeat.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from penstock.schemas.program import UNSHIFTED, WORDS, Instruction, Program
from penstock.solvers.lowering.rank_parts import own_micro_batches
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.schedule import Pattern
from penstock.solvers.model.unroll import depth, whole_rounds

_FORWARD = WORDS.index("F")
_STAYS = np.asarray([word in UNSHIFTED for word in WORDS])


class Length(NamedTuple):
    """Global batches of a whole run, of the ``short`` run that is lowered, of its ``body``, and until it is steady."""

    batches: int
    short: int
    body: int
    full: int


def length(allocation: Allocation, pattern: Pattern, batches: int) -> Length:
    """Return the shortest run that has all parts: filling, at least three repetitions, and draining."""
    body, full = whole_rounds(allocation, pattern), depth(allocation, pattern) + 2
    enough = 2 * full + 3 * body
    return Length(batches, min(batches, enough + (batches - enough) % body), body, full)


def folded(program: Program, codes: np.ndarray, span: Length) -> Program:
    """Return a rank's program of ``span.batches`` global batches, from the instructions (n, 4) of ``span.short``."""
    missing = (span.batches - span.short) // span.body
    if missing == 0:
        return replace(program, batches=span.batches, prologue=_instructions(codes))
    shift = span.body * program.num_micro_batches
    begin, size, times = _steady(program, codes, span, shift)
    ahead = missing * shift
    rest = begin + times * size
    return replace(
        program,
        batches=span.batches,
        prologue=_instructions(codes[:begin]),
        body=_instructions(codes[begin : begin + size]),
        repeat=times + missing,
        body_batches=span.body,
        epilogue=_instructions(_ahead(codes[rest:], ahead)),
    )


def _steady(program: Program, codes: np.ndarray, span: Length, shift: int) -> tuple[int, int, int]:
    """Return where the body begins, its length, and how often it is repeated.

    The body goes from the first forward after the pipeline is full to the same forward ``shift`` micro-batches later.
    """
    stage = program.stages[0]
    numbers = own_micro_batches(program, stage)
    full = span.full * program.num_micro_batches
    m = next(each for each in numbers if each >= full)
    forwards = (codes[:, 0] == _FORWARD) & (codes[:, 1] == stage.stage)
    begin, end = (int(np.flatnonzero(forwards & (codes[:, 2] == each))[0]) for each in (m, m + shift))
    size = end - begin
    times = 1
    while np.array_equal(
        codes[begin + times * size : begin + (times + 1) * size], _ahead(codes[begin:end], times * shift)
    ):
        times += 1
    assert times > 1, f"rank {program.rank} does not repeat its operations every {span.body} global batches"
    return begin, size, times


def _ahead(codes: np.ndarray, micro_batches: int) -> np.ndarray:
    later = codes.copy()
    later[~_STAYS[codes[:, 0]], 2] += micro_batches
    return later


def _instructions(codes: np.ndarray) -> tuple[Instruction, ...]:
    return tuple(Instruction(WORDS[w], s, m, c) for w, s, m, c in codes.tolist())
