"""DAPPLE's planner: latency of a plan (``latency``), placement policies (``placement``), memoised search (``search``).

.. [1] Fan et al., DAPPLE: A Pipelined Data Parallel Approach for Training Large Models (PPoPP 2021), section IV.

May import: `solvers.model`, `solvers.costs`.
Start reading at `planner.py`, then `search.py`.
"""
