"""Tensors inside of what a job returns."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from penstock.executor.runtime.nested import on_tensors

pytestmark = pytest.mark.tier("quick")


class Pair(NamedTuple):
    left: Any
    right: Any


ONE, TWO = torch.tensor(1), torch.tensor(2)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(ONE, TWO, id="a tensor"),
        pytest.param("text", "text", id="no tensor"),
        pytest.param(None, None, id="nothing"),
        pytest.param([ONE, "a"], [TWO, "a"], id="a list"),
        pytest.param((ONE, 3), (TWO, 3), id="a tuple"),
        pytest.param(Pair(ONE, [ONE]), Pair(TWO, [TWO]), id="a named tuple stays one"),
        pytest.param({"x": (ONE, {"y": ONE})}, {"x": (TWO, {"y": TWO})}, id="mappings in each other"),
        pytest.param(OrderedDict(x=ONE), {"x": TWO}, id="another mapping"),
    ],
)
def test_tensors_are_replaced_in_their_places(value: Any, expected: Any) -> None:
    def double(tensor: Tensor) -> Tensor:
        return tensor * 2

    result = on_tensors(double, value)
    assert type(result) is type(expected)
    assert str(result) == str(expected)
