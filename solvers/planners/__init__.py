"""Planners: a paper's whole system each, allocation, schedule and loop; ``catalogue.PLANNERS`` lists them.

May import: `solvers.model`, `solvers.compiled`, `solvers.costs`, `solvers.judge`, `solvers.bounds`,
`solvers.schedules`, `solvers.improve`.
Start reading at `catalogue.py`.
"""
