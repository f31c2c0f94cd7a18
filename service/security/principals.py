"""Principals of requests: a tenant, the key that was shown, and the scopes that this key opens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.service.db.tables import DEFAULT_TENANT

Scope = Literal["read", "solve", "run", "agent", "admin"]

OPENS: dict[str, frozenset[str]] = {
    "read": frozenset({"read"}),
    "solve": frozenset({"read", "solve"}),
    "run": frozenset({"read", "run"}),
    "agent": frozenset({"agent"}),
    "admin": frozenset({"read", "solve", "run", "agent", "admin"}),
}
"""Scopes that each scope of a key opens: requesting plans or runs includes reading results; an agent reads nothing."""


@dataclass(frozen=True, slots=True)
class Principal:
    """The author of a request. ``key_id`` is None where no key is needed.

    ``max_running`` and ``max_queued`` limit the jobs of the key; None: they are not limited. ``node``: the only agent
    that it syncs, None for any.
    """

    tenant: str
    key_id: str | None
    scopes: frozenset[str]
    max_running: int | None = None
    max_queued: int | None = None
    node: str | None = None


def service_itself(tenant: str) -> Principal:
    """Return the principal of the service itself, working for a tenant: it has no key and no limits."""
    return Principal(tenant, None, frozenset())


EVERYBODY = Principal(DEFAULT_TENANT, None, OPENS["admin"])
"""Principal of every request to a service that needs no keys."""
