"""`uniform`: the best plan that another trainer can express.

May import: `solvers.model`, `solvers.costs`, `solvers.schedules`, `solvers.grid`.
Start reading at `planner.py`.
"""
