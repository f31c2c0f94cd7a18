"""HetPipe: virtual workers with partitions of their own.

May import: `solvers.model`, `solvers.costs`, `solvers.bounds`, `solvers.schedules`, `solvers.grid`.
Start reading at `planner.py`.
"""
