"""Progress: a line that is replaced on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path

import pytest
from numba.core import config

from penstock.cli import show
from penstock.cli.main import main
from penstock.cli.show import Screen
from penstock.solvers.solve import incumbent

pytestmark = pytest.mark.tier("quick")


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
    streams = capsys.readouterr()
    assert streams.err.splitlines() == ["penstock: 4.0 s: plan 4", "penstock: 8.0 s: plan 8"]
    assert streams.out == ""


def test_on_a_terminal_a_line_replaces_the_last(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen.of()
    screen.live = True
    screen.progress("one")
    clock.append(101.5)
    screen.progress("two")
    screen.done()
    assert capsys.readouterr().err == "\r\x1b[2K0.0 s: one\r\x1b[2K1.5 s: two\r\x1b[2K"


def test_off_a_terminal_the_first_kernel_is_said_at_once(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    screen = Screen.of()
    for passed, kernels in enumerate(("a", None, "b", "c", "d", "e", None)):
        clock.append(101.0 + passed)
        screen.compiling(kernels)
    screen.progress("plan 7")
    clock.append(110.0)
    screen.progress("plan 8")
    lines = ["1.0 s: compiling a", "5.0 s: compiling d", "10.0 s: plan 8"]
    assert capsys.readouterr().err.splitlines() == [f"penstock: {line}" for line in lines]


def test_on_a_terminal_the_line_has_the_kernel_while_it_is_compiled(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    screen = Screen.of()
    screen.live = True
    screen.progress("one")
    screen.compiling("a")
    clock.append(102.0)
    screen.progress("two")
    screen.compiling(None)
    shown = capsys.readouterr().err.split("\r\x1b[2K")
    assert shown == ["", "0.0 s: one", "0.0 s: compiling a; one", "2.0 s: compiling a; two", "2.0 s: two"]


@pytest.mark.tier("ci")
@pytest.mark.parametrize("command", [["plan"], ["compare"], ["place"]])
def test_a_search_that_needs_a_kernel_says_that_it_is_compiled(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kernel of a module that is written here, which bounds are made to need."""
    path = tmp_path / "bounding.py"
    path.write_text("from penstock.solvers.compiled.decorators import loop\n@loop\ndef twice(n):\n    return 2 * n\n")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(config, "CACHE_DIR", str(tmp_path))
        kernel = run_path(str(path), run_name="penstock.solvers.bounding")["twice"]
    bound = incumbent.request_bound
    monkeypatch.setattr(incumbent, "request_bound", lambda problem: bound(problem) if kernel(1) == 2 else None)
    arguments = ["--example", "gpt2-small", "--cluster", "1x2xV100", "--micro-batch-size", "4", "--max-plans", "3"]
    assert main([*command, *arguments, "--planner", "dp", "-b", "8"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "compiling" in line]
    assert [line.partition(" s: ")[2] for line in lines] == ["compiling bounding.twice"]


@pytest.mark.cases(1)
@pytest.mark.tier("ci")
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
    arguments = ["--example", "gpt2-small", "--cluster", "1x2xV100", "--micro-batch-size", "4", "--max-plans", "3"]
    assert main([*command, *arguments]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("penstock: ")]
    assert all(any(word in line for line in lines) for word in words), lines
