"""Predicted against measured time: in percent, by a factor, or not at all, with the reason beside it."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.calibration.comparing import compared
from penstock.facts.device_table import is_other_hardware
from penstock.schemas.trace import Hardware, alike

pytestmark = pytest.mark.tier("quick")

S = 10**9


def hardware(**more: Any) -> Hardware:
    """Return the hardware of one of two ranks on an idle machine of two cores."""
    facts = {"kind": "cpu", "model": "Xeon", "planned_kind": "cpu", "ranks": 2, "cores": 2, "machine_cores": 2}
    loads = {"load_at_start": 0.0, "load_at_end": 1.5, "cpu_ns": 8 * S, "wall_ns": 10 * S}
    return Hardware.model_validate(facts | loads | more)


@pytest.mark.parametrize(
    ("measured_s", "ranks", "lines"),
    [
        pytest.param(
            2.5,
            [hardware()],
            ["measured   2.50 s per global batch", "predicted  2.00 s, -20.0 % against it"],
            id="near",
        ),
        pytest.param(
            2.5, [], ["measured   2.50 s per global batch", "predicted  2.00 s, -20.0 % against it"], id="not recorded"
        ),
        pytest.param(7.4, [hardware()], ["measured   7.40 s per global batch, 3.7× the predicted 2.00 s"], id="far"),
        pytest.param(0.5, [hardware()], ["measured   500 ms per global batch, 0.25× the predicted 2.00 s"], id="quick"),
        pytest.param(
            7.4,
            [hardware(), hardware(ranks=4, cpu_ns=4 * S)],
            [
                "measured   7.40 s per global batch, 3.7× the predicted 2.00 s",
                "note       measured on a busy machine: 4 ranks shared 2 cores, a rank had 40% of one",
            ],
            id="more ranks than cores",
        ),
        pytest.param(
            2.5,
            [hardware(load_at_start=24.0)],
            [
                "measured   2.50 s per global batch",
                "predicted  2.00 s, -20.0 % against it",
                "note       measured on a busy machine: the load was 24.0 on 2 cores",
            ],
            id="loaded",
        ),
        pytest.param(
            7.4,
            [hardware(), hardware(planned_kind="A100", ranks=4)],
            [
                "measured   7.40 s per global batch",
                "predicted  2.00 s",
                "note       ranks computed on cpu (Xeon), and the plan is for A100: the two times cannot be compared",
            ],
            id="other hardware",
        ),
    ],
)
def test_a_comparison_says_what_it_is_worth(measured_s: float, ranks: list[Hardware], lines: list[str]) -> None:
    comparison = compared(2 * S, measured_s * S, ranks)
    assert comparison.lines() == lines
    shown = [value for _, value in comparison.figures()]
    assert all(part in "\n".join(lines) for value in shown for part in value.split(", "))
    assert ("%" in "".join(shown)) == any("% against it" in line for line in lines)


@pytest.mark.parametrize(
    ("planned", "kind", "other"),
    [
        ("cpu", "cpu", False),
        ("A100", "cpu", True),
        ("A100", "H100", True),
        ("cpu", "H100", True),
        ("8xH100-tp8", "H100", False),
        ("8xH100-tp8", "cpu", True),
        ("GB200", "B200", True),
        ("laptop", "cpu", False),
        ("laptop", "RTX4090", False),
    ],
)
def test_hardware_is_another_where_that_is_certain(planned: str, kind: str, other: bool) -> None:
    assert is_other_hardware(planned, kind) == other


def test_ranks_on_alike_machines_are_one_entry() -> None:
    whole, other = alike([hardware(load_at_end=3.0), hardware(cpu_ns=S), hardware(model="EPYC")])
    assert (whole.load_at_end, whole.cpu_ns, whole.wall_ns) == (3.0, 9 * S, 20 * S)
    assert other == hardware(model="EPYC")
