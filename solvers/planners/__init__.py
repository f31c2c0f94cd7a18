"""Planners: a package for each system, allocation, schedule and loop; ``catalogue.PLANNERS`` lists them.

May import: `solvers.model`, `solvers.compiled`, `solvers.costs`, `solvers.judge`, `solvers.schedules`,
`solvers.bounds`, `solvers.improve`, `solvers.grid`.
Start reading at `catalogue.py`, then `proposal.py`.
"""
