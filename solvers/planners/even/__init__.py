"""``even``: the plain layouts that people write by hand.

May import: `solvers.model`, `solvers.costs`, `solvers.schedules`, `solvers.grid`.
Start reading at `planner.py`.
"""
