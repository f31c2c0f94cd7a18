"""Options for the device's way of stepping stay the resuming run's, and single numbers are put in their place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam

from penstock.executor.checkpoints.checkpoint_state import _placed, _set_options

DEVICE = torch.device("meta")
"""The device of the parameters, which is not the host, as on a GPU."""


def adam(**options: Any) -> tuple[Adam, nn.Parameter]:
    """Create an optimizer whose group has these options, as if its parameter were on a GPU."""
    parameter = nn.Parameter(torch.zeros(2, device=DEVICE))
    optimizer = Adam([parameter], lr=0.1)
    optimizer.param_groups[0].update(options)
    return optimizer, parameter


@pytest.mark.parametrize(
    "expected",
    [
        {"foreach": None, "fused": True, "capturable": False},
        {"foreach": True, "fused": None, "capturable": False},
        {"foreach": None, "fused": None, "capturable": True},
    ],
)
def test_how_a_device_steps_is_not_read(expected: dict[str, Any]) -> None:
    optimizer, parameter = adam(**expected)
    options = {"lr": 0.025, "betas": (0.8, 0.9), "foreach": False, "fused": False, "capturable": "of the other run"}
    _set_options(optimizer, "layer.weight", parameter, {"optimizer": "Adam", "options": options})
    (group,) = optimizer.param_groups
    assert {name: group[name] for name in expected} == expected
    assert (group["lr"], group["betas"]) == (0.025, (0.8, 0.9)), "what bears on the numbers is read"


@pytest.mark.parametrize(
    ("options", "place"),
    [
        pytest.param({}, "cpu", id="one by one, or together"),
        pytest.param({"fused": True}, "meta", id="fused"),
        pytest.param({"capturable": True}, "meta", id="capturable"),
        pytest.param({"fused": False, "foreach": True}, "cpu", id="together"),
    ],
)
def test_single_numbers_lie_where_the_optimizer_looks_for_them(options: dict[str, Any], place: str) -> None:
    optimizer, parameter = adam(**options)
    states = {"step": torch.tensor(7.0), "exp_avg": torch.zeros(2, device=DEVICE), "text": "as it is"}
    placed = _placed(optimizer, parameter, states)
    assert placed["step"].device.type == place
    assert placed["exp_avg"] is states["exp_avg"]
    assert placed["text"] == "as it is"
