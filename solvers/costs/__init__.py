"""What stages, transfers, collectives and updates cost in nanoseconds and bytes: the one price list.

May import: `solvers.model`, `solvers.compiled`.
Start reading at `durations.py`, then `memory.py`.
"""
