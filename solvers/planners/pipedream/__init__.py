"""PipeDream's allocator: partition and replication by dynamic programming.

``hierarchy`` is the paper's and the released optimizer's, level by level; ``placed`` works on the devices in a row.

May import: `solvers.model`, `solvers.costs`, `solvers.schedules`.
Start reading at `planner.py`, then `hierarchy.py`.
"""
