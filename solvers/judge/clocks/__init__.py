"""Compiled clocks, which compute when every operation starts: by event heap, by worklist, or for batches of plans.

May import: `solvers.model`, `solvers.compiled`, and the arrays of `judge/operation_tables.py`.
Start reading at `events.py`, the reference engine; `worklist.py` for private channels (`channels.py`), `batch.py` for
thousands of plans on them, `batch_shared.py` for thousands in a shared network.
"""
