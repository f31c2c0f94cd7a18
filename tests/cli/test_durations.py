"""Durations on the command line."""

from __future__ import annotations

import pytest
import typer

from penstock.cli.durations import between, duration_ns, seconds
from penstock.cli.service.keys import seconds_of

pytestmark = pytest.mark.tier("quick")

S = 10**9


@pytest.mark.parametrize(
    ("text", "time_ns"),
    [
        ("0", 0),
        ("90", 90 * S),
        ("2.5", 5 * S // 2),
        ("10s", 10 * S),
        ("10 s", 10 * S),
        ("800ms", 800 * 10**6),
        ("5min", 300 * S),
        ("30m", 1800 * S),
        ("1h30min", 5400 * S),
        ("1h 30min 5s", 5405 * S),
        ("2d", 2 * 86400 * S),
        ("365d", 365 * 86400 * S),
        ("1.5d", 36 * 3600 * S),
    ],
)
def test_forms(text: str, time_ns: int) -> None:
    assert duration_ns(text) == time_ns


@pytest.mark.parametrize("text", ["", "s", "-1", "1w", "1h30", "ten", "1,5s", "5 min later", "1e9", "9" * 10])
def test_what_is_none_names_the_forms(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a duration; write 90"):
        duration_ns(text)


def test_bounds_and_defaults() -> None:
    parse = between("1s", "1h")
    assert parse("60min") == 3600 * S
    assert parse(5 * S) == 5 * S
    with pytest.raises(typer.BadParameter, match="not between 1s and 1h"):
        parse("61min")
    assert seconds(parse("1500ms")) == 1.5


def test_of_keys() -> None:
    assert seconds_of("never", "--expires") is None
    assert seconds_of("90d", "--expires") == 90 * 86400
    with pytest.raises(typer.BadParameter, match="or never"):
        seconds_of("90x", "--expires")
    with pytest.raises(typer.BadParameter, match="a hundred years"):
        seconds_of("40000d", "--expires")
