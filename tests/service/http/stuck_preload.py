"""A module whose import never ends, and lets no other thread of Python run meanwhile, as a compiler does."""

from __future__ import annotations

import sys

sys.stderr.write("stuck\n")
sys.stderr.flush()
sum(range(10**15))
