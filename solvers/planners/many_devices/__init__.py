"""`spread`: stages along the network's tree, the fewest devices for a time.

May import: `solvers.model`, `solvers.costs`.
Start reading at `planner.py`, then `partition.py`.
"""
