"""Costs as arrays, for searches and bounds that evaluate many stages: plans round up, bounds round down.

May import: `solvers.model`, `solvers.costs`, `solvers.compiled`.
Start reading at `stage_table.py`, then `device_line.py`.
"""
