"""Who asks: a tenant, the key that was shown, and what that key opens."""

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
"""What each scope of a key opens: who asks for plans or starts runs reads what came of it; an agent reads nothing."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Who makes a request. ``key_id`` is None where no key is needed.

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
    """The service itself, working for a tenant: it has no key and no limits."""
    return Principal(tenant, None, frozenset())


EVERYBODY = Principal(DEFAULT_TENANT, None, OPENS["admin"])
"""Whoever asks a service that asks for no keys."""
