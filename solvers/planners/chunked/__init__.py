"""Planners that give a device several parts of the model, or split backwards.

May import: `solvers.model`, `solvers.costs`, `solvers.schedules`, `solvers.grid`.
Start reading at `planner.py`.
"""
