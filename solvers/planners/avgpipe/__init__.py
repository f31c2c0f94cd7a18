"""AvgPipe: parallel pipelines on the same devices, with tuned degrees.

May import: `solvers.model`, `solvers.costs`, `solvers.judge`, `solvers.schedules`, `solvers.grid`.
Start reading at `planner.py`, then `tuning.py`.
"""
