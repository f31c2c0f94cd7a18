"""The end of the program: at once and without a traceback, also at a signal that comes while it is still loading.

The main module imports this module first. It does nothing outside the program itself.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from pathlib import Path
from types import FrameType

PROGRAM = ("penstock", "main.py")
LASTING = ("serve", "worker")
"""Commands that run until SIGTERM, which is their ordinary end."""


def _interrupted(number: int, frame: FrameType | None) -> None:
    os.write(2, b"penstock: interrupted\n")
    os._exit(130)


def loaded() -> None:
    """Let the program itself handle Ctrl-C from now on."""
    if signal.getsignal(signal.SIGINT) is _interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if Path(sys.argv[0]).name in PROGRAM:
    atexit.register(gc.freeze)  # the collector's last look through everything takes a second after large plans
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
    if sys.argv[1:2] and sys.argv[1] in LASTING:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # until it serves; nothing was taken that could be lost
