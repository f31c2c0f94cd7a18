"""Time of a kernel on one kind of device: a roofline over its FLOPs and bytes, in which small shapes lose.

``device_table`` has the peaks and the part of them that a large layer reaches. `primitives` has the rule by how much a
small shape misses that part.
"""

from __future__ import annotations

from penstock.facts.device_table import DeviceFacts, Dtype
from penstock.shapes.primitives import rule_of


class Kernels:
    """Times in ns on one kind of device, for tensors of one dtype."""

    def __init__(self, facts: DeviceFacts, dtype: Dtype) -> None:
        self.width = 4 if dtype == "fp32" else 2
        self._launch_ns = facts.launch_ns
        self._rule = rule_of(facts)
        self._flops_per_ns = facts.flops_per_s(dtype) / 1e9
        self.bytes_per_ns = facts.bytes_per_s() / 1e9

    def product_ns(self, rows: float, inner: float, columns: float, *, result_bytes: int | None = None) -> float:
        """Return the time of a product of (rows, inner) and (inner, columns).

        ``result_bytes``: bytes moved per element of the result.
        """
        return max(self._launch_ns, self._multiplied_ns(rows, inner, columns, result_bytes, self._rule.exposed))

    def grouped_product_ns(
        self, groups: int, rows: float, inner: float, columns: float, *, result_bytes: int | None = None
    ) -> float:
        """Return the time of one product for each of ``groups`` in one call, with ``rows`` per group."""
        each = self._multiplied_ns(rows, inner, columns, result_bytes, self._rule.exposed_in_groups)
        return max(self._launch_ns, groups * each)

    def _multiplied_ns(
        self, rows: float, inner: float, columns: float, result_bytes: int | None, exposed: float
    ) -> float:
        out = self.width if result_bytes is None else result_bytes
        moved = self.width * inner * (rows + columns) + out * rows * columns
        return 2 * rows * inner * columns / self._flops_per_ns + exposed * moved / self.bytes_per_ns

    def attention_ns(self, flops: float, rows: float, *, backward: bool, latent: bool = False) -> float:
        """Return the time of flash attention, where ``rows`` counts the queries of all heads together.

        ``latent``: the scores are wider than the values. Backward counts 2.5 times the FLOPs of forward.
        """
        attention = self._rule.backward if backward else self._rule.forward
        rate = attention.rate * (attention.of_latent if latent else 1)
        reached = self._flops_per_ns * rate * rows / (rows + attention.half_rows)
        return max(self._launch_ns, flops / reached)

    def moved_ns(self, size_bytes: float) -> float:
        """Return the time of elementwise operations by the bytes that they read and write together; 0 for no bytes."""
        return max(self._launch_ns, size_bytes / self.bytes_per_ns) if size_bytes else 0.0
