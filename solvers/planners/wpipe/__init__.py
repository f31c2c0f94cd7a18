"""WPipe: configurations of depth × width, cuts for them, and their estimated throughput.

May import: `solvers.model`, `solvers.costs`, `solvers.schedules`, `solvers.grid`.
Start reading at `planner.py`, then `configurations.py`.
"""
