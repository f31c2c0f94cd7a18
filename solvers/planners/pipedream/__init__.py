"""PipeDream's allocator: partition and replication by dynamic programming.

``hierarchy`` is the paper's and the released optimizer's, level by level.

May import: `solvers.model`, `solvers.costs`, `solvers.schedules`, `solvers.grid`.
Start reading at `planner.py`, then `hierarchy.py`.
"""
