"""Schedules: plain functions from a problem and an allocation to ``Orders``; ``catalogue.SCHEDULES`` lists them.

May import: `solvers.model`, `solvers.compiled`, `solvers.costs`, `solvers.judge`.
Start reading at `catalogue.py`; `support/fitting.py` finds the candidate schedules of an allocation that fit in memory.
"""
