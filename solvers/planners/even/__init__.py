"""``even``: the plain layouts that people write by hand.

May import: `solvers.model`, `solvers.costs`, `solvers.schedules`, other planners.
Start reading at `planner.py`.
"""
