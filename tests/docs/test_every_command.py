"""Every command and every snippet of README, the guides and the tutorials does what the page says.

Commands of ours run in this process, page by page, in a copy of one directory that has the files which pages name. What
pages say of other hosts is mapped to real servers on loopback, and what would take long is made smaller: ``shown.py``
has all of it. Output that a page shows (``text`` blocks) is compared with what was printed.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import PAGES, ROOT, pieces
from sandbox import Sandbox
from shown import CODES, ELSEWHERE, HERE, HOSTS, NOT_RUN, PYTHON_ELSEWHERE, PYTHON_SMALLER, SMALLER, STAY

from penstock.solvers.planners.catalogue import PLANNERS

pytestmark = pytest.mark.tier("everything")

ALL = {path.relative_to(ROOT).as_posix(): list(pieces(path)) for path in PAGES}
SHOWN = [piece for blocks in ALL.values() for piece in blocks]
IN_FULL = {piece.bare for piece in SHOWN if piece.kind == "shell" and not piece.alone}
LINES = [piece.text for piece in SHOWN if piece.kind == "shell"]
SNIPPETS = [piece.text for piece in SHOWN if piece.kind == "python"]


@pytest.fixture
def sandbox(
    base: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Sandbox]:
    def new_output() -> str:
        printed = capsys.readouterr()
        return printed.out + printed.err

    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "path", list(sys.path))
    # `mytrain` here is small, and stands for models of every size: tests/cli/convert/test_exporting.py compares layers
    monkeypatch.setattr("penstock.cli.run.model_fit.unlike", lambda *_arguments, **_more: None)
    # The costs of its CPU devices are made up, which a calibration from a real run is refused for.
    monkeypatch.setattr("penstock.calibration.trust.LARGEST_FACTOR", math.inf)
    shutil.copytree(base, tmp_path, dirs_exist_ok=True)
    planners = dict(PLANNERS)
    yield Sandbox(tmp_path, base, IN_FULL, request.getfixturevalue, new_output, monkeypatch)
    PLANNERS.clear()
    PLANNERS.update(planners)


@pytest.mark.parametrize("page", [page for page, blocks in ALL.items() if blocks])
def test_the_page_is_true(page: str, sandbox: Sandbox) -> None:
    for piece in ALL[page]:
        sandbox.take(piece)


@pytest.mark.tier("nightly")
def test_a_service_a_worker_an_agent_and_peers_stay(planner: str, peers: tuple[str, str]) -> None:
    """The four commands of ``STAY`` were seen to be ready; the session's end checks that they end when interrupted."""
    assert planner.startswith("http://127.0.0.1:")
    assert len(set(peers)) == 2


@pytest.mark.tier("quick")
def test_what_is_listed_is_shown() -> None:
    """What no page has any more goes from ``shown.py``."""
    for words in (*NOT_RUN, *CODES, *STAY, *HOSTS, *HERE, *SMALLER):
        assert any(words in line for line in [*LINES, *SNIPPETS]), words
    for first in ELSEWHERE:
        assert any(line.startswith(first) for line in LINES), first
    for words in (*PYTHON_ELSEWHERE, *PYTHON_SMALLER):
        assert any(words in text for text in SNIPPETS), words
