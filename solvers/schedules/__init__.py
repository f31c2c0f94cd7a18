"""A file per schedule, from a problem and an allocation to `Orders`; `catalogue.py` lists them.

May import: `solvers.model`, `solvers.costs`, `solvers.judge`, `solvers.compiled`.
Start reading at `catalogue.py`, then `early_backward.py`.
"""
