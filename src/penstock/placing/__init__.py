"""Placement requests: read documents, let the solver choose hosts, and return an answer with plans and reasons.

``penstock.place(...)`` is the Python API; the service and the command line call ``answer``.

May import: `schemas`, `solvers`, `importers`, `convert`, `planning`.
Start reading at `answers.py`.
"""

from penstock.placing.answers import Best, answer, place

__all__ = ["Best", "answer", "place"]
