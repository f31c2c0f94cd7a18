"""Progress: a line that is replaced on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import pytest

from penstock.cli import show
from penstock.cli.main import main
from penstock.cli.show import Screen


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time; its last item is now."""
    now = [100.0]
    monkeypatch.setattr(show, "monotonic", lambda: now[-1])
    return now


def test_off_a_terminal_a_line_comes_every_few_seconds(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen.of()
    for passed in range(11):
        clock.append(100.0 + passed)
        screen.progress(f"plan {passed}")
    screen.done()
    said = capsys.readouterr()
    assert said.err.splitlines() == ["penstock: 4.0 s: plan 4", "penstock: 8.0 s: plan 8"]
    assert said.out == ""


def test_on_a_terminal_a_line_replaces_the_last(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen.of()
    screen.live = True
    screen.progress("one")
    clock.append(101.5)
    screen.progress("two")
    screen.done()
    assert capsys.readouterr().err == "\r\x1b[2K0.0 s: one\r\x1b[2K1.5 s: two\r\x1b[2K"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["plan", "--planner", "auto", "-b", "8"], ("by ", "bound ", "gap ")),
        (["compare", "--planner", "dp", "-b", "8"], ("dp with ", "best ", "bound ")),
        (["place", "--planner", "dp", "-b", "8"], ("classes of sets",)),
        (["sweep", "--planner", "dp", "-b", "8", "-b", "16"], ("cases: dp on 1x2xV100",)),
    ],
)
def test_commands_say_how_far_they_are(
    command: list[str], words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(show, "PROGRESS_S", 0.0)
    asked = ["--example", "gpt2-small", "--cluster", "1x2xV100", "--micro-batch-size", "4", "--max-plans", "3"]
    assert main([*command, *asked]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("penstock: ")]
    assert all(any(word in line for line in lines) for word in words), lines
