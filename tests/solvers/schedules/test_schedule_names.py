"""Requests for schedules by names of papers and trainers get our name; misspelt names get the nearest."""

from __future__ import annotations

import pytest

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.planners.catalogue import PLANNERS
from penstock.solvers.schedules.catalogue import SCHEDULES
from penstock.solvers.schedules.names import CALLED_ELSEWHERE, remedy_for


@pytest.mark.tier("ci")
@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("1f1b", "did you mean 'early-backward'? It is what 1f1b is called here"),
        ("1F1B", "did you mean 'early-backward'? It is what 1F1B is called here"),
        ("Interleaved-1F1B", "did you mean 'interleaved'? It is what Interleaved-1F1B is called here"),
        ("ZBVZeroBubble", "did you mean 'zb-v'? It is what ZBVZeroBubble is called here"),
        ("gpip", "did you mean 'gpipe'?"),
        ("GPipe", "did you mean 'gpipe'?"),
        ("xyzzy", None),
    ],
)
def test_other_names_are_told_ours(name: str, remedy: str | None) -> None:
    assert remedy_for(name, SCHEDULES) == remedy
    with pytest.raises(UnsupportedRequest) as refused:
        PLANNERS["auto"].check(frozenset({"synchronous"}), name, {})
    assert refused.value.remedy == remedy


def test_every_other_name_leads_to_a_schedule_and_hides_none() -> None:
    assert set(CALLED_ELSEWHERE.values()) <= SCHEDULES.keys()
    ours = {"".join(letter for letter in name if letter.isalnum()): name for name in SCHEDULES}
    assert all(ours.get(other, name) == name for other, name in CALLED_ELSEWHERE.items())
    assert len(CALLED_ELSEWHERE) > 10
