"""The rules of ``penstock.shapes.primitives`` fitted again to published times of kernels, and their errors.

    python benchmarks/bench_primitives.py [FOLDER [OPENXLA]]

H100's rule is fitted to our own times (``benchmarks/measured``) and printed first. FOLDER holds SimuMax's system
files of B200 and of A100-PCIe (MooreThreads/SimuMax, release 1.2, Apache-2.0), OPENXLA is
``xla/service/gpu/model/matmul_interpolator_data.h`` of openxla/xla (Apache-2.0): products measured on compute
capability 9.0, which no number was fitted to. Neither is part of this repository.

A time is linear in a rule's numbers: FLOPs over the peak, and the bytes of a product or the FLOPs per row of attention.
The fit has the least mean relative error; products share the exposed bytes of both kinds, each kind counting alike.
Errors are printed on shapes that were held out: five times a fifth of them, all passes of a layer together.
Ends with 1 where a shipped rule, rounded as it is, is worse than the fit by more than a point of mean error, and where
what the table of devices has of B200, its collectives and H100's kernels is not what was measured.
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
    said,
    shipped_errors,
    square_flops,
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


def product_rows(known: dict[str, Any], facts: DeviceFacts) -> list[Row]:
    """Products of ``b=1, m=4096, k=8192, n=10240, layout=TN, accumulate=False, out_dtype=bf16``."""
    found = []
    for text, share in known["accurate_efficient_factor"].items():
        said = _fields(text)
        m, k, n = (int(said[name]) for name in "mkn")
        result = _BYTES[said["out_dtype"]] * (2 if said["accumulate"] == "True" else 1)
        found.append(product_row(1, (m, k, n), result, share * known["tflops"] * 1e3, facts))
    return found


def group_rows(known: dict[str, Any], facts: DeviceFacts) -> list[Row]:
    """Products of groups; M are the rows of one, and the inner width of its weights' gradient."""
    found = []
    for text, share in known["accurate_efficient_factor"].items():
        said = _fields(text)
        groups, m, n, k = (int(said[name]) for name in ("ng", "M", "N", "K"))
        sizes = {"fwd": (m, k, n), "bwd_grad_act": (m, n, k), "bwd_grad_w": (k, m, n)}[said["stage"]]
        weights = said["stage"] == "bwd_grad_w"
        result = _BYTES[said["main_grad_dtype" if weights else "out_dtype"]]
        result *= 2 if said["accumulate"] == "True" else 1
        found.append(product_row(groups, sizes, result, share * known["tflops"] * 1e3, facts, grouped=True))
    return found


def attention_rows(known: dict[str, Any], facts: DeviceFacts, *, backward: bool) -> list[Row]:
    """Causal attention of heads of queries; the times do not tell those of keys apart.

    SimuMax counts the whole square of attention, of which a causal kernel does half.
    """
    found = []
    for text, share in known["accurate_efficient_factor"].items():
        said = _fields(text)
        names = ("batch", "seq_len", "head_num", "qk_head_dim", "v_head_dim")
        batch, length, heads, scores, values = (int(said[name]) for name in names)
        square = square_flops(batch, length, heads, scores + values, backward=backward)
        time = square / (share * known["tflops"] * 1e3)
        found.append(attention_row((batch, length, heads, scores, values), time, facts, backward=backward))
    return found


def openxla_rows(path: Path, facts: DeviceFacts) -> list[Row]:
    """Products of bf16 on compute capability 9.0, batches of one, as large as those that the rule was fitted to."""
    text = path.read_text(encoding="utf-8")
    own = text[text.index('key: "sm_90"') :]
    entry = re.compile(r'b: 1\s+m: (\d+)\s+n: (\d+)\s+k: (\d+)\s+flops \{ key: "bf16xbf16->bf16" value: (\d+) \}')
    found = [
        product_row(1, (int(m), int(k), int(n)), 2, int(rate) / 1e9, facts) for m, n, k, rate in entry.findall(own)
    ]
    return [row for row in found if row.ranged >= LEAST_FLOPS]


def _compare_latent(name: str, by_kind: dict[str, list[Row]]) -> int:
    """Print how much of the rate of other attention is reached where scores are wider than values; 1 where not ours."""
    wrong = 0
    for kind, rows in by_kind.items():
        facts, rule = device_facts(kind), rule_of(device_facts(kind))
        own = rule.backward if name.endswith("backward") else rule.forward
        plain = replace(facts, launch_ns=0)
        reached: dict[bool, list[float]] = {True: [], False: []}
        for row in rows:
            latent = row.layer[-2] > row.layer[-1]
            ruled = row.shipped(Kernels(plain, "bf16")) * (own.of_latent if latent else 1)
            reached[latent].append(ruled / row.measured_ns)
        found = median(reached[True]) / median(reached[False])
        off = abs(found - own.of_latent) > MOST_WORSE
        wrong += off
        mark = "  NOT IT" if off else ""
        print(f"{name + ', latent':32} {kind:5} {found:6.3f} of others, {own.of_latent} in the rule{mark}")
    return wrong


def _compare_table(kind: str, share: float, memory: dict[str, float]) -> int:
    """Print what the table of devices has; how many of its shares are not the measured ones, of B200 alone.

    Those of A100 are what whole training runs show.
    """
    facts = device_facts(kind)
    reached = memory["efficient_factor"] * memory["gbps"] * 1e9 / facts.memory_bandwidth_bytes_per_s
    wrong = 0
    for what, found, ours in (
        ("products, of the peak", share, facts.compute_efficiency["bf16"]),
        ("element-wise, of the bandwidth", reached, facts.memory_efficiency),
    ):
        off = kind == "B200" and abs(found - ours) > MOST_WORSE
        wrong += off
        print(f"{what:32} {kind:5} {found:6.3f} measured, {ours} in the table of devices{'  NOT IT' if off else ''}")
    return wrong


def _compare_collectives(network: dict[str, Any]) -> int:
    """Print what collectives of B200 reach; how many numbers of the table of devices are not SimuMax's, rounded."""
    node = hardware.usual("B200")
    assert node.collectives is not None
    wrong = 0
    for operation, reach in node.collectives.reach.items():
        own = network["op"][{"all_to_all": "all2all"}.get(operation, operation)]
        by_members = own["fixed_latency_us_by_comm_num"]
        step_us, each_us = own["latency_us"], own["fixed_latency_us"]
        if by_members:  # of one number for each group: as one for all
            each_us = fmean(step_us * (int(members) - 1) + more for members, more in by_members.items())
            step_us = 0
        bytes_per_s = own["efficient_factor"] * network["bandwidth"]["gbps"] * 1e9
        found = (bytes_per_s / node.fabric_bytes_per_s.value, step_us, each_us)
        ours = (reach.share, reach.step_ns / 1000, reach.each_ns / 1000)
        off = any(abs(a - b) > 0.02 * max(b, 1) for a, b in zip(found, ours, strict=True))
        wrong += off
        said = [f"{share:.4f}, {step:.2f}, {each:.1f} µs" for share, step, each in (found, ours)]
        print(f"{operation:32} B200  {said[0]} measured, {said[1]} in the table of devices{'  NOT IT' if off else ''}")
    return wrong


def _check_h100(path: Path) -> None:
    """Print how the rule of products does where none of its numbers but the share of the peak are from."""
    facts = device_facts("H100")
    rows = openxla_rows(path, facts)
    exposed = rule_of(facts).exposed
    hidden = np.array([row.measured_ns - exposed * row.other_ns for row in rows])
    share = float(np.median([row.arithmetic_ns for row in rows] / hidden))
    errors = shipped_errors(rows, facts, share)
    least, most = min(row.ranged for row in rows), max(row.ranged for row in rows)
    print(
        f"{'product, OpenXLA':18} H100  {len(rows):4} {least:8.2g} {most:8.2g}  {'':20}  "
        f"{f'{share:.3f} of the peak':32} {exposed:<12} {said(errors)}"
    )


def main(arguments: list[str]) -> int:
    """Print the table; 1 where a shipped rule is not what the fit gives."""
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
        return {kind: read(own[name], device_facts(kind), **more) for kind, own in operators.items()}

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
