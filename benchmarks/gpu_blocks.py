"""LLaMA blocks of one of several GPUs, without the collectives between them, timed on one GPU.

A block of ``examples/llama.py`` with the linear layers that one GPU of the tensor degree has, its norms and sums over
1/degree of the sequence. Where sequences are gathered, the whole is in memory already, and where results are scattered,
a part is taken. So each kernel has the shape that it has in training, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.examples.llama import Block, Config

DEVICE = "cuda:0"
WIDTHS = (1024, 2048, 4096, 8192)
HEAD_WIDTH = 128
_ROUNDS = 8
_AHEAD_CYCLES = 2_000_000

BLOCK_COLUMNS = (
    *("hidden", "tensor", "batch", "length", "forward_ns", "backward_ns"),
    *("recomputed_forward_ns", "recomputed_backward_ns", "graph_forward_ns", "graph_both_ns"),
    *("kept_bytes", "forward_peak_bytes", "both_peak_bytes"),
    *("recomputed_kept_bytes", "recomputed_forward_peak_bytes", "recomputed_both_peak_bytes"),
)
"""The columns of a row.

``graph``: the kernels alone, replayed from a CUDA graph. ``kept``: after forward; peaks are above what was there.
"""


class Sizes(NamedTuple):
    """The sizes of one GPU's part of a block.

    Query heads of the whole, and columns of queries, keys and the feed-forward.
    """

    heads: int
    kv_heads: int
    queries: int
    keys: int
    inner: int


def sizes_of(hidden: int, tensor: int) -> Sizes:
    """Return LLaMA's proportions.

    Heads of 128, at most 8 heads of keys (copied where GPUs are more), a feed-forward of 7/2 of the width.
    """
    heads = hidden // HEAD_WIDTH
    keys = min(8, heads)
    return Sizes(heads, keys, hidden // tensor, max(1, keys // tensor) * HEAD_WIDTH, hidden * 7 // 2 // tensor)


class _Gathered(torch.autograd.Function):
    """A gather: the whole sequence, which is in memory already, for this GPU's part of it."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, whole: Tensor) -> Tensor:
        ctx.length = part.shape[1]
        return whole.detach().view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[:, : ctx.length], None


class _Scattered(torch.autograd.Function):
    """A scatter: this GPU's part of the whole; the gradient of the whole is in memory already."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, length: int, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return whole[:, :length]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient, None, None


def local_block(hidden: int, tensor: int, device: str = DEVICE) -> Block:
    """Return one GPU's part of a block in bf16, made on the device."""
    size = sizes_of(hidden, tensor)
    with torch.device("meta"):
        config = Config(
            blocks=1,
            width=hidden,
            heads=size.heads,
            key_value_heads=size.kv_heads,
            inner=hidden * 7 // 2,
        )
        block = Block(config)
        attention, feed_forward = block.attention, block.feed_forward
        attention.query, attention.out = _linear(hidden, size.queries), _linear(size.queries, hidden)
        attention.key, attention.value = _linear(hidden, size.keys), _linear(hidden, size.keys)
        feed_forward.gate, feed_forward.up = _linear(hidden, size.inner), _linear(hidden, size.inner)
        feed_forward.down = _linear(size.inner, hidden)
    local: Block = block.to(torch.bfloat16).to_empty(device=device)
    for parameter in local.parameters():
        nn.init.ones_(parameter) if parameter.dim() == 1 else nn.init.normal_(parameter, std=0.02)
        parameter.grad = torch.zeros_like(parameter)
    return local


def _linear(into: int, out: int) -> nn.Linear:
    return nn.Linear(into, out, bias=False)


def forward_of(block: Block, tensor: int, whole: Tensor, gradient: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the block's forward on 1/``tensor`` of the sequence.

    ``whole`` is the gathered sequence, ``gradient`` the gradient of the scattered one.
    """

    def divided(x: Tensor) -> Tensor:
        length = x.shape[1]
        attended = block.attention(_Gathered.apply(block.norm_attention(x), whole))  # type: ignore[no-untyped-call]
        x = x + _Scattered.apply(attended, length, gradient)  # type: ignore[no-untyped-call]
        fed = block.feed_forward(_Gathered.apply(block.norm_feed_forward(x), whole))  # type: ignore[no-untyped-call]
        result: Tensor = x + _Scattered.apply(fed, length, gradient)  # type: ignore[no-untyped-call]
        return result

    return block if tensor == 1 else divided


def block_rows(timed: Callable[..., float], random: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
    """Yield rows of ``blocks``, blocks of 4,096 tokens first."""
    for length, batch in ((4096, 1), (8192, 1), (2048, 1), (4096, 2)):
        for hidden in WIDTHS:
            for tensor in (1, 2, 4, 8):
                yield hidden, tensor, batch, length, *_measured(hidden, tensor, batch, length, timed, random)
                torch.cuda.empty_cache()


def _measured(
    hidden: int, tensor: int, batch: int, length: int, timed: Callable[..., float], random: Callable[..., Tensor]
) -> tuple[float, ...]:
    x, gradient = random(batch, length // tensor, hidden).requires_grad_(), random(batch, length // tensor, hidden)
    whole, of_whole = random(batch, length, hidden), random(batch, length, hidden)
    run = forward_of(local_block(hidden, tensor), tensor, whole, of_whole)

    def again(x: Tensor) -> Tensor:
        result: Tensor = checkpoint(run, x, use_reentrant=False)
        return result

    plain, recomputed = (_eager(each, x, gradient) for each in (run, again))
    x.grad = None
    graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graphs[0]):
        run(x)
    with torch.cuda.graph(graphs[1]):
        run(x).backward(gradient)
    replayed = [timed(graph.replay, least_ms=10, most=10) for graph in graphs]
    return (*plain[:2], *recomputed[:2], *replayed, *plain[2:], *recomputed[2:])


def _eager(run: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor) -> tuple[float, ...]:
    """Return median ns of both passes as eager torch issues them, bytes kept, and both peaks."""
    for _ in range(2):
        _passes(run, x, gradient)
    torch.cuda.synchronize()
    torch.cuda._sleep(_AHEAD_CYCLES)
    rounds = [_passes(run, x, gradient) for _ in range(_ROUNDS)]
    torch.cuda.synchronize()
    times = [sorted(marks[i].elapsed_time(marks[i + 1]) * 1e6 for marks in rounds)[_ROUNDS // 2] for i in range(2)]
    x.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = run(x)
    kept, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    y.backward(gradient)
    return (*times, kept, peak, torch.cuda.max_memory_allocated() - before)


def _passes(run: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor) -> list[torch.cuda.Event]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    x.grad = None
    marks[0].record()
    y = run(x)
    marks[1].record()
    y.backward(gradient)
    marks[2].record()
    return marks
