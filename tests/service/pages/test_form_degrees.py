"""Degrees as the form takes them, and as it shows a request's degrees."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.service.pages.form import FIELDS

pytestmark = pytest.mark.tier("quick")

FIELD = next(field for field in FIELDS if field.name == "degrees")


@pytest.mark.parametrize(
    ("typed", "degrees"),
    [
        ("auto", "auto"),
        ("8", [{"tensor": 8}]),
        ("1, 2,4", [{"tensor": 1}, {"tensor": 2}, {"tensor": 4}]),
        ("tensor=2 expert=8", [{"tensor": 2, "expert": 8}]),
        (
            "tensor=2 expert=8; expert=8 expert_tensor=2",
            [{"tensor": 2, "expert": 8}, {"expert": 8, "expert_tensor": 2}],
        ),
    ],
)
def test_what_is_typed_is_shown_again(typed: str, degrees: Any) -> None:
    assert FIELD.read(typed) == degrees
    shown = FIELD.write(degrees)
    assert FIELD.read(shown) == degrees
    assert shown.replace(" ", "") == typed.replace(" ", "")


def test_a_single_entry_and_degrees_of_one_are_shown() -> None:
    assert FIELD.write({"tensor": 4, "context": 1, "expert": 1, "expert_tensor": 1}) == "4"
    assert FIELD.write([{}, {"context": 2}]) == "tensor=1; context=2"
