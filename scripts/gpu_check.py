"""Check of everything that runs on this machine's GPUs: run by ``scripts/gpu-check``.

One table of checks with what was measured; every row asserts something. Without a GPU each check says so and runs its
CPU form where it has one. One GPU is enough: ranks share it over gloo-staged, and over NCCL, which takes them to be on
different hosts. Ends with 1 when something that was run went wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple

from gpu_checks import Check, checks
from gpu_machine import Machine, Skipped

from penstock.schemas.errors import PenstockError, UnsupportedRequest

RANKS = 3
"""Number of ranks of most runs, so that they take three processors."""


class Row(NamedTuple):
    """One line of the table. ``verdict``: ok, FAILED, refused, no GPU (its CPU form is ok), or what it needs."""

    name: str
    verdict: str
    figure: str
    seconds: float


def run_check(check: Check, machine: Machine) -> Row:
    """Run one check and return its line; an error becomes its verdict."""
    start = time.monotonic()
    good = "ok" if machine.device == "cuda" else "no GPU"
    try:
        verdict, figure = good, check.run(machine)
    except Skipped as lack:
        verdict, figure = ("no GPU" if machine.num_gpus == 0 else str(lack)), str(lack)
    except UnsupportedRequest as error:
        verdict, figure = "refused", error.detail
    except (PenstockError, AssertionError) as error:
        verdict, figure = "FAILED", str(error)
    except Exception as error:
        verdict, figure = "FAILED", f"{type(error).__name__}: {error}"
    return Row(check.name, verdict, figure, time.monotonic() - start)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU, else cpu")
    parser.add_argument("--only", action="append", help="checks whose names contain this; may be given several times")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    import torch

    from penstock.executor.runtime.cuda import gpu_count, why_no_gpu

    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    why = why_no_gpu()
    device = options.device or ("cpu" if why else "cuda")
    if device == "cuda" and why:
        print(f"no GPU: {why}")
        return 1
    if device == "cpu":
        print(f"no GPU: {why}; these are the CPU forms" if why else "the CPU forms, as asked for")
    machine = Machine(device, gpu_count())
    chosen = [check for check in checks() if any(text in check.name for text in options.only or [""])]
    return 1 if any(row.verdict == "FAILED" for row in _all_rows(chosen, machine)) else 0


def _all_rows(chosen: Sequence[Check], machine: Machine) -> list[Row]:
    """Run the checks, at once where each rank can have a processor, and print their rows in order."""
    rows = []
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // RANKS)) as pool:
        together = {check.name: pool.submit(run_check, check, machine) for check in chosen if not check.alone}
        for check in chosen:
            if check.alone:
                wait(together.values())
            row = run_check(check, machine) if check.alone else together[check.name].result()
            rows.append(row)
            first, *more = row.figure.splitlines() or [""]
            print(f"{row.name:40s} {row.verdict:13s} {row.seconds:5.1f} s  {first}", flush=True)
            for line in more[:6]:
                print(f"{'':62s} {line}")
    return rows


if __name__ == "__main__":
    sys.exit(main())
