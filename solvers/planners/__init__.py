"""Planners: a package for each system, allocation, schedule and loop; ``catalogue.PLANNERS`` lists them.

May import: `solvers.model`, `solvers.costs`, `solvers.judge`, `solvers.bounds`, `solvers.schedules`, `solvers.improve`,
`solvers.compiled`; never `solvers.solve`.
Start reading at `catalogue.py`, then `proposal.py`.
"""
