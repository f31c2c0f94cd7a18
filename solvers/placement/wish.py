"""What a job may take, and what is good for it: less cost is better, whatever the objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.placement.site import Chosen, Site

"""Longer than any step."""

Objective = Literal["throughput", "throughput_per_device", "fastest_within_budget"]


@dataclass(frozen=True, slots=True)
class Wish:
    """Between ``least`` and ``most`` hosts, within a budget of devices, price per hour, and time per global batch."""

    objective: Objective = "throughput"
    least: int = 1
    most: int | None = None
    devices: int | None = None
    price: float | None = None
    deadline_ns: int | None = None

    @property
    def cheapest(self) -> bool:
        """Whether the fewest devices that keep the deadline are wanted, and not the fastest plan."""
        return self.objective == "fastest_within_budget" and self.deadline_ns is not None

    def within(self, site: Site, chosen: Chosen) -> Chosen | None:
        """The set without as many devices of its last host as the budget does not allow; None where none are left."""
        if not chosen:
            return None
        (last, count), before = chosen[-1], chosen[:-1]
        while count > 0:
            taken = (*before, (last, count))
            price = price_of(site, taken)
            too_many = self.devices is not None and sum(number for _host, number in taken) > self.devices
            too_dear = self.price is not None and (price is None or price > self.price)
            if not too_many and not too_dear:
                return taken
            count -= 1
        return None

    def keeps(self, time_ns: int) -> bool:
        """Whether a step of so long keeps the deadline."""
        return self.deadline_ns is None or time_ns <= self.deadline_ns

    def cost(self, time_ns: int, devices: int) -> int:
        """Exact, of a step of so long on so many devices."""
        if self.cheapest:
            return devices
        return time_ns * devices if self.objective == "throughput_per_device" else time_ns

    def longest_ns(self, cost: int, devices: int) -> int:
        """A step of so long on so many devices costs as much, and keeps the deadline; below 0: none does."""
        if self.cheapest and devices > cost:
            return -1
        allowed = NEVER_NS if self.deadline_ns is None else self.deadline_ns
        if self.cheapest:
            return allowed
        return min(allowed, cost // devices if self.objective == "throughput_per_device" else cost)

    def value(self, cost: int, samples: int) -> float:
        """What the objective measures: samples per second, samples per second and device, or devices less than none."""
        return -float(cost) if self.cheapest else samples / cost * 1e9


def price_of(site: Site, chosen: Chosen) -> float | None:
    """Per hour; None where a device has no price."""
    prices: Sequence[float | None] = [site.devices[device].price for device in site.devices_of(chosen)]
    return None if any(price is None for price in prices) else sum(price or 0.0 for price in prices)
