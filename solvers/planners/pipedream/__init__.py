"""PipeDream's allocator: partition and replication by dynamic programming.

``hierarchy`` has the partitions of the paper and of the released optimizer, level by level.

May import: `solvers.model`, `solvers.costs`, `solvers.schedules`, `solvers.grid`.
Start reading at `planner.py`, then `hierarchy.py`.
"""
