"""The tables of algorithms by one name, for those who ask planners: ``planners.catalogue``, ``schedules.catalogue``."""

from penstock.solvers.planners.catalogue import PLANNERS, Planner, resolve
from penstock.solvers.schedules.catalogue import SCHEDULES

__all__ = ["PLANNERS", "SCHEDULES", "Planner", "resolve"]
