"""Proven lower bounds: of one allocation's schedules, of plan classes, and of whole requests.

May import: `solvers.model`, `solvers.costs`, `solvers.compiled`, the arrays of `judge/operation_tables.py`.
Start reading at `schedule_bound.py`; `coverage.py` says which plans a bound covers.
"""
