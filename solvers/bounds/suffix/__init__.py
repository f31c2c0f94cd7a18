"""The shortest step of a given allocation by exact search on its suffixes (BOUNDS Part II): a proof, and an order.

May import: `solvers.model`, `solvers.costs`, `solvers.bounds`, `solvers.compiled`.
Start reading at `prove.py`.
"""

from penstock.solvers.bounds.suffix.prove import EFFORT, SuffixAnswer, judgeable, prove, takes

__all__ = ["EFFORT", "SuffixAnswer", "judgeable", "prove", "takes"]
