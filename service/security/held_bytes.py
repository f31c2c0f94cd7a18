"""Bytes of bodies that all requests under way hold together, so that many large ones do not fill the memory."""

from __future__ import annotations

from collections import Counter

from penstock.schemas.amounts import exact
from penstock.service.problems import RETRY_AFTER_S, Refusal

FREE_BYTES = 2**16
"""Bytes of each body that are not counted: requests are limited in number, and small ones never wait for large ones."""


class TooMuchHeld(Refusal):
    """Bodies of requests under way hold all the memory that they may."""

    title = "Too many large bodies at once"
    code = "too-many-bytes"
    status = 503
    exit_code = 69


class HeldBytes:
    """The count of what bodies hold beyond their free bytes, half of ``most`` for each tenant. For one event loop."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._counted: Counter[str] = Counter()

    def grow(self, tenant: str, before: int, after: int) -> int:
        """Count a body of a tenant that grows; return by how much the count grew. Raises TooMuchHeld."""
        more = max(0, after - FREE_BYTES) - max(0, before - FREE_BYTES)
        if self._counted.total() + more > self.most or (self._counted[tenant] + more) * 2 > self.most:
            raise TooMuchHeld(
                f"request bodies in progress hold {exact(self._counted.total())}, {exact(self._counted[tenant])} of "
                "them for this tenant; "
                f"the limit is {exact(self.most)} for all tenants, and half of that for one",
                remedy="send the request again when others have ended, or have the operator raise max_held_body_bytes",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        self._counted[tenant] += more
        return more

    def release(self, tenant: str, number: int) -> None:
        """Count bytes as free again, when their request is over."""
        self._counted[tenant] -= number
        self._counted += Counter()  # forgets tenants that hold none
