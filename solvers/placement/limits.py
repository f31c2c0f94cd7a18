"""A job's limits and its objective: a lower cost is better, whatever the objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.placement.site import Chosen, Site

Objective = Literal["throughput", "throughput_per_device", "fastest_within_budget"]


@dataclass(frozen=True, slots=True)
class PlacementLimits:
    """Limits of a job: ``least`` to ``most`` hosts, a budget of devices, a price per hour, a time per global batch."""

    objective: Objective = "throughput"
    least: int = 1
    most: int | None = None
    devices: int | None = None
    price: float | None = None
    deadline_ns: int | None = None

    @property
    def cheapest(self) -> bool:
        """Return whether the objective is the fewest devices that keep the deadline, not the fastest plan."""
        return self.objective == "fastest_within_budget" and self.deadline_ns is not None

    def within(self, site: Site, chosen: Chosen) -> Chosen | None:
        """Return the set without the devices of its last host that exceed the budget; None where none are left."""
        if not chosen:
            return None
        (last, count), before = chosen[-1], chosen[:-1]
        while count > 0:
            smaller = (*before, (last, count))
            price = price_of(site, smaller)
            too_many = self.devices is not None and sum(number for _host, number in smaller) > self.devices
            too_dear = self.price is not None and (price is None or price > self.price)
            if not too_many and not too_dear:
                return smaller
            count -= 1
        return None

    def keeps(self, time_ns: int) -> bool:
        """Return whether a step of ``time_ns`` keeps the deadline."""
        return self.deadline_ns is None or time_ns <= self.deadline_ns

    def cost(self, time_ns: int, devices: int) -> int:
        """Return the exact cost of a step of ``time_ns`` on ``devices`` devices."""
        if self.cheapest:
            return devices
        return time_ns * devices if self.objective == "throughput_per_device" else time_ns

    def longest_ns(self, cost: int, devices: int) -> int:
        """Return the longest step on ``devices`` devices within this cost and the deadline; negative: none."""
        if self.cheapest and devices > cost:
            return -1
        allowed = NEVER_NS if self.deadline_ns is None else self.deadline_ns
        if self.cheapest:
            return allowed
        return min(allowed, cost // devices if self.objective == "throughput_per_device" else cost)

    def value(self, cost: int, samples: int) -> float:
        """Return the objective's value: samples per second, samples per second and device, or minus the devices."""
        return -float(cost) if self.cheapest else samples / cost * 1e9


def price_of(site: Site, chosen: Chosen) -> float | None:
    """Return the price per hour; None where a device has no price."""
    prices: Sequence[float | None] = [site.devices[device].price for device in site.devices_of(chosen)]
    return None if any(price is None for price in prices) else sum(price or 0.0 for price in prices)
