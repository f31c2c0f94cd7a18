"""The time of the first plan of a fresh process, for each planner: compiled kernels come from the warmed cache.

Prints ``name value unit target ok|MISSED`` for each planner: processor time of its first ``solve`` in a process that
has imported the solvers and planned nothing yet, on eight devices in two nodes (``exact``: two devices). With
``--cold`` only ``auto``, without any compiled kernel: the processor time from the start of the process until the first
plan is announced, and until the answer. Then the kernels that were compiled for it, with the seconds that each took
without the kernels it calls, the longest first.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile

from penstock.solvers.planners.catalogue import PLANNERS

LIMIT_S, COLD_LIMIT_S = 1.0, 25.0
CHILD = """
import sys, time
from penstock.planning.inputs import find_profile, find_topology
from numba.core import event
from penstock.convert import to_problem
from penstock.schemas.request import PlanRequest, UpdateRule
from penstock.solvers.solve.driver import solve
from typing import get_args
name, devices = sys.argv[1], sys.argv[2]

class Compiling(event.Listener):
    running, seconds = [], {}
    def on_start(self, compiled):
        self.running.append([time.process_time(), 0.0])
    def on_end(self, compiled):
        began, inside = self.running.pop()
        spent = time.process_time() - began
        if self.running:
            self.running[-1][1] += spent
        kernel = compiled.data["dispatcher"].py_func
        kernel = f"{kernel.__module__.removeprefix('penstock.solvers.')}.{kernel.__name__}"
        self.seconds[kernel] = self.seconds.get(kernel, 0.0) + spent - inside

event.register("numba:compile", Compiling())
request = PlanRequest(
    profile=find_profile("gpt2-small"), topology=find_topology(devices),
    global_batch_size=8, update_rules=get_args(UpdateRule) if name != "auto" else ("synchronous",),
)
problem = to_problem(request)
announced = []
began = time.process_time()
solve(problem, name, on_incumbent=lambda _plan: announced.append(time.process_time()))
print(time.process_time() - began, announced[0], time.process_time())
for kernel, seconds in sorted(Compiling.seconds.items(), key=lambda each: -each[1]):
    print(f"  {seconds:6.2f} s  {kernel}")
"""


def main() -> None:
    """Run one child process per planner."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cold", action="store_true", help="auto, without any compiled kernel")
    if parser.parse_args().cold:
        with tempfile.TemporaryDirectory() as empty:
            lines = _child("auto", "2x4xV100", {"PENSTOCK_KERNELS": empty})
        _solve_s, first_s, whole_s = map(float, lines[0].split())
        _row("first plan without compiled kernels, auto, 2x4xV100", first_s, COLD_LIMIT_S)
        _row("whole answer without compiled kernels, auto, 2x4xV100", whole_s, None)
        print("\n".join(lines[1:]), flush=True)
        return
    for name in PLANNERS:
        devices = "2x1xV100" if name == "exact" else "2x4xV100"
        _row(
            f"first call in a fresh process, {name}, {devices}", float(_child(name, devices, {})[0].split()[0]), LIMIT_S
        )


def _child(name: str, devices: str, environment: dict[str, str]) -> list[str]:
    command = [sys.executable, "-c", CHILD, name, devices]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | environment)
    return run.stdout.splitlines()


def _row(name: str, seconds: float, limit: float | None) -> None:
    verdict = "-" if limit is None else f"{limit} {'ok' if seconds <= limit else 'MISSED'}"
    print(f"{name} {seconds:.2f} s {verdict}", flush=True)


if __name__ == "__main__":
    main()
