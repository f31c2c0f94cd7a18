"""Incoming requests: one whose exact bytes were answered before is not parsed again.

Reading a profile of sixty layers and hashing its canonical form costs some milliseconds, the digest of its bytes a few
microseconds. So the key of an answer is remembered under that digest; whether that answer (still) exists is looked up
in the database each time.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict

from penstock.schemas.request import PlanRequest
from penstock.service import metrics
from penstock.service.db.document_store import Stores
from penstock.service.jobs.submit import JobOptions, Planning, Submitted
from penstock.service.parsing import parse
from penstock.service.security.principals import Principal

REMEMBERED = 10_000
"""Bodies whose keys are remembered, some 250 bytes each."""


class Submissions:
    """A cache that answers known bodies, and passes the others on. Thread-safe."""

    def __init__(self, stores: Stores, planning: Planning) -> None:
        self._stores, self._planning = stores, planning
        self._keys: OrderedDict[tuple[str, bytes], tuple[str, str]] = OrderedDict()
        self._lock = threading.Lock()

    def submit(self, principal: Principal, body: bytes, options: JobOptions) -> Submitted:
        """Submit a request in JSON; raises as `Planning.submit`, and InvalidDocument."""
        known_by = principal.tenant, hashlib.sha256(body).digest()
        with self._lock:
            request_hash, key = self._keys.get(known_by, ("", ""))
        store = self._stores.of(principal.tenant)
        answer = store.answer(key) if key else None
        if answer is not None:
            metrics.cache_answers.labels("hit").inc()
            return Submitted(answer, request_hash, key)
        request = parse(PlanRequest, body, store.resolve)
        submitted = self._planning.submit(principal, request, options)
        self._remember(known_by, submitted)
        return submitted

    def _remember(self, known_by: tuple[str, bytes], submitted: Submitted) -> None:
        with self._lock:
            self._keys[known_by] = submitted.request_hash, submitted.cache_key
            self._keys.move_to_end(known_by)
            if len(self._keys) > REMEMBERED:
                self._keys.popitem(last=False)
