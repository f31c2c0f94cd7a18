"""Schedules without a flush: patterns that repeat under several weight versions.

May import: `solvers.model`, `solvers.costs`, `schedules.support`.
Start reading at `eager.py`.
"""
