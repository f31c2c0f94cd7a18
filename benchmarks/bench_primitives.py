"""The rules of ``penstock.shapes.primitives`` fitted again to published times of kernels, and their errors.

    python benchmarks/bench_primitives.py [FOLDER [OPENXLA]]

H100's rule is fitted to our own times (``benchmarks/measured``) and printed first. FOLDER holds SimuMax's system
files of B200 and of A100-PCIe (MooreThreads/SimuMax, release 1.2, Apache-2.0), OPENXLA is
``xla/service/gpu/model/matmul_interpolator_data.h`` of openxla/xla (Apache-2.0): products measured on compute
capability 9.0, which no number was fitted to. Neither is part of this repository.

A time is linear in a rule's numbers: FLOPs over the peak, and the bytes of a product or the FLOPs per row of attention.
The fit has the least mean relative error; products share the exposed bytes of both kinds, each kind counting alike.
Errors are printed on shapes that were held out: five times a fifth of them, all passes of a layer together.
The exit status is 1 where a shipped rule, rounded as it is, is worse than the fit by more than a point of mean error,
and where the table of devices differs from the measurements of B200, its collectives and H100's kernels.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from kernel_fits import (
    MOST_WORSE,
    Row,
    attention_row,
    compare,
    product_row,
    shipped_errors,
    square_flops,
    summary,
)
from measured_kernels import compare_measured

from penstock.facts.device_table import DeviceFacts, device_facts
from penstock.importers.cluster import hardware
from penstock.shapes.kernels import Kernels
from penstock.shapes.primitives import LEAST_FLOPS, rule_of

FILES = {"B200": "simumax-b200_bf16_ceperm.json", "A100": "simumax-a100_pcie.json"}
_BYTES = {"bf16": 2, "fp32": 4}


def _fields(text: str) -> dict[str, str]:
    return {name.strip(): value.strip(" :") for name, value in (each.split("=") for each in text.split(","))}


def product_rows(measured: dict[str, Any], facts: DeviceFacts) -> list[Row]:
    """Return products of ``b=1, m=4096, k=8192, n=10240, layout=TN, accumulate=False, out_dtype=bf16``."""
    rows = []
    for text, share in measured["accurate_efficient_factor"].items():
        fields = _fields(text)
        m, k, n = (int(fields[name]) for name in "mkn")
        result = _BYTES[fields["out_dtype"]] * (2 if fields["accumulate"] == "True" else 1)
        rows.append(product_row(1, (m, k, n), result, share * measured["tflops"] * 1e3, facts))
    return rows


def group_rows(measured: dict[str, Any], facts: DeviceFacts) -> list[Row]:
    """Return products of groups; M are the rows of one group, and the inner width of its weights' gradient."""
    rows = []
    for text, share in measured["accurate_efficient_factor"].items():
        fields = _fields(text)
        groups, m, n, k = (int(fields[name]) for name in ("ng", "M", "N", "K"))
        sizes = {"fwd": (m, k, n), "bwd_grad_act": (m, n, k), "bwd_grad_w": (k, m, n)}[fields["stage"]]
        weights = fields["stage"] == "bwd_grad_w"
        result = _BYTES[fields["main_grad_dtype" if weights else "out_dtype"]]
        result *= 2 if fields["accumulate"] == "True" else 1
        rows.append(product_row(groups, sizes, result, share * measured["tflops"] * 1e3, facts, grouped=True))
    return rows


def attention_rows(measured: dict[str, Any], facts: DeviceFacts, *, backward: bool) -> list[Row]:
    """Return causal attention of heads of queries; the times do not distinguish heads of keys.

    SimuMax counts the whole square of attention, of which a causal kernel does half.
    """
    rows = []
    for text, share in measured["accurate_efficient_factor"].items():
        fields = _fields(text)
        names = ("batch", "seq_len", "head_num", "qk_head_dim", "v_head_dim")
        batch, length, heads, scores, values = (int(fields[name]) for name in names)
        square = square_flops(batch, length, heads, scores + values, backward=backward)
        time = square / (share * measured["tflops"] * 1e3)
        rows.append(attention_row((batch, length, heads, scores, values), time, facts, backward=backward))
    return rows


def openxla_rows(path: Path, facts: DeviceFacts) -> list[Row]:
    """Return products of bf16 on compute capability 9.0, batches of one, as large as the products of the fit."""
    text = path.read_text(encoding="utf-8")
    section = text[text.index('key: "sm_90"') :]
    entry = re.compile(r'b: 1\s+m: (\d+)\s+n: (\d+)\s+k: (\d+)\s+flops \{ key: "bf16xbf16->bf16" value: (\d+) \}')
    rows = [
        product_row(1, (int(m), int(k), int(n)), 2, int(rate) / 1e9, facts) for m, n, k, rate in entry.findall(section)
    ]
    return [row for row in rows if row.ranged >= LEAST_FLOPS]


def _compare_latent(name: str, by_kind: dict[str, list[Row]]) -> int:
    """Print the rate of latent attention as a ratio of other attention's; return the number of wrong rules.

    Latent attention has wider scores than values.
    """
    wrong = 0
    for kind, rows in by_kind.items():
        facts, rule = device_facts(kind), rule_of(device_facts(kind))
        attention = rule.backward if name.endswith("backward") else rule.forward
        plain = replace(facts, launch_ns=0)
        reached: dict[bool, list[float]] = {True: [], False: []}
        for row in rows:
            latent = row.layer[-2] > row.layer[-1]
            ruled = row.shipped(Kernels(plain, "bf16")) * (attention.of_latent if latent else 1)
            reached[latent].append(ruled / row.measured_ns)
        ratio = median(reached[True]) / median(reached[False])
        off = abs(ratio - attention.of_latent) > MOST_WORSE
        wrong += off
        mark = "  NOT IT" if off else ""
        print(f"{name + ', latent':32} {kind:5} {ratio:6.3f} of others, {attention.of_latent} in the rule{mark}")
    return wrong


def _compare_table(kind: str, share: float, memory: dict[str, float]) -> int:
    """Compare the table of devices with the measurements; return how many of its shares differ, of B200 alone.

    The shares of A100 are taken from whole training runs.
    """
    facts = device_facts(kind)
    reached = memory["efficient_factor"] * memory["gbps"] * 1e9 / facts.memory_bandwidth_bytes_per_s
    wrong = 0
    for what, measured, ours in (
        ("products, of the peak", share, facts.compute_efficiency["bf16"]),
        ("element-wise, of the bandwidth", reached, facts.memory_efficiency),
    ):
        off = kind == "B200" and abs(measured - ours) > MOST_WORSE
        wrong += off
        print(f"{what:32} {kind:5} {measured:6.3f} measured, {ours} in the table of devices{'  NOT IT' if off else ''}")
    return wrong


def _compare_collectives(network: dict[str, Any]) -> int:
    """Print the reach of B200's collectives; return how many numbers of the table differ from SimuMax's, rounded."""
    node = hardware.usual("B200")
    assert node.collectives is not None
    wrong = 0
    for operation, reach in node.collectives.reach.items():
        entry = network["op"][{"all_to_all": "all2all"}.get(operation, operation)]
        by_members = entry["fixed_latency_us_by_comm_num"]
        step_us, each_us = entry["latency_us"], entry["fixed_latency_us"]
        if by_members:  # of one number for each group: as one for all
            each_us = fmean(step_us * (int(members) - 1) + more for members, more in by_members.items())
            step_us = 0
        bytes_per_s = entry["efficient_factor"] * network["bandwidth"]["gbps"] * 1e9
        measured = (bytes_per_s / node.fabric_bytes_per_s.value, step_us, each_us)
        ours = (reach.share, reach.step_ns / 1000, reach.each_ns / 1000)
        off = any(abs(a - b) > 0.02 * max(b, 1) for a, b in zip(measured, ours, strict=True))
        wrong += off
        lines = [f"{share:.4f}, {step:.2f}, {each:.1f} µs" for share, step, each in (measured, ours)]
        print(
            f"{operation:32} B200  {lines[0]} measured, {lines[1]} in the table of devices{'  NOT IT' if off else ''}"
        )
    return wrong


def _check_h100(path: Path) -> None:
    """Print the errors of the rule of products where only the share of the peak is fitted."""
    facts = device_facts("H100")
    rows = openxla_rows(path, facts)
    exposed = rule_of(facts).exposed
    hidden = np.array([row.measured_ns - exposed * row.other_ns for row in rows])
    share = float(np.median([row.arithmetic_ns for row in rows] / hidden))
    errors = shipped_errors(rows, facts, share)
    least, most = min(row.ranged for row in rows), max(row.ranged for row in rows)
    print(
        f"{'product, OpenXLA':18} H100  {len(rows):4} {least:8.2g} {most:8.2g}  {'':20}  "
        f"{f'{share:.3f} of the peak':32} {exposed:<12} {summary(errors)}"
    )


def main(arguments: list[str]) -> int:
    """Print the table; return 1 where a shipped rule is not what the fit gives."""
    if len(arguments) > 2:
        print("primitives: takes the folder of SimuMax's system files and a file of OpenXLA's, or nothing")
        return 64
    print(f"{'':18} kind  rows {'from':>8} {'to':>8}  {'held out: median, mean, 90th':30} {'fit':30} shipped")
    wrong = compare_measured()
    if not arguments:
        return int(wrong > 0)
    files = {kind: json.loads((Path(arguments[0]) / name).read_text(encoding="utf-8")) for kind, name in FILES.items()}
    operators = {kind: file["accelerator"]["op"] for kind, file in files.items()}

    def rows(read: Callable[..., list[Row]], name: str, **more: bool) -> dict[str, list[Row]]:
        return {kind: read(operator[name], device_facts(kind), **more) for kind, operator in operators.items()}

    shares: dict[str, float] = {}
    wrong += compare("product", rows(product_rows, "matmul"), shares, shared=True)
    wrong += compare("groups", rows(group_rows, "group_matmul"), shares, shared=False)
    wrong += compare("attention forward", rows(attention_rows, "sdp_fwd", backward=False), shares, shared=False)
    wrong += compare("attention backward", rows(attention_rows, "sdp_bwd", backward=True), shares, shared=False)
    for name, operator, backward in (("attention forward", "sdp_fwd", False), ("attention backward", "sdp_bwd", True)):
        wrong += _compare_latent(name, rows(attention_rows, operator, backward=backward))
    for kind, file in files.items():
        wrong += _compare_table(kind, shares[kind], file["accelerator"]["bandwidth"]["default"])
    wrong += _compare_collectives(files["B200"]["networks"]["high_intra_node"])
    if len(arguments) == 2:
        _check_h100(Path(arguments[1]))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
