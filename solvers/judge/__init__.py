"""The simulator: from an allocation and its orders to a timeline with times and memory.

May import: `solvers.model`, `solvers.compiled`, `solvers.costs`.
Start reading at `simulate.py`.
"""
