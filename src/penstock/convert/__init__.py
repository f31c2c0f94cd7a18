"""The only bridge between documents and the solver core, both ways.

May import: `schemas`, `facts`, `shapes`, `solvers`.
Start reading at `requests.py` (in) and `answers.py` (out).
"""

from penstock.convert.answers import to_plan, to_prediction, to_result
from penstock.convert.plans import from_plan
from penstock.convert.requests import to_problem

__all__ = ["from_plan", "to_plan", "to_prediction", "to_problem", "to_result"]
