"""The proven bounds of a solve: what they cover, and when the incumbent is good enough."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from penstock.schemas.coverage import Covers
from penstock.solvers.bounds.coverage import allowed, features_of_candidate
from penstock.solvers.bounds.schedule_bound import request_bound
from penstock.solvers.model.result import REQUEST_SCOPE, Bound, Candidate
from penstock.solvers.solve.setting import Setting


def shown(bounds: Sequence[Bound]) -> tuple[Bound, ...]:
    """Return the highest bound on every plan of the request, and the highest of all where that is higher."""
    wide = max((bound for bound in bounds if bound.scope == REQUEST_SCOPE), key=lambda bound: bound.bound_ns)
    highest = max(bounds, key=lambda bound: bound.bound_ns)
    return (wide,) if highest.bound_ns <= wide.bound_ns else (wide, highest)


@dataclass
class Proofs:
    """The highest bound on each class of plans."""

    setting: Setting
    by_class: dict[Covers, Bound] = field(default_factory=dict)
    _known: tuple[Candidate, Covers] | None = None

    @cached_property
    def every_plan(self) -> Bound:
        """The bound on every plan of the request, from its work and its first micro-batch alone."""
        return request_bound(self.setting.problem) if self.setting.whole is None else self.setting.whole

    @cached_property
    def allowed(self) -> Covers:
        """The class of all plans that the request allows."""
        return allowed(self.setting.problem)

    def add(self, bound: Bound) -> bool:
        """Take a bound, if it is higher than the known one on the same class; return whether it is."""
        known = self.by_class.get(bound.covers)
        if known is not None and bound.bound_ns <= known.bound_ns:
            return False
        self.by_class[bound.covers] = bound
        return True

    def on_every_plan(self, more: Iterable[Bound] = ()) -> Bound:
        """Return the highest bound on every plan of the request; ``more``: bounds that are not taken yet."""
        known = [bound for bound in (*self.by_class.values(), *more) if self.allowed <= bound.covers]
        return max((self.every_plan, *known), key=lambda bound: bound.bound_ns)

    def shown(self, best: Candidate) -> tuple[Bound, ...]:
        """Return the bound on every plan of the request, then a higher one that covers the plan, if there is one.

        A bound that the plan refutes is left out.
        """
        own = self._features(best)
        known = [each for each in self.by_class.values() if own <= each.covers and each.bound_ns <= best.value_ns]
        return shown([self.on_every_plan(), *known])

    def reached(self, best: Candidate | None) -> bool:
        """Return whether no better plan like the incumbent is needed: it is within the gap of a bound that covers it.

        With ``first_feasible`` any plan is enough.
        """
        if best is None or self.setting.first_feasible:
            return best is not None
        return best.value_ns <= self.shown(best)[-1].bound_ns * (1.0 + self.setting.gap)

    def spare(self, best: Candidate | None, plans: Covers | None) -> bool:
        """Return whether no search for a class of plans is needed: a bound covers all of them. None: any plan.

        The gap that was asked for is between the incumbent and a bound that covers it as well.
        """
        if best is None or self.setting.first_feasible:
            return best is not None
        gap, own = self.setting.gap, self._features(best)
        wanted = self.allowed if plans is None else plans
        sparing = [bound for bound in (self.every_plan, *self.by_class.values()) if wanted <= bound.covers]
        return any(best.value_ns <= bound.bound_ns * (1.0 + (gap if own <= bound.covers else 0.0)) for bound in sparing)

    def _features(self, plan: Candidate) -> Covers:
        """Return the plan's features, found once for the incumbent."""
        if self._known is None or self._known[0] is not plan:
            self._known = plan, features_of_candidate(self.setting.problem, plan)
        return self._known[1]
