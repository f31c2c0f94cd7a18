"""Large neighbourhood search: better plans near the best plan of a session, fed by bulk simulation.

``search`` is the door.
"""

from penstock.solvers.neighbourhood.search import search

__all__ = ["search"]
