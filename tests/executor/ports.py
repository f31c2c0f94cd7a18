"""Ports for processes that need to know one ahead, which no other process takes meanwhile."""

from __future__ import annotations

import socket
from contextlib import ExitStack


def keep_port(stack: ExitStack) -> int:
    """Keep a free port until ``stack`` is closed; whoever sets SO_REUSEADDR may listen there too."""
    kept = stack.enter_context(socket.socket())
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("", 0))
    return int(kept.getsockname()[1])
