"""Tabu search for a better order of a given plan's operations, timed by the judge (BOUNDS Part II, 3).

May import: `solvers.model`, `solvers.costs`, `solvers.judge`, `solvers.bounds`.
Start reading at `improve.py`.
"""

from penstock.solvers.improve.tabu.improve import Improvement, improve

__all__ = ["Improvement", "improve"]
