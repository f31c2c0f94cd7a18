"""Browsers' sessions: a signed cookie that represents a key, and holds no part of it.

The signature covers the key's id, the end of the session and the key's hash: a session ends with its key, and no one
who only reads the database can make one.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Callable

from penstock.service.security.keys import Key

COOKIE = "penstock_session"
_TOKEN = re.compile(r"([0-9a-f]{12})\.([0-9]{1,15})\.([0-9a-f]{64})")

_SLACK_S = 60
"""Most seconds by which clocks of several processes of a service may differ."""


class Sessions:
    """The content of the cookie: made and checked here. ``clock``: seconds since 1970."""

    def __init__(self, secret: str, lifetime_s: float, *, clock: Callable[[], float] = time.time) -> None:
        self._secret, self._clock = secret.encode(), clock
        self.lifetime_s = int(lifetime_s)

    def token(self, key: Key) -> str:
        """Return a session of a key, from now on."""
        until = str(int(self._clock()) + self.lifetime_s)
        return f"{key.id}.{until}.{self._signature(key, until)}"

    def key_id(self, token: str) -> str | None:
        """Return the key of a token; None when it has expired, or is no token at all.

        One that ends later than a new one would is of a time before the clock was set back.
        """
        parts = _TOKEN.fullmatch(token)
        return (
            parts[1] if parts is not None and 0 < int(parts[2]) - self._clock() <= self.lifetime_s + _SLACK_S else None
        )

    def is_of(self, token: str, key: Key) -> bool:
        """Return whether the token was made here for this key."""
        _, until, signature = token.split(".")
        return hmac.compare_digest(signature, self._signature(key, until))

    def _signature(self, key: Key, until: str) -> str:
        return hmac.new(self._secret, f"{key.id}.{until}.{key.hash}".encode(), hashlib.sha256).hexdigest()
