"""Costs of many stages at once: as arrays, where plans round up and bounds round down, and as the graph of a step.

May import: `solvers.model`, `solvers.costs`, `solvers.compiled`.
Start reading at `stage_table.py`, then `device_line.py`; the graph is `step_graph.py`.
"""
