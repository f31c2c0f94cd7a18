"""Placement requests: read documents, let the solver choose hosts, and return an answer with plans and reasons.

``penstock.place(...)`` is the Python API; the service and the command line call ``answer``.

May import: `schemas`, `solvers`, `importers`, `convert`, `planning`.
Start reading at `job_placement.py`.
"""

from penstock.placing.job_placement import Best, answer, place

__all__ = ["Best", "answer", "place"]
