"""Measurements of `gpu_kernels` on an H100, as rows that rules are fitted to, and the errors of H100's rule.

All files of ``benchmarks/measured`` count together. The time between two events with nothing between them is
subtracted from each time. It is the fact ``between_events``, or, in files without it, the limit of the times of small
sums in the cache, less a kernel in a graph.
"""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from benchmark_rows import Rows, read
from kernel_fits import MOST_WORSE, Row, attention_row, compare, compare_at_share, facts_of, product_row

from penstock.facts.device_table import DeviceFacts
from penstock.shapes.kernels import Kernels
from penstock.shapes.primitives import LEAST_ATTENTION_ROWS, LEAST_FLOPS, rule_of

KIND = "H100"
LEAST_GROUPS = 4
"""The fewest groups of a call that the rule is fitted to: fewer leave processors idle."""
_MEASURED = Path(__file__).resolve().parent / "measured"
_SHORT = ("products", "attention", "moved", "grouped")
"""The sections of single kernels, from whose times the time between events is subtracted."""
_CACHED_BYTES = 2**25
"""The most bytes of the three tensors of a sum that stays in the cache of 50 MiB."""
_LARGE_BYTES = 2**26
"""The bytes from which on memory bounds an operation."""
_VALUES = 128
"""The width of a value where `gpu_kernels` measures attention."""
_LAUNCH_OFF = 0.2
"""The tolerance of the least time of a kernel, as a share of it: small kernels take 1 to 5 µs."""


def measured() -> dict[str, Rows]:
    """Return the sections of all files together, times without the time between events."""
    merged: dict[str, Rows] = {}
    for path in sorted(_MEASURED.glob("h100*.json")):
        _about, sections = read(path)
        between = _between_events_ns(sections)
        for name, section in sections.items():
            existing = merged.get(name, Rows(section.columns, ()))
            times = [column == "ns" or column.endswith("_ns") for column in section.columns] if name in _SHORT else ()
            rows = (
                [value - between if time else value for value, time in zip_longest(row, times)] for row in section.rows
            )
            merged[name] = Rows(section.columns, (*existing.rows, *rows))
    return merged


def _between_events_ns(sections: dict[str, Rows]) -> float:
    facts = {row["fact"]: float(row["ns"]) for row in sections["facts"].named()}
    if "between_events" in facts:
        return facts["between_events"]
    sums = [row for row in sections["moved"].named() if row["operation"] == "add" and row["bytes"] <= _CACHED_BYTES]
    _slope, least = np.polyfit([row["bytes"] for row in sums], [row["ns"] for row in sums], 1)
    return float(least) - facts["kernel_in_graph"]


def product_rows(sections: dict[str, Rows], facts: DeviceFacts, *, small: bool = False) -> list[Row]:
    """Return products at least of the size from which on other kinds were measured, or the smaller ones."""
    rows = [
        _product(1, (each["rows"], each["inner"], each["columns"]), each["ns"], facts)
        for each in sections["products"].named()
    ]
    return [row for row in rows if (row.ranged < LEAST_FLOPS) == small]


def group_rows(sections: dict[str, Rows], facts: DeviceFacts, *, few: bool = False) -> list[Row]:
    """Return products of at least `LEAST_GROUPS` groups, or of fewer."""
    rows = [each for each in sections["grouped"].named() if (each["groups"] < LEAST_GROUPS) == few]
    return [
        _product(each["groups"], (each["rows"], each["inner"], each["columns"]), each["ns"], facts, grouped=True)
        for each in rows
    ]


def _product(
    groups: int, sizes: tuple[int, int, int], time_ns: float, facts: DeviceFacts, *, grouped: bool = False
) -> Row:
    rows, inner, columns = sizes
    row = product_row(groups, sizes, 2, 2 * groups * rows * inner * columns / time_ns, facts, grouped=grouped)
    return row._replace(ranged=min(sizes)) if grouped else row


def attention_rows(
    sections: dict[str, Rows], facts: DeviceFacts, kernel: str, *, backward: bool, small: bool = False
) -> list[Row]:
    """Return attention by one kernel: of at least the rows from which on the rule is fitted, or of fewer."""
    column = "backward_ns" if backward else "forward_ns"
    rows = [
        attention_row(
            (each["batch"], each["length"], each["heads"], each["score_width"], _VALUES),
            each[column],
            facts,
            backward=backward,
        )
        for each in sections["attention"].named()
        if each["kernel"] == kernel
    ]
    return [row for row in rows if (row.ranged < LEAST_ATTENTION_ROWS) == small]


def compare_measured() -> int:
    """Print how H100's rule does on its own kernels; return how many of its numbers differ from them."""
    sections, facts = measured(), facts_of(KIND)
    shares: dict[str, float] = {}
    wrong = compare("product", {KIND: product_rows(sections, facts)}, shares, shared=True)
    wrong += compare_at_share("groups", KIND, group_rows(sections, facts), shares[KIND])
    for name, backward in (("attention forward", False), ("attention backward", True)):
        rows = attention_rows(sections, facts, "default", backward=backward)
        wrong += compare(name, {KIND: rows}, shares, shared=False)
    for name, rows in (
        (f"product below {LEAST_FLOPS:.2g} FLOP", product_rows(sections, facts, small=True)),
        (f"fewer than {LEAST_GROUPS} groups", group_rows(sections, facts, few=True)),
        *(
            (f"attention {name}", attention_rows(sections, facts, kernel, backward=backward, small=small))
            for name, kernel, backward, small in (
                ("forward, few rows", "default", False, True),
                ("backward, few rows", "default", True, True),
                ("forward, flash", "flash", False, False),
                ("backward, flash", "flash", True, False),
            )
        ),
    ):
        off = [row.shipped(Kernels(facts, "bf16")) / row.measured_ns - 1 for row in rows]
        print(f"{name:32} {KIND:5} {len(rows):4} shapes, not fitted: the rule is {median(off):+.0%} off in the median")
    wrong += _compare_latent(sections, facts)
    return wrong + _compare_table(sections, facts, shares[KIND])


def _compare_latent(sections: dict[str, Rows], facts: DeviceFacts) -> int:
    """Print the rate of latent attention as a ratio of other attention's; return how often the rule differs."""
    wrong = 0
    rule = rule_of(facts)
    for name, backward in (("forward", False), ("backward", True)):
        attention = rule.backward if backward else rule.forward
        reached = {
            kernel: median(
                row.shipped(Kernels(facts, "bf16")) / row.measured_ns
                for row in attention_rows(sections, facts, kernel, backward=backward)
            )
            for kernel in ("default", "latent")
        }
        ratio = reached["latent"] * attention.of_latent / reached["default"]
        wrong += _checked(f"attention {name}, latent", ratio, attention.of_latent, MOST_WORSE)
    return wrong


def _compare_table(sections: dict[str, Rows], facts: DeviceFacts, share: float) -> int:
    """Compare the table of devices at the level of kernels; return how many numbers are not the measured ones."""
    moved = list(sections["moved"].named())
    plain = [row for row in moved if row["operation"] in ("add", "silu") and row["bytes"] >= _LARGE_BYTES]
    reached = median(row["bytes"] / row["ns"] for row in plain) * 1e9 / facts.memory_bandwidth_bytes_per_s
    small = median(
        row["ns"] for row in moved if row["bytes"] <= _CACHED_BYTES // 4 and "backward" not in row["operation"]
    )
    timed: dict[str, Any] = {row["fact"]: row["ns"] for row in sections["facts"].named()}
    single = 2 * 4096**3 / timed["fp32_product_4096"] * 1e9 / facts.peak_flops_per_s["fp32"]
    wrong = _checked("products, of the peak", share, facts.compute_efficiency["bf16"], MOST_WORSE)
    wrong += _checked("a product in fp32, of the peak", single, facts.compute_efficiency["fp32"], MOST_WORSE)
    wrong += _checked("element-wise, of the bandwidth", reached, facts.memory_efficiency, MOST_WORSE)
    wrong += _checked("least of a kernel, ns", small, facts.launch_ns, _LAUNCH_OFF * small)
    for operation in ("rms_norm", "rms_norm_backward", "layer_norm", "layer_norm_backward"):
        rows = [row for row in moved if row["operation"] == operation and row["bytes"] >= _LARGE_BYTES]
        slower = median(row["ns"] / row["bytes"] for row in rows) * facts.bytes_per_s() / 1e9
        print(f"{operation:32} {KIND:5} {slower:6.2f} times what its bytes take at that bandwidth, in the median")
    return wrong


def _checked(what: str, result: float, ours: float, most: float) -> int:
    off = abs(result - ours) > most
    print(f"{what:32} {KIND:5} {result:6.3f} measured, {ours} shipped{'  NOT IT' if off else ''}")
    return int(off)
