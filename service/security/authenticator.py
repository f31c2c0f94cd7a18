"""Authentication of requests, by the key in ``Authorization`` or a browser's session."""

from __future__ import annotations

import time

from anyio.to_thread import run_sync
from starlette.requests import Request

from penstock.schemas.errors import Forbidden, Unauthenticated
from penstock.service.db.database import Database, DatabaseAway
from penstock.service.security.keys import SHOWN, Key, Keys
from penstock.service.security.principals import EVERYBODY, OPENS, Principal, Scope
from penstock.service.security.rates import OpenRequests, Rates
from penstock.service.security.sessions import COOKIE, Sessions
from penstock.service.settings import Settings, is_loopback

KNOWN_S = 2.0
"""Seconds for which a key is used as it was last read; after that time a revoked key opens nothing any more."""

KEPT = 10_000
"""Keys that are remembered."""

WRONG_PER_S = 2.0
"""Wrong keys that an address may show."""

PREFIX = "psk_"
"""Beginning of every key. Other bearers' tokens, such as a proxy's, are no business of ours."""

HOW = "send the header `Authorization: Bearer psk_…` (PENSTOCK_API_KEY for client and command line)"
MAKE_ONE = "make one with `penstock keys create`"


class Authenticator:
    """The authenticator of requests, which counts them against their keys' limits. For one event loop."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self.is_open = settings.security == "off"
        self.sessions = Sessions(settings.session_secret.get_secret_value(), settings.session_s)
        self._keys = Keys(database)
        self._cached_keys: dict[str, tuple[Key | None, float]] = {}
        self._rates = Rates(settings.requests_per_s)
        self._wrong = Rates(WRONG_PER_S)
        self._open_requests = OpenRequests(settings.max_open_requests)

    async def principal(self, request: Request) -> Principal:
        """Return the principal of a request, which counts against its key's limits.

        Raises Unauthenticated and QuotaExceeded.
        """
        state = request.state
        if not hasattr(state, "principal"):
            principal = await self._anybody(request) if self.is_open else _of(await self._key(request))
            subject = principal.key_id or _address(request)
            if principal.key_id or not is_loopback(subject):
                state.allowance = self._rates.take(subject)
                state.leave = self._open_requests.enter(subject)
            state.principal = principal
            if hasattr(state, "held"):
                state.held(principal)
        principal_of_request: Principal = state.principal
        return principal_of_request

    async def key(self, text: str, address: str) -> Key:
        """Return the key of a text sent from an address. Raises Unauthenticated and QuotaExceeded.

        A wrong key is refused even where no key is needed: it is meant for another service.
        """
        try:
            return await self._shown(text, address)
        except Unauthenticated as wrong:
            if not self.is_open:
                raise
            raise Unauthenticated(
                f"{wrong.detail}; this service requires no key, because its security is off",
                remedy="send this service no key (unset PENSTOCK_API_KEY), or give the address of the service that "
                "the key is for",
            ) from None

    async def _shown(self, text: str, address: str) -> Key:
        shown = SHOWN.fullmatch(text)
        if shown is None:
            raise self._wrong_key(address, "the key does not have the form psk_<id>_<secret>", HOW)
        key = await self._find(shown[1])
        if key is None or not key.has_secret(shown[2]):
            raise self._wrong_key(address, f"the service has no key {shown[1]!r} with this secret", MAKE_ONE)
        return self._valid(key, address)

    async def is_valid(self, key_id: str, *, known_s: float = KNOWN_S) -> bool:
        """Return whether a key still opens anything; while the database is away, as before."""
        try:
            key = await self._find(key_id, known_s)
        except DatabaseAway:
            return True
        return key is not None and key.state == "valid"

    async def _anybody(self, request: Request) -> Principal:
        """Return EVERYBODY, where no key is needed. Raises as ``key`` for a key that is sent."""
        scheme, _, text = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and text.strip().startswith(PREFIX):
            await self.key(text.strip(), _address(request))
        return EVERYBODY

    async def _key(self, request: Request) -> Key:
        address = _address(request)
        header = request.headers.get("authorization")
        if header is None:
            return await self._key_of_session(request.cookies.get(COOKIE, ""), address)
        scheme, _, text = header.partition(" ")
        if scheme.lower() != "bearer":
            raise self._wrong_key(address, "the header Authorization is not of the form `Bearer psk_…`", HOW)
        return await self.key(text.strip(), address)

    async def _key_of_session(self, token: str, address: str) -> Key:
        if not token:
            raise Unauthenticated("this service requires a key, and none was sent", remedy=HOW)
        key_id = self.sessions.key_id(token)
        key = None if key_id is None else await self._find(key_id)
        if key is None or not self.sessions.is_of(token, key):
            raise self._wrong_key(address, "this browser's session has expired", "sign in again at /sign-in")
        return self._valid(key, address)

    def _valid(self, key: Key, address: str) -> Key:
        if key.state != "valid":
            was = "has expired" if key.state == "expired" else "was revoked"
            raise self._wrong_key(address, f"key {key.id!r} ({key.name}) {was}", MAKE_ONE)
        return key

    async def _find(self, key_id: str, known_s: float = KNOWN_S) -> Key | None:
        cached_key, read_at = self._cached_keys.get(key_id, (None, float("-inf")))
        if time.monotonic() - read_at < known_s:
            return cached_key
        key = await run_sync(self._keys.look_up, key_id)
        if len(self._cached_keys) >= KEPT:
            self._cached_keys.clear()
        self._cached_keys[key_id] = key, time.monotonic()
        return key

    def _wrong_key(self, address: str, detail: str, remedy: str) -> Unauthenticated:
        """Return the error for a wrong key. Raises QuotaExceeded instead when an address shows wrong keys too often."""
        self._wrong.take(address)
        return Unauthenticated(detail, remedy=remedy)


def require(principal: Principal, scope: Scope) -> None:
    """Raise Forbidden when the principal's key does not open ``scope``."""
    if scope not in principal.scopes:
        having = " or ".join(repr(name) for name, opened in OPENS.items() if scope in opened)
        raise Forbidden(
            f"key {principal.key_id!r} does not permit this request, which needs scope {having}",
            remedy="make another key: `penstock keys create --scope …`",
        )


def require_node(principal: Principal, name: str) -> None:
    """Raise Forbidden when the principal's key is for the agent of another node."""
    if principal.node is not None and principal.node != name:
        raise Forbidden(
            f"key {principal.key_id!r} is for the agent {principal.node!r}, not for {name!r}",
            remedy=f"make another key: `penstock keys create --scope agent --node {name} --name …`",
        )


def _of(key: Key) -> Principal:
    opened = frozenset[str]().union(*(OPENS.get(scope, frozenset()) for scope in key.scopes))
    return Principal(key.tenant, key.id, opened, key.max_running, key.max_queued, key.node)


def _address(request: Request) -> str:
    return request.client.host if request.client is not None else "127.0.0.1"
