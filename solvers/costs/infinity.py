"""What stands for no time and for no limit: the two infinities of the solvers, both int64.

Three of either add up to less than 2^63. Code that adds up more of them, for example one for each of many stages or
micro-batches, clamps its terms to ``NEVER_NS // n`` first, with n terms at most (``FAR_NS``).
"""

from __future__ import annotations

NEVER_NS = 2**61
"""The time, in ns, of what never happens and the duration of what nothing connects; no plan takes as long."""

FAR_NS = NEVER_NS // 2**16
"""What terms of sums are clamped to where up to 2^16 of them are added: about ten hours."""

UNLIMITED = 2**61
"""A number of bytes or of micro-batches that stands for as many as one likes; no device and no request has as many."""
