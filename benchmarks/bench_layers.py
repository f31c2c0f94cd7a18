"""Computed profiles against LLaMA blocks measured on one H100, at both levels of the table of devices.

    python benchmarks/bench_layers.py [--traced]

The blocks come from ``benchmarks/measured``: one of ``tensor`` GPUs, without collectives. Times are compared with the
kernels alone, replayed from a CUDA graph. The times of eager torch are printed with them, as it issues small kernels
more slowly than the GPU runs them. Recomputing is compared with eager torch where the GPU bounds the time. ``--traced``
also compares the profile that is traced on the meta device, which takes a minute. Kept memory is compared without the
gathered sequences, which the measured blocks do not make themselves. The exit status is 1 where the mean error of both
passes of blocks of a millisecond and more is above `MOST` at the level of kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import groupby
from statistics import fmean
from typing import Any, NamedTuple

from gpu_blocks import HEAD_WIDTH
from measured_kernels import KIND, measured

from penstock.examples.llama import Config, make
from penstock.examples.shapes import SHAPES
from penstock.executor.profiling.analytic import analytic_profile
from penstock.facts.device_table import LEVELS, Level, device_facts
from penstock.schemas.profile import ModelProfile
from penstock.shapes.costs.case import Case
from penstock.shapes.costs.layers import costs_of
from penstock.shapes.layout import Layout

MOST = 0.1
_LONG_NS = 1_000_000
"""Kernels of a block from which on it counts.

The closed form has too few small kernels in shorter blocks.
"""
_HOST_BOUND = 1.1
"""The ratio of an eager block's time to its kernels' time above which the host bounds it."""
_BF16 = 2
_GATHERED = 2
"""The sequences that a block gathers and keeps at tensor degrees above 1: before attention and feed-forward."""


class Cost(NamedTuple):
    """The costs of a block by a profile."""

    forward_ns: float
    backward_ns: float
    kept_bytes: float


Block = dict[str, Any]


def closed_form(blocks: list[Block], level: Level) -> list[Cost]:
    """Return costs by the closed form of eager torch."""
    costs = []
    for block in blocks:
        heads = block["hidden"] // HEAD_WIDTH
        shape = SHAPES["llama-3-8b"].model_copy(
            update={
                "hidden": block["hidden"],
                "heads": heads,
                "kv_heads": min(8, heads),
                "ffn": block["hidden"] * 7 // 2,
                "sequence_length": block["length"],
                "layers": 1,
            }
        )
        layout = Layout(framework="torch", micro_batch_size=block["batch"], tensor=block["tensor"])
        cost = costs_of(Case(shape, layout, device_facts(KIND, level)))["dense"]
        costs.append(Cost(cost.forward_ns, cost.backward_ns, cost.stash_bytes - _gathered_bytes(block)))
    return costs


def traced(blocks: list[Block], level: Level) -> list[Cost]:
    """Return costs by the operations of ``examples/llama.py`` on the meta device."""
    cost_of: dict[tuple[int, ...], Cost] = {}
    for (hidden, length), group in groupby(sorted(blocks, key=_traced_together), key=_traced_together):
        listed = list(group)
        heads = hidden // HEAD_WIDTH
        config = Config(
            blocks=1, width=hidden, heads=heads, key_value_heads=min(8, heads), inner=hidden * 7 // 2, length=length
        )
        sizes, degrees = ({block[name] for block in listed} for name in ("batch", "tensor"))
        job = make("llama-block", config, batch_size=max(sizes))
        profile = analytic_profile(job, KIND, sorted(sizes), "bf16", tensor_degrees=sorted(degrees - {1}), level=level)
        for block in listed:
            cost_of[_key(block)] = _of_block(profile, block)
    return [cost_of[_key(block)] for block in blocks]


def _of_block(profile: ModelProfile, block: Block) -> Cost:
    """Return the cost of layer 1, after the embedding."""
    if block["tensor"] == 1:
        layers = next(each for each in profile.measurements if each.micro_batch_size == block["batch"]).layers
        layer = layers[1]
        return Cost(layer.forward_ns, layer.backward_ns, layer.stash_bytes)
    assert profile.classes is not None
    variant = next(each for each in profile.variants or () if each.degrees.tensor == block["tensor"])
    divided = next(each for each in variant.measurements if each.micro_batch_size == block["batch"])
    cost = divided.layers[profile.classes[1]]
    return Cost(cost.forward_ns, cost.backward_ns, cost.stash_bytes - _gathered_bytes(block))


def _traced_together(block: Block) -> tuple[int, int]:
    return block["hidden"], block["length"]


def _key(block: Block) -> tuple[int, ...]:
    return block["hidden"], block["tensor"], block["batch"], block["length"]


def _gathered_bytes(block: Block) -> int:
    if block["tensor"] == 1:
        return 0
    return _GATHERED * _BF16 * int(block["batch"]) * int(block["length"]) * int(block["hidden"])


class Off(NamedTuple):
    """Errors of a block's times, relative to its kernels.

    ``recomputing`` is relative to eager torch, where the GPU bounds it.
    """

    forward: float
    backward: float
    both: float
    recomputing: float | None
    kept: float


def off(block: Block, cost: Cost) -> Off:
    """Return the errors of a profile for a block."""
    both_ns = cost.forward_ns + cost.backward_ns
    again_ns = block["recomputed_forward_ns"] + block["recomputed_backward_ns"]
    kernels_ns = block["graph_both_ns"] + block["graph_forward_ns"]
    recomputing = (both_ns + cost.forward_ns) / again_ns - 1
    return Off(
        cost.forward_ns / block["graph_forward_ns"] - 1,
        cost.backward_ns / (block["graph_both_ns"] - block["graph_forward_ns"]) - 1,
        both_ns / block["graph_both_ns"] - 1,
        recomputing if again_ns <= _HOST_BOUND * kernels_ns else None,
        cost.kept_bytes / block["kept_bytes"] - 1,
    )


def _eager_ns(block: Block) -> float:
    return float(block["forward_ns"] + block["backward_ns"])


def printed(name: str, blocks: list[Block], by_level: dict[Level, list[Cost]]) -> float:
    """Print a line for each block, then means; return the mean error of long blocks' passes at the last level."""
    print(
        f"\n{name}\n{'h':>5} t  b length | kernels, eager ms    | "
        + " | ".join(f"{level}: forward, backward, both, recomputing" for level in by_level)
        + " | kept MiB, error"
    )
    each = {level: [off(*pair) for pair in zip(blocks, costs, strict=True)] for level, costs in by_level.items()}
    for i, block in enumerate(blocks):
        times = f"{block['graph_both_ns'] / 1e6:6.2f} {_eager_ns(block) / 1e6:6.2f}"
        errors = " | ".join(_percents(rows[i][:4]) for rows in each.values())
        kept = next(iter(each.values()))[i].kept
        print(
            f"{block['hidden']:5} {block['tensor']} {block['batch']:2} {block['length']:6} | {times} | {errors} | "
            f"{block['kept_bytes'] / 2**20:7.1f} {kept:+.1%}"
        )
    mean_error = 0.0
    for level, rows in each.items():
        means = [_mean(column) for column in zip(*rows, strict=True)]
        pairs = list(zip(rows, blocks, strict=True))
        mean_error = _mean(row.both for row, block in pairs if block["graph_both_ns"] >= _LONG_NS)
        print(f"mean size of errors, {level}: forward, backward, both, recomputing, kept: {_percents(means)}")
        for tensor in sorted({block["tensor"] for block in blocks}):
            print(f"  tensor {tensor}: {_mean(row.both for row, block in pairs if block['tensor'] == tensor):.1%}")
        print(f"  of {_LONG_NS / 1e6:g} ms and more: {mean_error:.1%}")
    return mean_error


def _percents(values: Iterable[float | None]) -> str:
    return " ".join("     –" if value is None else f"{value:+6.1%}" for value in values)


def _mean(values: Iterable[float | None]) -> float:
    return fmean(abs(value) for value in values if value is not None)


def main(arguments: list[str]) -> int:
    """Print the tables; return 1 where profiles at the level of kernels are further off than stated."""
    if arguments not in ([], ["--traced"]):
        print("layers: takes nothing or --traced")
        return 64
    blocks = [block for block in measured()["blocks"].named() if block["graph_both_ns"] is not None]
    ways = {"closed form": closed_form} | ({"traced": traced} if arguments else {})
    means = [printed(name, blocks, {level: of(blocks, level) for level in LEVELS}) for name, of in ways.items()]
    return int(max(means) > MOST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
