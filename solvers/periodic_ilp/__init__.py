"""The pattern of the smallest period of a given allocation as an integer program (MadPipe's second phase, section 4.4).

The linear program counts in periods, the pattern is timed in whole nanoseconds from what it decided (``path``).
"""

from penstock.solvers.periodic_ilp.solve import NODES, SOLVERS, Answer, solve

__all__ = ["NODES", "SOLVERS", "Answer", "solve"]
