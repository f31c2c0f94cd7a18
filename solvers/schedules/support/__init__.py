"""Building material that several schedules share: rows, chunks, building blocks, list scheduling.

May import: `solvers.model`, `solvers.costs`, `solvers.compiled`.
Start reading at `rows.py`.
"""
