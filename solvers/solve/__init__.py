"""Answers a request: rounds of tasks, done by workers, of which the best plan and the proofs are kept.

May import: `solvers.model`, `solvers.compiled`, `solvers.costs`, `solvers.judge`, `solvers.schedules`,
`solvers.bounds`, `solvers.improve`, `solvers.grid`, `solvers.planners`, `solvers.verify`, `solvers.lowering`,
`solvers.explanation`, `solvers.degrees`.
Start reading at `driver.py`; `choices.py` asks it once for each choice of degrees.
"""
