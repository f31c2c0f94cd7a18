"""SPP's planner: device order (``ordering``) and partition (``partition``).

.. [1] Luo et al., Efficient Pipeline Planning for Expedited Distributed DNN Training (INFOCOM 2022), section IV.

May import: `solvers.model`, `solvers.costs`, `solvers.schedules`, `solvers.bounds`.
Start reading at `planner.py`, then `partition.py`.
"""
