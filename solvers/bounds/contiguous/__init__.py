"""A lower bound on every plan of one contiguous pipeline, and the plans that it belongs to (BOUNDS part I).

``links`` are transfers and rings at their best over all placements, ``stage_costs`` the stages' times; ``label_search``
raises the bound of one number of micro-batches (kernels: ``label_kernel``, ``grid_kernel``, ``exposure_kernel``), and
``devices_of_labels`` turns what it found into plans, whose orders the planner ``contiguous_bound`` improves.

May import: `solvers.model`, `solvers.costs`, `solvers.bounds`, `solvers.compiled`.
Start reading at `label_search.py`.
"""
