"""API keys: made, listed, rotated, revoked, and looked up by what is shown.

A key reads ``psk_<id>_<secret>``. The id finds its row; of the secret, 256 random bits, only the SHA-256 is kept.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import sqlalchemy as sa

from penstock.schemas.errors import Conflict, InvalidDocument, NotFound
from penstock.service.db.database import Database, DatabaseAway
from penstock.service.db.tables import api_keys, now_ms
from penstock.service.db.upkeep.clocks import ROUNDING_MS, set_right
from penstock.service.security.principals import OPENS

SHOWN = re.compile(r"psk_([0-9a-f]{12})_([0-9a-f]{64})")
NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Pattern of an agent's name (``quantities.AgentName``)."""
TENANT = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
USE_TOLD_MS = 60_000
"""Precision of ``last_used_ms``: a busy key does not write at each request."""

KeyState = Literal["valid", "expired", "revoked"]


@dataclass(frozen=True)
class Key:
    """A key as it is known here: everything but its secret. ``state`` is as of when the row was read."""

    id: str
    tenant: str
    name: str
    scopes: tuple[str, ...]
    created_ms: int
    expires_ms: int | None
    revoked_ms: int | None
    last_used_ms: int | None
    max_running: int | None
    max_queued: int | None
    node: str | None
    end_set_ms: int | None
    state: KeyState
    hash: str = field(repr=False)

    def has_secret(self, secret: str) -> bool:
        """Return whether this is the key's secret; both answers take the same time."""
        return hmac.compare_digest(self.hash, digest(secret))


def digest(secret: str) -> str:
    """Return the digest that is stored in place of a secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


class Keys:
    """The keys in the database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(
        self,
        tenant: str,
        name: str,
        scopes: Collection[str],
        *,
        lifetime_s: float | None = None,
        max_running: int | None = None,
        max_queued: int | None = None,
        node: str | None = None,
    ) -> tuple[Key, str]:
        """Create a key, and return it with its text, which is shown only now. ``node``: the one agent that it is for.

        Raises InvalidDocument.
        """
        _check(tenant, name, scopes)
        if node is not None and (set(scopes) != {"agent"} or not NODE.fullmatch(node)):
            raise InvalidDocument(
                f"a key for node {node!r} needs a valid node name, and scope 'agent' alone",
                remedy="give --scope agent and no other, and as --node up to 100 of A-Z, a-z, 0-9, '.', '_' and '-', "
                "beginning with a letter or a digit",
            )
        values: dict[str, Any] = {"tenant": tenant, "name": name, "scopes": sorted(set(scopes)), "node": node}
        limits = {"max_running": max_running, "max_queued": max_queued}
        with self._database.write() as connection:
            return _insert(connection, values | limits, lifetime_s)

    def listed(self, tenant: str | None = None) -> list[Key]:
        """Return all keys, or all of a tenant's keys: by tenant, the oldest first."""
        query = sa.select(api_keys, now_ms().label("now")).order_by(api_keys.c.tenant, api_keys.c.created_ms)
        if tenant is not None:
            query = query.where(api_keys.c.tenant == tenant)
        with self._database.read() as connection:
            return [_key(row) for row in connection.execute(query).mappings()]

    def number_valid(self) -> int:
        """Return the number of keys that are neither expired nor revoked."""
        lasting = sa.or_(api_keys.c.expires_ms.is_(None), api_keys.c.expires_ms > now_ms())
        query = sa.select(sa.func.count()).where(api_keys.c.revoked_ms.is_(None), lasting)
        with self._database.read() as connection:
            return connection.scalar(query) or 0

    def rotate(self, key_id: str, overlap_s: float) -> tuple[Key, str]:
        """Replace a key: the new one has another id and secret, and the old one ends after ``overlap_s``.

        It lives as long as the old one was to live when it was made. Raises NotFound, and Conflict for a key that is
        not valid any more.
        """
        with self._database.write() as connection:
            old = _one(connection, key_id)
            if old.state != "valid":
                raise Conflict(
                    f"key {key_id!r} is {old.state} and cannot be replaced",
                    remedy="make a new key: `penstock keys create`",
                )
            same = ("tenant", "name", "max_running", "max_queued", "node")
            values = {name: getattr(old, name) for name in same} | {"scopes": list(old.scopes)}
            lifetime_s = None if old.expires_ms is None else (old.expires_ms - old.created_ms) / 1000
            ends: Any = now_ms() + int(overlap_s * 1000)
            if old.expires_ms is not None:
                ends = sa.case((ends < old.expires_ms, ends), else_=old.expires_ms)
            revoked_ms = None if overlap_s > 0 else now_ms()  # what ends at once does so by any clock
            connection.execute(
                api_keys.update()
                .where(api_keys.c.id == key_id)
                .values(expires_ms=ends, end_set_ms=now_ms(), revoked_ms=revoked_ms)
            )
            return _insert(connection, values, lifetime_s)

    def revoke(self, key_id: str) -> Key:
        """End a key at once; one that is revoked already stays so. Raises NotFound."""
        with self._database.write() as connection:
            if _one(connection, key_id).revoked_ms is None:
                connection.execute(api_keys.update().where(api_keys.c.id == key_id).values(revoked_ms=now_ms()))
            return _one(connection, key_id)

    def look_up(self, key_id: str) -> Key | None:
        """Return a key that was shown, noted as used; a database that cannot be written locks no key out."""
        row = self._read(key_id)
        if row is not None and max(row["created_ms"], row["end_set_ms"] or 0) > row["now"] + ROUNDING_MS:
            with suppress(DatabaseAway):
                set_right(self._database)
            row = self._read(key_id)
        if row is None:
            return None
        if row["last_used_ms"] is None or abs(row["now"] - row["last_used_ms"]) > USE_TOLD_MS:
            with suppress(DatabaseAway), self._database.write() as connection:
                connection.execute(api_keys.update().where(api_keys.c.id == key_id).values(last_used_ms=now_ms()))
        return _key(row)

    def _read(self, key_id: str) -> sa.RowMapping | None:
        query = sa.select(api_keys, now_ms().label("now")).where(api_keys.c.id == key_id)
        with self._database.read() as connection:
            return connection.execute(query).mappings().first()


def unheeded(database: Database) -> str | None:
    """Return a warning where no key is needed although valid keys exist; None without such keys."""
    if not (number := Keys(database).number_valid()):
        return None
    some = "1 key" if number == 1 else f"{number} keys"
    return (
        f"security is off: {some} of this database {'is' if number == 1 else 'are'} not asked for, any caller is let in"
    )


UNHEEDED_REMEDY = 'set security = "keys" (PENSTOCK_SECURITY=keys), or revoke them: penstock keys revoke'


def _check(tenant: str, name: str, scopes: Collection[str]) -> None:
    if not TENANT.fullmatch(tenant):
        raise InvalidDocument(
            f"{tenant!r} is not a valid tenant name",
            remedy="give up to 64 of a-z, 0-9, '.', '_' and '-', beginning with a letter or a digit",
        )
    if not 1 <= len(name) <= 128 or not name.isprintable():
        raise InvalidDocument(f"{name!r} is not a valid key name; give 1 to 128 printable characters")
    unknown = sorted(set(scopes) - OPENS.keys())
    if unknown or not scopes:
        wrong = f"unknown scope {', '.join(map(repr, unknown))}" if unknown else "a key needs a scope"
        raise InvalidDocument(f"{wrong}; the scopes are {', '.join(OPENS)}")


def _insert(connection: sa.Connection, values: dict[str, Any], lifetime_s: float | None) -> tuple[Key, str]:
    key_id, secret = secrets.token_hex(6), secrets.token_hex(32)
    expires: Any = None if lifetime_s is None else now_ms() + int(lifetime_s * 1000)
    new = {"id": key_id, "hash": digest(secret), "created_ms": now_ms(), "expires_ms": expires}
    connection.execute(api_keys.insert().values(**values, **new))
    return _one(connection, key_id), f"psk_{key_id}_{secret}"


def _one(connection: sa.Connection, key_id: str) -> Key:
    query = sa.select(api_keys, now_ms().label("now")).where(api_keys.c.id == key_id)
    row = connection.execute(query).mappings().first()
    if row is None:
        raise NotFound(f"there is no key {key_id!r}", remedy="`penstock keys list` lists them by their ids")
    return _key(row)


def _key(row: sa.RowMapping) -> Key:
    state: KeyState = "valid"
    if row["revoked_ms"] is not None:
        state = "revoked"
    elif row["expires_ms"] is not None and row["expires_ms"] <= row["now"]:
        state = "expired"
    values: dict[str, Any] = {name: row[name] for name in api_keys.c.keys()}  # noqa: SIM118  (a collection of columns)
    scopes: Sequence[str] = values.pop("scopes")
    return Key(**values, scopes=tuple(scopes), state=state)
