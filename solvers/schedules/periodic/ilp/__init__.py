"""The shortest pattern of an allocation as an integer linear program (MadPipe, section 4.3; ALGORITHMS 4.4).

The program counts in periods, the pattern is timed in whole nanoseconds from what it decided (``path``).

May import: `solvers.model`, `solvers.schedules`.
Start reading at `solve.py`.
"""

from penstock.solvers.schedules.periodic.ilp.solve import NODES, PatternAnswer, solve

__all__ = ["NODES", "PatternAnswer", "solve"]
