"""MadPipe (sections 4.1 and 4.2): contiguous allocations, and allocations with a special processor.

May import: `solvers.model`, `solvers.costs`, `solvers.schedules`.
Start reading at `planner.py`.
"""
