"""The effect of a step of elastic averaging on weights, and its memory meanwhile."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from penstock.executor.profiling.memory_use import LiveBytes
from penstock.executor.stage.averaging import Averaging, flattened

SIZES = ((40, 30), (50,), (7, 7))


def test_a_step_keeps_its_update_and_holds_no_other_copy() -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(size)) for size in SIZES]
    old = [one.detach().clone() for one in parameters]
    reference, change = ([torch.randn(size) for size in SIZES] for _ in range(2))
    bucket = SimpleNamespace(parameters=parameters, pulled=flattened(reference), pushed=[])
    bucket.push = bucket.pushed.append
    averaging = Averaging({0: bucket}, pipelines=4, staleness=0)

    def update() -> None:
        for parameter, by in zip(parameters, change, strict=True):
            parameter.add_(by)

    with LiveBytes() as live:
        averaging.step(update)
        kept = live.held_bytes()
        averaging.push(0)
    size = sum(one.nbytes for one in parameters)
    assert kept == 2 * size, "weights and update"
    assert live.bytes == 3 * size, "and what was pulled"
    assert bucket.pulled is None
    news = [x + by for x, by in zip(old, change, strict=True)]
    for parameter, x, new, average in zip(parameters, old, news, reference, strict=True):
        assert torch.equal(parameter.detach(), new + (average - x) * 0.25)
    (delta,) = bucket.pushed[0]
    assert torch.equal(delta, torch.cat([(new - x).reshape(-1) for new, x in zip(news, old, strict=True)]))
