"""Texts such as ``NAME=VALUE`` of options."""

from __future__ import annotations

import pytest
import typer

from penstock.cli.assignments import assignment

pytestmark = pytest.mark.tier("quick")


def test_a_value_may_be_empty_where_the_option_allows_it() -> None:
    """``--given EXTRA_ARGS=`` says that a script's variable is empty."""
    assert assignment(" PP = 8 ", "--given", "NAME=VALUE") == ("PP", "8")
    assert assignment("environment=A=b", "--set", "KEY=VALUE") == ("environment", "A=b")
    assert assignment("EXTRA_ARGS=", "--given", "NAME=VALUE", may_be_empty=True) == ("EXTRA_ARGS", "")


@pytest.mark.parametrize("text", ["PP", "=8", "PP=", ""])
def test_other_texts_are_refused_with_the_form(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=f"'{text}' is not NAME=VALUE"):
        assignment(text, "--job", "NAME=VALUE")
