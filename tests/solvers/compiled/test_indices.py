"""Kernels of modules that promise valid indices are compiled without a check for negative ones, others with."""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np
import pytest

from penstock.solvers.compiled import indices


def _kernels() -> list[Callable[[np.ndarray, int], int]]:
    """Return a read, a read at two indices, and a write with its read, at an index counted from any end."""

    def read(array: np.ndarray, i: int) -> int:
        return int(array[i])

    def read_at(array: np.ndarray, i: int) -> int:
        return int(array.reshape(2, 2)[i, i])

    def write(array: np.ndarray, i: int) -> int:
        array[i] = 7
        return int(array[3])

    return [numba.njit(boundscheck=True)(each) for each in (read, read_at, write)]


@pytest.fixture
def promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indices, "_promised", set())
    indices.never_negative(__name__)


@pytest.mark.usefixtures("promised")
def test_a_promise_that_is_broken_is_out_of_bounds() -> None:
    for kernel, expected in zip(_kernels(), (1, 3, 3), strict=True):
        assert kernel(np.arange(4), 1) == expected
        with pytest.raises(IndexError):
            kernel(np.arange(4), -1)


def test_without_a_promise_indices_may_count_from_the_end() -> None:
    read, read_at, write = _kernels()
    assert read(np.arange(4), -1) == 3
    assert read_at(np.arange(4), -1) == 3
    assert write(np.zeros(4, dtype=np.int64), -1) == 7
