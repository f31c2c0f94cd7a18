"""Terms of an answer: the conditions that depend on the machine that answers, and not on the question."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def unheard(_message: Any) -> None:
    """Drop a message that nobody waits for."""


@dataclass(frozen=True)
class Terms:
    """The machine's part in an answer: processes to use, the largest cluster, and a listener for what comes first."""

    workers: int | None = None
    most_devices: int | None = None
    most_micro_batches: int | None = None
    notify: Callable[[Any], None] = unheard
    """Function that is called with each message before the answer: the row's ``event`` in ``questions.table``."""


NO_TERMS = Terms()
"""Terms without a limit and without a listener."""
