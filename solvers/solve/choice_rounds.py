"""The rounds in which planner ``auto`` compares choices of degrees (``choices``): who is asked, and who goes on."""

from __future__ import annotations

from typing import NamedTuple

from penstock.solvers.planners.catalogue import PLANNERS, Tier

QUICK = "even"
"""The planner that ranks the choices first."""
LISTED = tuple(row.name for row in PLANNERS.values() if row.listed)
"""The planners that rank the choices next: they have their best plans soon."""
EXACT = tuple(row.name for row in PLANNERS.values() if row.exact)
PROVING = tuple(row.name for row in PLANNERS.values() if row.tier is Tier.PROOF and row.least_devices == 1)


class Round(NamedTuple):
    """``plans`` of each planner that are simulated; who is ``near`` the best goes on.

    ``planners``: these alone are asked, one after the other, for as many plans as their effort allows.
    """

    plans: int | None
    near: float
    planners: tuple[str, ...] = ()


ROUNDS = (Round(None, 1.4, (QUICK,)), Round(None, 1.2, LISTED), Round(1, 1.12), Round(8, 1.03))
"""Of planner ``auto``; of an effort that does not compare choices by all planners, the first."""
NEAR = 1.12
"""How near the best of planner ``QUICK`` a choice is that gets the whole effort of another planner."""
MOST = 160_000
"""The effort of the rounds of all planners: the sizes (``micro_batches.size_of``) of the choices searched, added up."""
