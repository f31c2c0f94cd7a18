"""Interpreted kernels answer as compiled ones do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import interpreted_answers
import numpy as np
import pytest

from penstock.solvers.compiled.interpreted import interpret, interpreted


class Both(NamedTuple):
    """A small array and a number."""

    values: np.ndarray
    number: int


@interpreted
def _shifted(both: Both, pair: tuple[np.ndarray, int]) -> tuple[int, np.ndarray]:
    pair[0][0] = both.values[1]
    return (both.values[0] << 40) + both.number, both.values[1:]


@pytest.mark.tier("nightly")
def test_they_answer_as_compiled_ones() -> None:
    places = [str(room) for room in islice(Path(interpreted_answers.__file__).parents, 3)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*places, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-W", "error", "-m", "interpreted_answers"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    theirs, ours = json.loads(done.stdout), interpreted_answers.answers()
    assert set(theirs) == {*map(str, interpreted_answers.SEEDS), *interpreted_answers.PLANNERS}
    assert {name: pair for name in ours if (pair := (theirs[name], ours[name]))[0] != pair[1]} == {}


def test_elements_of_32_bits_do_not_overflow_and_arrays_are_the_callers() -> None:
    values, zeros = np.array([3, 4], dtype=np.int32), np.zeros(2, dtype=np.int64)
    number, rest = _shifted(Both(values, 1), (zeros, 0))
    assert number == (3 << 40) + 1
    assert type(rest) is np.ndarray
    assert np.shares_memory(rest, values)
    assert zeros.tolist() == [4, 0]


def test_kernels_that_were_decorated_are_not_interpreted_afterwards() -> None:
    with pytest.raises(AssertionError, match="decorated already"):
        interpret()
