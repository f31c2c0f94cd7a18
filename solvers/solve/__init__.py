"""Answers a request: rounds of tasks, done by workers, of which the best plan and the proofs are kept.

May import: `solvers.model`, `solvers.compiled`, `solvers.costs`, `solvers.judge`, `solvers.schedules`,
`solvers.bounds`, `solvers.improve`, `solvers.planners`, `solvers.verify`, `solvers.lowering`, `solvers.explanation`.
Start reading at `driver.py`.
"""
