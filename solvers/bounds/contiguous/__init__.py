"""A lower bound on every plan of one contiguous pipeline, and the plans that it belongs to (BOUNDS part I).

* ``links``: the best case of transfers and rings over all placements; ``stage_costs``: the stages' times.
* ``label_search``: raises the bound of one number of micro-batches. Kernels: ``label_kernel``, ``grid_kernel``,
  ``exposure_kernel``.
* ``border_bound``: the load of all stages together on cables (``borders``, ``border_kernel``).
* ``devices_of_labels``: turns its paths into plans; ``contiguous_bound`` improves their orders.

May import: `solvers.model`, `solvers.costs`, `solvers.bounds`, `solvers.compiled`.
Start reading at `label_search.py`.
"""
