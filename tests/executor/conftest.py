"""Rank processes for the tests; loading torch is paid once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from forked import ForkedProcesses
from rank_pool import RankPool

from penstock.executor.transport import GlooTransport


@pytest.fixture
def transport() -> Iterator[GlooTransport]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    transport = GlooTransport()
    yield transport
    transport.close()
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def forked_processes() -> Iterator[ForkedProcesses]:
    """Provide a server of processes that have loaded torch."""
    processes = ForkedProcesses()
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def pool(forked_processes: ForkedProcesses) -> Iterator[RankPool]:
    """Ranks of a module's own."""
    pool = RankPool(forked_processes)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def world(forked_processes: ForkedProcesses) -> Iterator[RankPool]:
    """Ranks of the whole session, which keep what they have loaded: as many as its largest case needs."""
    pool = RankPool(forked_processes)
    yield pool
    pool.close()
