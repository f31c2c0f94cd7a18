"""The solver of a request: workers run tasks in rounds, and the best plan and all proofs are kept.

May import: `solvers.model`, `solvers.compiled`, `solvers.costs`, `solvers.judge`, `solvers.schedules`,
`solvers.bounds`, `solvers.improve`, `solvers.grid`, `solvers.planners`, `solvers.verify`, `solvers.lowering`,
`solvers.explanation`, `solvers.degrees`.
Start reading at `driver.py`; `choices.py` calls it once for each choice of degrees.
"""
