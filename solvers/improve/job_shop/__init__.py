"""One flushed step of a given allocation as a job shop, by CP-SAT: a proven bound and an order for each row.

ALGORITHMS 7.8, SOLVERS C. The operations of a row exclude each other (``shop``), and so do the transfers on a channel
or link (``model``). Memory limits the micro-batches in flight (``memory_limits``); all-reduces and updates follow
(``reductions``). Identical micro-batches run in index order, which loses nothing. The solution's times are not used:
its orders are simulated. The model may delay a transfer on purpose, which the judge never does, so the judged value may
be above the bound; ``as_judged`` closes that gap for the simplest plans.

May import: `solvers.model`, `solvers.costs`, `solvers.judge`, `solvers.bounds`.
Start reading at `solve.py`, then `model.py`.
"""

from penstock.solvers.improve.job_shop.shop import whole_backwards
from penstock.solvers.improve.job_shop.solve import EFFORT, NAME, Answer, Question, never, solve

__all__ = ["EFFORT", "NAME", "Answer", "Question", "never", "solve", "whole_backwards"]
