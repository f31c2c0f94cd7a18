"""The optimizers that a GPU's runtime runs in one kernel: torch's, where the job leaves it open."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop

from penstock.executor.runtime.cuda import CudaRuntime


class Counting(Adam):
    """A subclass whose step is its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Named(Adam):
    """A subclass that steps as torch's does."""


@pytest.mark.parametrize(
    ("make", "fused"),
    [
        pytest.param(Adam, True, id="Adam"),
        pytest.param(AdamW, True, id="AdamW"),
        pytest.param(partial(SGD, lr=0.1), True, id="SGD"),
        pytest.param(Named, True, id="a subclass with torch's step"),
        pytest.param(Counting, None, id="a subclass with a step of its own"),
        pytest.param(partial(Adam, foreach=True), None, id="foreach chosen"),
        pytest.param(partial(Adam, foreach=False), None, id="foreach declined"),
        pytest.param(partial(Adam, fused=False), False, id="fused declined"),
        pytest.param(partial(Adam, differentiable=True), None, id="differentiable"),
        pytest.param(partial(RMSprop), "none", id="without a fused form"),
    ],
)
def test_torchs_own_are_fused_where_the_job_leaves_it_open(make: Any, fused: Any) -> None:
    optimizer = make([nn.Parameter(torch.zeros(2))])
    CudaRuntime.prepare(None, optimizer)  # type: ignore[arg-type]
    assert [group.get("fused", "none") for group in optimizer.param_groups] == [fused]


def test_each_group_is_looked_at_alone() -> None:
    groups: list[dict[str, Any]] = [
        {"params": [nn.Parameter(torch.zeros(2))]},
        {"params": [nn.Parameter(torch.zeros(2))], "foreach": True},
        {"params": [nn.Parameter(torch.zeros(2, dtype=torch.complex64))]},
    ]
    optimizer = Adam(groups)
    CudaRuntime.prepare(None, optimizer)  # type: ignore[arg-type]
    assert [group["fused"] for group in optimizer.param_groups] == [True, None, None]
