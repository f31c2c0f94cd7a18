"""Sentinel values for unreachable times and unlimited quantities (int64).

Three of either add up to less than 2^63. Code that adds up more of them, for example one for each of many stages or
micro-batches, clamps its terms to ``NEVER_NS // n`` first, with n terms at most (``FAR_NS``).
"""

from __future__ import annotations

NEVER_NS = 2**61
"""The time, in ns, of an event that never happens, and the duration of a missing connection; longer than any plan."""

FAR_NS = NEVER_NS // 2**16
"""Upper limit of the terms of sums of up to 2^16 terms: about ten hours, in ns."""

UNLIMITED = 2**61
"""An unlimited number of bytes or of micro-batches; larger than any device's memory or any request's number."""
