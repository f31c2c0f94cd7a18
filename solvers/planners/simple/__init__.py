"""The simplest planners: data parallelism, GPipe, naive model parallelism, and the simplest line of stages.

May import: `solvers.model`, `solvers.costs`, `solvers.schedules`, `solvers.grid`.
Start reading at `dp.py`.
"""
