"""Degrees of parallelism: a request at one choice of degrees is an ordinary problem whose devices are cells of GPUs.

May import: `solvers.model`, `solvers.costs`.
Start reading at `contract.py`, then `cells.py`, `cell_network.py` and `inner_times.py`.
"""
