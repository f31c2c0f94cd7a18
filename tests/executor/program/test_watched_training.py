"""The watchdog sees of training: steps, and all that ranks agree on between two of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.executor.program.global_batch import StepResult
from penstock.executor.program.watchdog import Stuck, Watchdog
from penstock.executor.run import training
from penstock.executor.run.training import Course, Trainer

LIMIT_S, PATIENCE_S = 0.05, 10.0


class Peer:
    """A peer that stops answering at its ``n``-th answer; ``was_noticed`` tells whether a watchdog saw it."""

    def __init__(self, n: int) -> None:
        self._left = n
        self.was_noticed = False
        self._noticed = threading.Event()

    def answer(self) -> bool:
        self._left -= 1
        if self._left == 0:
            self.was_noticed = self._noticed.wait(PATIENCE_S)
        return False

    def notice(self, stuck: Stuck) -> None:
        self._noticed.set()


def train(monkeypatch: pytest.MonkeyPatch, peer: Peer, barrier: Callable[[], Any], agreed: Callable[[], Any]) -> None:
    monkeypatch.setattr(training.dist, "barrier", barrier)
    interpreter: Any = SimpleNamespace(
        actions=SimpleNamespace(before_step=None),
        program=SimpleNamespace(rank=1),
        step=lambda step, events: StepResult(1.0, 1),
    )
    mark = [0, 0]
    checkpoints: Any = SimpleNamespace(
        save=lambda *arguments, **more: SimpleNamespace(about=SimpleNamespace(is_finite=True))
    )
    shutdown: Any = SimpleNamespace(agreed=agreed)
    watchdog = Watchdog(mark, peer.notice, limit_s=LIMIT_S)
    Trainer(
        interpreter,
        Course(steps=3),
        say=lambda event: None,
        mark=mark,
        checkpoints=checkpoints,
        shutdown=shutdown,
        watchdog=watchdog,
    ).train()
    watchdog.close()


@pytest.mark.parametrize("number", [pytest.param(4, id="before a step"), pytest.param(5, id="after a step")])
def test_a_peer_that_stops_between_steps_is_noticed(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The first barrier, before any step, is not watched: peers may still be setting up."""
    peer = Peer(number)
    train(monkeypatch, peer, peer.answer, lambda: False)
    assert peer.was_noticed


def test_a_peer_that_stops_before_ranks_agree_to_go_on_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer(1)
    train(monkeypatch, peer, lambda: None, peer.answer)
    assert peer.was_noticed
