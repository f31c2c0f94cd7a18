"""The meeting of a run's ranks: the store, the default process group, and agreements of all ranks through it.

The default group is always gloo: losses, clocks and barriers use it, whichever transport carries the tensors.
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
"""Time that ranks wait for the slowest rank to import, to build its layers, or to compute a check's reference."""


def connect(
    address: str,
    *,
    prefix: str,
    rank: int,
    world_size: int,
    timeout: timedelta = SETUP_LIMIT,
    listening: int | None = None,
) -> Any:
    """Create the default process group of a run and return its store; every rank calls it once.

    ``address`` is ``host:port`` of the store. ``prefix`` keeps generations that use one store apart. ``listening``: the
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
    run_store = PrefixStore(prefix, store)
    wait_for_all(run_store, "here", world_size)
    dist.init_process_group(
        "gloo",
        store=run_store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    return run_store


def wait_for_all(store: Any, what: str, world_size: int) -> None:
    """Wait until all ranks have called this; unlike a collective, it waits for slow ranks."""
    if store.add(what, 1) == world_size:
        store.set(f"{what}/all", b"1")
    store.wait([f"{what}/all"], SETUP_LIMIT)


def process_groups(
    groups: Iterable[tuple[int, ...]], timeout: timedelta = SETUP_LIMIT, runtime: Runtime = CPU
) -> list[Any]:
    """Create the process groups of a run, by number; every rank creates all of them in this order, as torch demands.

    ``runtime``: a GPU of this rank alone, for groups over NCCL. Otherwise groups are over gloo, which stages tensors of
    a GPU itself.
    """
    return [
        runtime.new_group(ranks, timeout, f"group {number}", for_messages=False) for number, ranks in enumerate(groups)
    ]


def sum_over(values: Tensor, group: Any = None) -> Any:
    """Start to sum ``values`` over the group, in place; ``wait()`` on the result."""
    return dist.all_reduce(values, group=group, async_op=True)


def sum_of_pairs(first: float, second: float) -> tuple[float, float]:
    """Sum each of two numbers over all ranks."""
    values = torch.tensor([first, second], dtype=torch.float64)
    dist.all_reduce(values)
    total_first, total_second = values.tolist()
    return total_first, total_second


def smallest(value: int) -> int:
    """Return the smallest of all ranks' values."""
    values = torch.tensor([value], dtype=torch.int64)
    dist.all_reduce(values, op=dist.ReduceOp.MIN)
    return int(values.item())
