"""The rules of ``penstock.shapes.primitives`` fitted again to published times of kernels, and their errors.

    python benchmarks/bench_primitives.py FOLDER [OPENXLA]

FOLDER holds SimuMax's system files of B200 and of A100-PCIe (MooreThreads/SimuMax, release 1.2, Apache-2.0), OPENXLA is
``xla/service/gpu/model/matmul_interpolator_data.h`` of openxla/xla (Apache-2.0): products measured on compute
capability 9.0, which no number was fitted to. None of it is part of this repository.

A time is linear in a rule's numbers: FLOPs over the peak, and the bytes of a product or the FLOPs per row of attention.
The fit has the least mean relative error; products share the exposed bytes of both kinds, each kind counting alike.
Errors are printed on shapes that were held out: five times a fifth of them, all passes of a layer together.
Ends with 1 where a shipped rule, rounded as it is, is worse than the fit by more than a point of mean error, and where
shares of B200 or what its collectives reach are not what SimuMax measured.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from penstock.executor.profiling.device_table import DeviceFacts, device_facts
from penstock.importers.cluster import hardware
from penstock.shapes.kernels import Kernels
from penstock.shapes.primitives import LEAST_FLOPS, rule_of

FILES = {"B200": "simumax-b200_bf16_ceperm.json", "A100": "simumax-a100_pcie.json"}
MOST_WORSE = 0.01
"""By how much a rounded rule may be worse than the fit, in mean relative error."""
_FOLDS = 5
_CAUSAL = 2
"""SimuMax counts the whole square of attention, of which a causal kernel does half."""
_BACKWARD = 2.5
"""FLOPs of attention's backward over those of its forward."""
_BYTES = {"bf16": 2, "fp32": 4}


class Row(NamedTuple):
    """A shape: terms that its time is linear in, what was measured, and what the shipped rule says of a device."""

    layer: tuple[int, ...]
    arithmetic_ns: float
    other_ns: float
    measured_ns: float
    shipped: Callable[[Kernels], float]
    ranged: float


def _fields(text: str) -> dict[str, str]:
    return {name.strip(): value.strip(" :") for name, value in (each.split("=") for each in text.split(","))}


def product_rows(known: dict[str, Any], facts: DeviceFacts) -> list[Row]:
    """Products of ``b=1, m=4096, k=8192, n=10240, layout=TN, accumulate=False, out_dtype=bf16``."""
    found = []
    for text, share in known["accurate_efficient_factor"].items():
        said = _fields(text)
        m, k, n = (int(said[name]) for name in "mkn")
        result = _BYTES[said["out_dtype"]] * (2 if said["accumulate"] == "True" else 1)
        found.append(_product(1, (m, k, n), result, share * known["tflops"] * 1e3, facts))
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
        found.append(_product(groups, sizes, result, share * known["tflops"] * 1e3, facts, grouped=True))
    return found


def _product(
    groups: int, sizes: tuple[int, int, int], result: int, rate: float, facts: DeviceFacts, *, grouped: bool = False
) -> Row:
    """``rate``: FLOPs a ns."""
    rows, inner, columns = sizes
    flops = 2 * groups * rows * inner * columns
    moved = groups * (2 * inner * (rows + columns) + result * rows * columns)

    def shipped(kernels: Kernels) -> float:
        if grouped:
            return kernels.grouped_product_ns(groups, *sizes, result_bytes=result)
        return kernels.product_ns(*sizes, result_bytes=result)

    return Row(
        (groups, *sorted(sizes)),
        flops / facts.peak_flops_per_s["bf16"] * 1e9,
        moved / facts.bytes_per_s() * 1e9,
        flops / rate,
        shipped,
        rows if grouped else flops,
    )


def attention_rows(known: dict[str, Any], facts: DeviceFacts, *, backward: bool) -> list[Row]:
    """Causal attention of heads of queries; the times do not tell those of keys apart."""
    found = []
    for text, share in known["accurate_efficient_factor"].items():
        said = _fields(text)
        names = ("batch", "seq_len", "head_num", "qk_head_dim", "v_head_dim")
        batch, length, heads, scores, values = (int(said[name]) for name in names)
        rows = batch * length * heads
        square = 2 * rows * length * (scores + values) * (_BACKWARD if backward else 1)
        flops = square / _CAUSAL
        arithmetic = flops / facts.peak_flops_per_s["bf16"] * 1e9

        def shipped(kernels: Kernels, flops: float = flops, rows: int = rows, latent: bool = scores > values) -> float:
            return kernels.attention_ns(flops, rows, backward=backward, latent=latent)

        layer = (batch, length, heads, scores, values)
        time = square / (share * known["tflops"] * 1e3)
        found.append(Row(layer, arithmetic, arithmetic / rows, time, shipped, rows))
    return found


def openxla_rows(path: Path, facts: DeviceFacts) -> list[Row]:
    """Products of bf16 on compute capability 9.0, batches of one, as large as those that the rule was fitted to."""
    text = path.read_text(encoding="utf-8")
    own = text[text.index('key: "sm_90"') :]
    entry = re.compile(r'b: 1\s+m: (\d+)\s+n: (\d+)\s+k: (\d+)\s+flops \{ key: "bf16xbf16->bf16" value: (\d+) \}')
    found = [_product(1, (int(m), int(k), int(n)), 2, int(rate) / 1e9, facts) for m, n, k, rate in entry.findall(own)]
    return [row for row in found if row.ranged >= LEAST_FLOPS]


def fitted(terms: np.ndarray, measured: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The factors of ``terms`` with the least weighted mean of relative errors, by weighted least squares again."""
    shares = terms / measured[:, None]
    each = np.ones(len(measured))
    for _ in range(200):
        root = np.sqrt(each * weights)
        found, *_ = np.linalg.lstsq(shares * root[:, None], root, rcond=None)
        each = 1 / np.maximum(np.abs(shares @ found - 1), 0.005)
    return np.asarray(found)


def _terms(by_kind: Sequence[Sequence[Row]], *, shared: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Arithmetic of each kind, and the other term: one for all kinds, or one for each."""
    total, kinds = sum(map(len, by_kind)), len(by_kind)
    terms = np.zeros((total, kinds + (1 if shared else kinds)))
    at = 0
    for number, rows in enumerate(by_kind):
        own = slice(at, at + len(rows))
        terms[own, number] = [row.arithmetic_ns for row in rows]
        terms[own, kinds if shared else kinds + number] = [row.other_ns for row in rows]
        at = own.stop
    measured = np.array([row.measured_ns for rows in by_kind for row in rows])
    weights = np.array([1 / len(rows) for rows in by_kind for _ in rows])
    return terms, measured, weights


def held_out(by_kind: Sequence[Sequence[Row]], *, shared: bool) -> list[np.ndarray]:
    """Relative errors of each kind's shapes, each by the fit to the folds that it is not in."""
    terms, measured, weights = _terms(by_kind, shared=shared)
    layers = [row.layer for rows in by_kind for row in rows]
    fold = {layer: number % _FOLDS for number, layer in enumerate(sorted(set(layers)))}
    folds = np.array([fold[layer] for layer in layers])
    errors = np.zeros(len(measured))
    for number in range(_FOLDS):
        out = folds == number
        found = fitted(terms[~out], measured[~out], weights[~out])
        errors[out] = np.abs(terms[out] @ found / measured[out] - 1)
    return np.split(errors, np.cumsum([len(rows) for rows in by_kind])[:-1])


def _said(errors: np.ndarray) -> str:
    return f"{np.median(errors):6.1%} {errors.mean():6.1%} {np.quantile(errors, 0.9):6.1%}"


def _shipped_errors(rows: Sequence[Row], facts: DeviceFacts, share: float) -> np.ndarray:
    """Of the shipped rule, at the share of the peak that products reach by the fit."""
    kernels = Kernels(replace(facts, compute_efficiency=dict.fromkeys(facts.compute_efficiency, share)), "bf16")
    return np.array([abs(row.shipped(kernels) / row.measured_ns - 1) for row in rows])


def compare(name: str, by_kind: dict[str, list[Row]], shares: dict[str, float], *, shared: bool) -> int:
    """Print a line for each kind; how many shipped rules are worse than the fit by too much."""
    rows = list(by_kind.values())
    terms, measured, weights = _terms(rows, shared=shared)
    found = fitted(terms, measured, weights)
    wrong = 0
    errors = np.split(np.abs(terms @ found / measured - 1), np.cumsum([len(each) for each in rows])[:-1])
    for number, (kind, out) in enumerate(zip(by_kind, held_out(rows, shared=shared), strict=True)):
        reached, other = 1 / found[number], found[len(rows) if shared else len(rows) + number]
        shares.setdefault(kind, float(reached))
        facts, rule = device_facts(kind), rule_of(device_facts(kind))
        if name == "product":
            numbers, ours = f"{reached:.3f} of the peak, {other:.2f}", f"{rule.exposed}"
        elif name == "groups":
            numbers, ours = f"{reached:.3f} of the peak, {other:.2f}", f"{rule.exposed_in_groups}"
        else:
            own = rule.backward if name.endswith("backward") else rule.forward
            numbers = f"{reached / shares[kind]:.2f} of products, {other * reached:,.0f} rows"
            ours = f"{own.rate}, {own.half_rows:,}"
        shipped = _shipped_errors(by_kind[kind], facts, shares[kind])
        worse = shipped.mean() - errors[number].mean() > MOST_WORSE
        wrong += worse
        least, most = min(row.ranged for row in by_kind[kind]), max(row.ranged for row in by_kind[kind])
        print(
            f"{name:18} {kind:5} {len(by_kind[kind]):4} {least:8.2g} {most:8.2g}  {_said(out)}  "
            f"{numbers:32} {ours:12} {_said(shipped)}{'  NOT THE FIT' if worse else ''}"
        )
    return wrong


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
    errors = _shipped_errors(rows, facts, share)
    least, most = min(row.ranged for row in rows), max(row.ranged for row in rows)
    print(
        f"{'product, OpenXLA':18} H100  {len(rows):4} {least:8.2g} {most:8.2g}  {'':20}  "
        f"{f'{share:.3f} of the peak':32} {exposed:<12} {_said(errors)}"
    )


def main(arguments: list[str]) -> int:
    """Print the table; 1 where a shipped rule is not what the fit gives."""
    if len(arguments) not in {1, 2}:
        print("primitives: needs the folder of SimuMax's system files, which is not in the repository")
        return 64 if arguments else 0
    files = {kind: json.loads((Path(arguments[0]) / name).read_text(encoding="utf-8")) for kind, name in FILES.items()}
    operators = {kind: file["accelerator"]["op"] for kind, file in files.items()}

    def rows(read: Callable[..., list[Row]], name: str, **more: bool) -> dict[str, list[Row]]:
        return {kind: read(own[name], device_facts(kind), **more) for kind, own in operators.items()}

    print(f"{'':18} kind  rows {'from':>8} {'to':>8}  {'held out: median, mean, 90th':30} {'fit':30} shipped")
    shares: dict[str, float] = {}
    wrong = compare("product", rows(product_rows, "matmul"), shares, shared=True)
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
