"""`exact`: the best plan of a small request, by enumeration and proof.

May import: `solvers.model`, `solvers.costs`, `solvers.bounds`, `solvers.improve`, `solvers.grid`.
Start reading at `planner.py`.
"""
