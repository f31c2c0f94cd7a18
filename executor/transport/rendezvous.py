"""How the ranks of a run meet: the store, the default process group, and what all ranks agree on through it.

The default group is always gloo: losses, clocks and barriers go over it whatever carries the tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from penstock.executor.runtime.cpu import CPU
from penstock.executor.runtime.interface import Runtime

SETUP_LIMIT = timedelta(hours=1)
"""How long ranks wait for the slowest to import, to build its layers, or to compute the reference of a check."""


def connect(
    address: str,
    *,
    prefix: str,
    rank: int,
    world_size: int,
    timeout: timedelta = SETUP_LIMIT,
    listening: int | None = None,
) -> Any:
    """Make the default process group of a run and return its store; every rank calls it once.

    ``address`` is ``host:port`` of the store. ``prefix`` keeps generations apart that use one store. ``listening``: the
    descriptor of a listening socket at ``address``; this process then hosts the store itself.
    """
    host, _, port = address.rpartition(":")
    store = TCPStore(
        host.strip("[]"),
        int(port),
        is_master=listening is not None,
        timeout=SETUP_LIMIT,
        wait_for_workers=False,
        master_listen_fd=listening,
    )
    own = PrefixStore(prefix, store)
    wait_for_all(own, "here", world_size)
    dist.init_process_group(
        "gloo",
        store=own,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    return own


def wait_for_all(store: Any, what: str, world_size: int) -> None:
    """Return when all ranks have called this; slow ones are waited for, unlike in a collective."""
    if store.add(what, 1) == world_size:
        store.set(f"{what}/all", b"1")
    store.wait([f"{what}/all"], SETUP_LIMIT)


def process_groups(
    groups: Iterable[tuple[int, ...]], timeout: timedelta = SETUP_LIMIT, runtime: Runtime = CPU
) -> list[Any]:
    """The process groups of a run, by number; every rank makes all of them in this order, as torch demands.

    ``runtime``: a GPU that is this rank's alone, for groups over NCCL; else they are over gloo, which stages what a GPU
    holds by itself.
    """
    return [
        runtime.new_group(ranks, timeout, f"group {number}", for_messages=False) for number, ranks in enumerate(groups)
    ]


def sum_over(values: Tensor, group: Any = None) -> Any:
    """Start adding ``values`` up over the group, in place; ``wait()`` on what is returned."""
    return dist.all_reduce(values, group=group, async_op=True)


def sum_of_pairs(first: float, second: float) -> tuple[float, float]:
    """Two numbers, each summed over all ranks."""
    values = torch.tensor([first, second], dtype=torch.float64)
    dist.all_reduce(values)
    total_first, total_second = values.tolist()
    return total_first, total_second


def smallest(value: int) -> int:
    """The smallest of all ranks' values."""
    values = torch.tensor([value], dtype=torch.int64)
    dist.all_reduce(values, op=dist.ReduceOp.MIN)
    return int(values.item())
