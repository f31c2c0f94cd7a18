"""A bound for many devices: pipelines whose stages have devices of their own need more devices than there are.

May import: `solvers.model`, `solvers.costs`, `solvers.bounds`.
Start reading at `bound.py`.
"""
