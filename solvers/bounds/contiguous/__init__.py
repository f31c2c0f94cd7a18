"""A lower bound on every plan of one contiguous pipeline, and the plans that it belongs to (BOUNDS part I).

``links`` are transfers and rings at their best over all placements, ``pieces`` the stages' times, ``search`` raises
the bound of one number of micro-batches, ``places`` turns what it found into plans, ``warm_ups`` finds better orders of
these. The kernels are ``kernels.request_labels``, ``request_steps``, ``request_grid`` and ``request_pool``.

May import: `solvers.model`, `solvers.costs`, `solvers.bounds`, `solvers.compiled`.
Start reading at `label_search.py`.
"""
