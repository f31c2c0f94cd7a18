"""The costs of stages, transfers, collectives and updates in nanoseconds and bytes: the one price list.

May import: `solvers.model`, `solvers.compiled`.
Start reading at `stage.py`, `transfer.py` and `collectives.py`, then `memory.py` and `tables/stage_table.py`.
"""
