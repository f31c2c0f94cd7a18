"""How long the first plan of a fresh process takes, for each planner: compiled kernels come from the warmed cache.

Prints ``name value unit target ok|MISSED`` for each planner: processor time of its first ``solve`` in a process that
has imported the solvers and planned nothing yet, on eight devices in two nodes (``exact``: two devices).
"""

from __future__ import annotations

import subprocess
import sys

from penstock.solvers.planners.catalogue import PLANNERS

LIMIT_S = 1.0
CHILD = """
import sys, time
from penstock.planning.answer import find_profile, find_topology
from penstock.convert import to_problem
from penstock.schemas.request import PlanRequest, UpdateRule
from penstock.solvers.planners.catalogue import PLANNERS
from typing import get_args
name, devices = sys.argv[1], sys.argv[2]
request = PlanRequest(
    profile=find_profile("gpt2-small"), topology=find_topology(devices),
    global_batch_size=8, update_rules=get_args(UpdateRule) if name != "auto" else ("synchronous",),
)
problem = to_problem(request)
began = time.process_time()
PLANNERS[name].solve(problem)
print(time.process_time() - began)
"""


def main() -> None:
    """One child per planner."""
    for name in PLANNERS:
        devices = "2x1xV100" if name == "exact" else "2x4xV100"
        command = [sys.executable, "-c", CHILD, name, devices]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds = float(run.stdout)
        verdict = "ok" if seconds <= LIMIT_S else "MISSED"
        print(f"first call in a fresh process, {name}, {devices} {seconds:.2f} s {LIMIT_S} {verdict}", flush=True)


if __name__ == "__main__":
    main()
