"""Local search near the incumbent: moves, repairs, and simulation in batches.

May import: `solvers.model`, `solvers.costs`, `solvers.judge`, `solvers.bounds`, `solvers.schedules`.
Start reading at `flushed.py`; `steady.py` for plans without a flush.
"""
