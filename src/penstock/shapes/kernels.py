"""How long a kernel takes on one kind of device: a roofline over its FLOPs and bytes, in which small shapes lose.

Peaks and what a large layer reaches of them are those of ``device_table``. By how much a product or attention misses
it was fitted to SimuMax's measurements (MooreThreads/SimuMax, release 1.2, Apache-2.0) on B200 and A100-PCIe:
697 matrix products of 7 GFLOP to 69 TFLOP, and flash attention of 4 to 128 heads. With each device's own efficiency
(0.51 and 0.78 of the peak) a product is off by 5 % and 2 % in the median, 10 % and 4 % in the mean, and one in ten by
more than 32 % and 11 %; attention forward by 12 %, backward by 10 % in the mean. Products of groups (experts) have a
rule of their own, fitted to 120 products of 20 to 256 groups: off by 8 % on B200 and 1 % on A100 in the median, 11 %
and 2 % in the mean, and one in ten by more than 23 % and 5 %.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.executor.profiling.device_table import DeviceFacts, Dtype

_EXPOSED = 0.5
"""Of the time that the bytes of a matrix product take: what its arithmetic does not hide."""

_EXPOSED_IN_GROUPS = {"A100": 0.43}
_EXPOSED_IN_OTHER_GROUPS = 0.94
"""The same for products of groups, by kind; where a kind was not measured, as on B200."""


class _Attention(NamedTuple):
    """Flash attention: its rate in a large layer over that of matrix products, and the rows that reach half of it.

    A row is a query of one head. Blocks of rows are what the kernel gives to processors, so few rows leave some idle.
    """

    rate: float
    half_rows: int


_FORWARD, _BACKWARD = _Attention(1.0, 55_000), _Attention(0.85, 16_000)


class Kernels:
    """Times in ns on one kind of device, for tensors of one dtype."""

    def __init__(self, facts: DeviceFacts, dtype: Dtype) -> None:
        self.width = 4 if dtype == "fp32" else 2
        self._launch_ns = facts.launch_ns
        self._exposed_in_groups = _EXPOSED_IN_GROUPS.get(facts.kind, _EXPOSED_IN_OTHER_GROUPS)
        self._flops_per_ns = facts.flops_per_s(dtype) / 1e9
        self.bytes_per_ns = facts.bytes_per_s() / 1e9

    def product_ns(self, rows: float, inner: float, columns: float, *, result_bytes: int | None = None) -> float:
        """A product of (rows, inner) and (inner, columns); ``result_bytes``: moved per element of the result."""
        return max(self._launch_ns, self._multiplied_ns(rows, inner, columns, result_bytes, _EXPOSED))

    def grouped_product_ns(
        self, groups: int, rows: float, inner: float, columns: float, *, result_bytes: int | None = None
    ) -> float:
        """As many products as ``groups`` in one call, ``rows`` being those of one group."""
        each = self._multiplied_ns(rows, inner, columns, result_bytes, self._exposed_in_groups)
        return max(self._launch_ns, groups * each)

    def _multiplied_ns(
        self, rows: float, inner: float, columns: float, result_bytes: int | None, exposed: float
    ) -> float:
        out = self.width if result_bytes is None else result_bytes
        moved = self.width * inner * (rows + columns) + out * rows * columns
        return 2 * rows * inner * columns / self._flops_per_ns + exposed * moved / self.bytes_per_ns

    def attention_ns(self, flops: float, rows: float, *, backward: bool) -> float:
        """Flash attention, ``rows`` being the queries of all heads together."""
        known = _BACKWARD if backward else _FORWARD
        reached = self._flops_per_ns * known.rate * rows / (rows + known.half_rows)
        return max(self._launch_ns, flops / reached)

    def moved_ns(self, size_bytes: float) -> float:
        """Operations element by element, by the bytes that they read and write together; 0 for none."""
        return max(self._launch_ns, size_bytes / self.bytes_per_ns) if size_bytes else 0.0
