"""Ranks of this machine that measure together, and write their results to their standard output.

Loads torch only in ranks, and where all of them are local.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

from penstock.schemas.errors import RunFailed

TIMEOUT = timedelta(seconds=60)


def measured_here(module: str, ranks: int, *arguments: str) -> list[str]:
    """Run all ranks of ``module`` here, and return their outputs. Raises RunFailed when one fails."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    return outputs(module, range(ranks), ranks, f"127.0.0.1:{store.port}", arguments)


def outputs(
    module: str,
    local: Sequence[int],
    ranks: int,
    store: str,
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    """Run ``python -m module RANK RANKS STORE ARGUMENTS`` for each local rank, and return the outputs.

    Each rank has one thread. Raises RunFailed when one fails.
    """
    children = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(ranks), store, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            text=True,
        )
        for rank in local
    ]
    until = time.monotonic() + TIMEOUT.total_seconds()
    try:
        results = []
        for rank, child in zip(local, children, strict=True):
            out, err = child.communicate(timeout=max(0.0, until - time.monotonic()))
            if child.returncode:
                last = " | ".join(err.strip().splitlines()[-3:])
                raise RunFailed(f"measuring process {rank} ended with exit code {child.returncode}: {last}")
            results.append(out)
        return results
    except subprocess.TimeoutExpired:
        raise RunFailed(f"the measuring processes did not finish within {TIMEOUT.total_seconds():g} s") from None
    finally:
        for child in children:
            child.kill()
            child.wait()


def join(rank: int, ranks: int, address: str) -> None:
    """Join the other ranks over gloo, with the store at ``address``."""
    import torch
    from torch.distributed import TCPStore, init_process_group  # type: ignore[attr-defined]

    torch.set_num_threads(1)
    host, _, port = address.rpartition(":")
    store = TCPStore(host.strip("[]"), int(port), is_master=False, timeout=TIMEOUT)
    init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)


def leave() -> None:
    """Wait for the other ranks, then leave."""
    from torch import distributed

    distributed.barrier()
    distributed.destroy_process_group()
