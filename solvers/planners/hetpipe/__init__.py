"""HetPipe: virtual workers, each with a separate partition of the model.

May import: `solvers.model`, `solvers.costs`, `solvers.bounds`, `solvers.schedules`, `solvers.grid`.
Start reading at `planner.py`.
"""
