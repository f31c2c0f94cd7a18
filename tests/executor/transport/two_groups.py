"""Two ranks' process groups in this process, for tests of what one sends to the other."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def two_groups() -> tuple[Any, Any]:
    """Create gloo groups of ranks 0 and 1, connected with each other."""
    store, groups = dist.HashStore(), {}

    def make(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return groups[0], groups[1]
