"""Arguments that kernels receive by address, parts that only kernels can call, and the event clock's reset state."""

from __future__ import annotations

import random
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
from random_plans import random_allocation, random_orders, random_problem

from penstock.solvers.compiled.decorators import compiled, inner
from penstock.solvers.compiled.fields import Fields
from penstock.solvers.judge.clocks.events import run_events
from penstock.solvers.judge.clocks.state import restore
from penstock.solvers.judge.lanes import make_lanes, new_state
from penstock.solvers.judge.operation_tables import cost_tables


@Fields.register
class Mixed(NamedTuple):
    """A field of each kind, words and less than words, arrays in between."""

    number: int
    values: np.ndarray
    flag: bool
    pair: tuple[int, int]
    grid: np.ndarray
    real: float


@inner
def _half(value: int) -> int:
    return value // 2


@compiled
def _read(mixed: Any) -> tuple[int, int, bool, int, int, float]:
    mixed.values[0] += 1
    last = mixed.grid[mixed.grid.shape[0] - 1, mixed.grid.shape[1] - 1]
    return _half(mixed.number), mixed.values.sum(), mixed.flag, mixed.pair[1], last, mixed.real


@compiled
def _values(mixed: Any) -> np.ndarray:
    return mixed.values


def _mixed() -> Mixed:
    grid = np.arange(24, dtype=np.int32).reshape(4, 6)[::2, 1:4]
    return Mixed(9, np.arange(5, dtype=np.int64), True, (3, 4), grid, 2.5)


def test_a_kernel_reads_every_field_and_writes_into_arrays():
    mixed = _mixed()
    assert _read(mixed) == (4, 11, True, 4, 15, 2.5)
    assert mixed.values[0] == 1


def test_a_field_is_returned_as_the_array_that_it_is_and_no_reference_is_kept():
    mixed = _mixed()
    before = sys.getrefcount(mixed.values), sys.getrefcount(mixed.grid)
    assert _values(mixed) is mixed.values
    for _ in range(10):
        _read(mixed)
        _values(mixed)
    assert (sys.getrefcount(mixed.values), sys.getrefcount(mixed.grid)) == before


def test_a_part_of_kernels_is_not_called_from_python():
    with pytest.raises(TypeError, match="_half is a part of kernels"):
        _half(4)
    assert _read(_mixed())[0] == 4
    with pytest.raises(TypeError, match="_half is a part of kernels"):
        _half(4)


@pytest.mark.parametrize("seed", range(5))
def test_a_state_that_is_set_back_runs_as_a_new_one(seed: int):
    rng = random.Random(seed)
    problem = random_problem(rng)
    plan = random_allocation(rng, problem)
    tables = cost_tables(problem, plan, problem.rules.overlap_all_reduce)
    lanes = make_lanes(tables, random_orders(rng, plan))
    inputs = tables.flows, tables.chains, tables.ties, lanes.arrays
    state = new_state(*inputs)
    words = state.words.copy()
    run_events(*inputs, state)
    first = [state.position.copy(), state.time.copy(), state.start.copy(), state.sent.copy(), state.bucket_start.copy()]
    restore(state, words)
    assert (state.position == lanes.arrays.lane_start[:-1]).all()
    run_events(*inputs, state)
    again = [state.position, state.time, state.start, state.sent, state.bucket_start]
    assert all(np.array_equal(*each) for each in zip(first, again, strict=True))
