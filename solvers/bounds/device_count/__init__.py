"""A bound for many devices: pipelines whose stages share no devices need more devices than the problem has.

May import: `solvers.model`, `solvers.costs`, `solvers.bounds`.
Start reading at `bound.py`.
"""
