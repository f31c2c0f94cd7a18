"""Proven lower bounds: of one allocation's schedules, of plan classes, and of whole requests.

May import: `solvers.model`, `solvers.compiled`, `solvers.costs`, `solvers.schedules`.
Start reading at `schedule_bound.py`; `coverage.py` says which plans a bound covers.
"""
