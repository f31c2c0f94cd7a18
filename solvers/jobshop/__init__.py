"""One flushed step of a given allocation as a job shop, by CP-SAT: a proven bound and an order for each device.

ALGORITHMS 7.8, SOLVERS C. What runs on a device excludes each other, so do the transfers on a channel or link; the
micro-batches of one size run in index order, which loses nothing, because they are alike. The solution's times are
not used: the judge times its orders by his own rules, so where the model delays a transfer on purpose, which the
judge never does, the judged value may be above the bound.
"""

from penstock.solvers.jobshop.solve import EFFORT, Answer, Question, solve

__all__ = ["EFFORT", "Answer", "Question", "solve"]
