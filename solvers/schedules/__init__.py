"""Schedules: plain functions from a problem and an allocation to ``Orders``; ``catalogue.SCHEDULES`` lists them.

May import: `solvers.model`, `solvers.compiled`, `solvers.costs`, `solvers.judge`.
Start reading at `catalogue.py`; `support/fitting_orders.py` searches for orders that fit in memory.
"""
