"""Placement: documents in, the solver's choice of hosts, an answer with plans and reasons out.

``penstock.place(...)`` is the front door for people, ``answer`` that of the service and the command line.

May import: `schemas`, `convert`, `planning`, `solvers`.
Start reading at `answers.py`.
"""

from penstock.placing.answers import answer, place

__all__ = ["answer", "place"]
