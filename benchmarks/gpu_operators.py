"""Single operations on one GPU, timed: products, attention, element-wise ones and norms, products of groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from gpu_blocks import HEAD_WIDTH, WIDTHS, sizes_of
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

DEVICE = "cuda:0"
TENSOR = (1, 2, 4, 8)
VOCABULARY = 128_256
_AHEAD_CYCLES = 2_000_000
"""The cycles that the GPU waits before a measurement.

So the host is ahead and launches leave no gaps.
"""


def random(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return small random numbers on the GPU."""
    return torch.randn(*sizes, device=DEVICE, dtype=torch.float32).to(dtype) * 0.05


def timed(action: Callable[[], object], *, least_ms: float = 8.0, most: int = 30) -> float:
    """Return the median ns between an event before ``action`` and one after it.

    It takes at least 4 rounds and about ``least_ms``. The fact ``between_events`` is the time between two events with
    nothing between them.
    """
    for _ in range(2):
        action()
    torch.cuda.synchronize()
    first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    action()
    second.record()
    second.synchronize()
    rounds = max(4, min(most, int(least_ms / max(first.elapsed_time(second), 1e-3))))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    torch.cuda._sleep(_AHEAD_CYCLES)
    marks[0].record()
    for mark in marks[1:]:
        action()
        mark.record()
    torch.cuda.synchronize()
    each: list[float] = sorted(a.elapsed_time(b) * 1e6 for a, b in pairwise(marks))
    return each[len(each) // 2]


def _shapes() -> Iterator[tuple[str, int, int, int]]:
    """Yield products of each pass of a block's and a head's weights, by tokens, width and tensor degree."""
    for tokens in (4096, 8192, 2048, 16_384):
        for hidden in WIDTHS if tokens in (4096, 8192) else (4096,):
            for tensor in TENSOR:
                size = sizes_of(hidden, tensor)
                queries, keys, inner = size.queries, size.keys, size.inner
                weights = [(hidden, queries), (hidden, keys), (hidden, queries + 2 * keys), (queries, hidden)]
                weights += [(hidden, inner), (hidden, 2 * inner), (inner, hidden)]
                if tokens == 4096:
                    weights.append((hidden, VOCABULARY // tensor))
                for into, out in weights:
                    yield "forward", tokens, into, out
                    yield "input", tokens, out, into
                    yield "weight", into, tokens, out


def products() -> Iterator[tuple[Any, ...]]:
    """Yield rows of ``products``."""
    for kind, rows, inner, columns in dict.fromkeys(_shapes()):
        if kind == "forward":
            x, weight = random(rows, inner), random(columns, inner)
            ns = timed(lambda x=x, weight=weight: functional.linear(x, weight), most=25)  # type: ignore[misc]
        elif kind == "input":
            x, weight = random(rows, inner), random(inner, columns)
            ns = timed(lambda x=x, weight=weight: x @ weight, most=25)  # type: ignore[misc]
        else:
            x, weight = random(inner, rows), random(inner, columns)
            ns = timed(lambda x=x, weight=weight: weight.t() @ x, most=25)  # type: ignore[misc]
        yield kind, rows, inner, columns, ns


def attention() -> Iterator[tuple[Any, ...]]:
    """Yield rows of ``attention``; ``latent``: scores of 192 and values of 128, without shared keys."""
    named = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    for length, batch in ((4096, 1), (8192, 1), (2048, 2), (2048, 1), (4096, 2), (16_384, 1)):
        for heads in (1, 2, 4, 8, 16, 32, 64):
            yield _attended("default", batch, length, heads, max(1, heads // 8), HEAD_WIDTH)
            if batch == 1 and length in (4096, 8192) and heads in (4, 16, 32):
                for name, backend in named.items():
                    with sdpa_kernel([backend]):
                        yield _attended(name, batch, length, heads, max(1, heads // 8), HEAD_WIDTH)
    for length, heads in ((4096, 16), (4096, 128), (8192, 16)):
        yield _attended("latent", 1, length, heads, heads, 192)


def _attended(kernel: str, batch: int, length: int, heads: int, keys: int, width: int) -> tuple[Any, ...]:
    query, key = (random(batch, each, length, width).requires_grad_() for each in (heads, keys))
    value = random(batch, keys, length, HEAD_WIDTH).requires_grad_()

    def forward() -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=kernel != "latent")

    there = timed(forward, most=20)
    result = forward()
    gradient = random(*result.shape)
    back = timed(
        lambda: torch.autograd.grad(result, (query, key, value), gradient, retain_graph=True),
        most=20,
    )
    return kernel, batch, length, heads, keys, width, there, back


def moved() -> Iterator[tuple[Any, ...]]:
    """Yield rows of ``moved``."""
    for rows in (1024, 4096, 8192):
        for width in (512, 1024, 2048, 4096, 8192, 14_336, 28_672):
            tensor_bytes = 2 * rows * width
            x, y = random(rows, width), random(rows, width)
            weight = torch.ones(width, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
            leaf = x.clone().requires_grad_()

            def rms(leaf: Tensor = leaf, weight: Tensor = weight) -> Tensor:
                return functional.rms_norm(leaf, weight.shape, weight, 1e-5)

            def layer(leaf: Tensor = leaf, weight: Tensor = weight) -> Tensor:
                return functional.layer_norm(leaf, weight.shape, weight, None, 1e-5)

            yield "add", rows, width, 3 * tensor_bytes, timed(lambda x=x, y=y: x + y, least_ms=4)  # type: ignore[misc]
            yield "silu", rows, width, 2 * tensor_bytes, timed(lambda x=x: functional.silu(x), least_ms=4)  # type: ignore[misc]
            for name, norm in (("rms_norm", rms), ("layer_norm", layer)):
                yield name, rows, width, 2 * tensor_bytes, timed(norm, least_ms=4)
                result = norm()
                back = timed(
                    lambda output=result, inputs=(leaf, weight), y=y: torch.autograd.grad(
                        output, inputs, y, retain_graph=True
                    ),  # type: ignore[misc]
                    least_ms=4,
                )
                yield f"{name}_backward", rows, width, 3 * tensor_bytes, back


def grouped() -> Iterator[tuple[Any, ...]]:
    """Yield rows of ``grouped``: widths of Qwen3-235B's, DeepSeek-V2-Lite's and DeepSeek-V3's experts."""
    for groups in (1, 2, 4, 8, 16, 32, 64):
        for rows in (128, 512, 1024, 2048):
            if groups * rows > 65_536:
                continue
            for into, out in ((4096, 1536), (2048, 1408), (7168, 2048)):
                x, weight, gradient = random(groups * rows, into), random(groups, into, out), random(groups * rows, out)
                ends = torch.arange(rows, groups * rows + 1, rows, device=DEVICE, dtype=torch.int32)
                for kind, left, right, sizes in (
                    ("forward", x, weight, (rows, into, out)),
                    ("input", gradient, weight.transpose(-2, -1), (rows, out, into)),
                    ("weight", x.t(), gradient, (into, rows, out)),
                ):
                    ns = timed(
                        lambda left=left, right=right, ends=ends: torch._grouped_mm(left, right, offs=ends),  # type: ignore[misc]
                        least_ms=5,
                        most=20,
                    )
                    yield kind, groups, *sizes, ns
