"""Context parallelism: each rank has a part of every sequence, and its attention reads the keys of all parts.

A sequence is cut into 2c chunks of equal length. Rank i has the chunks i and 2c - 1 - i, so that a causal mask leaves
all ranks the same work. Attention gathers keys and values over the ranks, in the order of their positions. Its backward
reduces and scatters the gradients of both (``all_gather`` among the kinds of `schemas`). No other operation of a layer
may mix positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from penstock.executor.run.job import Job, sequence_names
from penstock.schemas.errors import InvalidDocument, UnsupportedRequest

_entered: list[Context] = []


def positions(count: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return the positions, in the whole sequence, of the ``count`` positions that a layer of this rank receives.

    They are 0 to ``count`` - 1 unless ranks share sequences.
    """
    if not _entered:
        return torch.arange(count, device=device, dtype=dtype)
    chunk = count // 2
    parts = [
        torch.arange(number * chunk, (number + 1) * chunk, device=device, dtype=dtype) for number in _entered[-1].chunks
    ]
    return torch.cat(parts)


def whole_length(count: int) -> int:
    """Return the length of the whole sequence of which a layer of this rank receives ``count`` positions."""
    return count * _entered[-1].degree if _entered else count


class Context(TorchFunctionMode):
    """A mode in which the ranks of a process group, ``group``, share sequences; this process is one of them.

    Within it, `scaled_dot_product_attention` covers whole sequences, and `positions` returns this rank's positions.
    """

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        self.degree: int = group.size()
        rank: int = group.rank()
        self.chunks = (rank, 2 * self.degree - 1 - rank)

    def __enter__(self) -> Context:
        _entered.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _entered.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        run = self._attention if func is functional.scaled_dot_product_attention else func
        return run(*args, **(kwargs or {}))

    def enclose(self, layer: nn.Module) -> None:
        """Run every forward of ``layer`` within this mode, also when the layer is recomputed."""
        enclosed: Any = layer
        forward = layer.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return forward(*args, **kwargs)

        enclosed.forward = run

    def cut(self, job: Job, inputs: dict[str, Tensor], targets: Any) -> tuple[dict[str, Tensor], Any]:
        """Return this rank's part of a batch's sequences and of its targets.

        Raises UnsupportedRequest where the job names no sequences, or the ranks cannot share them.
        """
        names = sequence_names(job)
        if not names:
            raise UnsupportedRequest(
                f"job {job.name!r} does not say which of its inputs are sequences, so ranks cannot split them by "
                f"context {self.degree}",
                remedy="name them in the job's `sequences`, or plan with --context 1",
            )
        missing = [name for name in names if name not in inputs]
        if missing:
            raise InvalidDocument(
                f"job {job.name!r} names {missing} in `sequences`, which its batch lacks; it has {sorted(inputs)}"
            )
        parts = {name: self._part(inputs[name], f"input {name!r} of job {job.name!r}") for name in names}
        return inputs | parts, tree_map_only(
            Tensor, lambda tensor: self._part(tensor, f"a target of job {job.name!r}"), targets
        )

    def _part(self, tensor: Tensor, what: str) -> Tensor:
        """Return this rank's chunks of ``tensor`` along dimension 1."""
        count = 2 * self.degree
        if tensor.dim() < 2 or tensor.shape[1] == 0 or tensor.shape[1] % count:
            raise UnsupportedRequest(
                f"{what} has the shape {tuple(tensor.shape)}, but context {self.degree} splits dimension 1 into "
                f"{count} "
                "chunks of equal length",
                remedy=f"give sequences of a multiple of {count} positions, or plan with another context degree",
            )
        chunks = tensor.chunk(count, dim=1)
        return torch.cat([chunks[number] for number in self.chunks], dim=1)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **others: Any,
    ) -> Tensor:
        """Compute attention of this rank's queries, (…, positions, width), to the keys and values of all ranks."""
        if attn_mask is not None:
            raise ValueError(
                "attention has an explicit mask, which covers only this rank's keys; context parallelism needs "
                "causal masks"
            )
        if is_causal and query.shape[-2] != key.shape[-2]:
            raise ValueError(
                f"causal attention needs as many queries as keys per rank, not {query.shape[-2]} and {key.shape[-2]}"
            )
        gather: Any = _Gathered.apply
        keys, values = gather(key, self), gather(value, self)
        attend = functional.scaled_dot_product_attention
        if not is_causal:
            return attend(query, keys, values, dropout_p=dropout_p, **others)
        chunk = query.shape[-2] // 2
        results = []
        for number, part in zip(self.chunks, query.split(chunk, dim=-2), strict=True):
            seen = (number + 1) * chunk
            with _disable_current_modes():  # modes stop torch from creating the mask's subclass
                bias = causal_lower_right(chunk, seen)
            results.append(
                attend(part, keys[..., :seen, :], values[..., :seen, :], bias, dropout_p=dropout_p, **others)
            )
        return torch.cat(results, dim=-2)

    def gathered(self, part: Tensor) -> Tensor:
        """Gather all ranks' parts along dimension -2, in the order of positions."""
        collective = torch.ops._c10d_functional
        ranks_by_chunk = collective.all_gather_into_tensor(part.contiguous(), self.degree, self.group.group_name)
        ranks = collective.wait_tensor(ranks_by_chunk).unflatten(0, (self.degree, -1))
        first, second = ranks.chunk(2, dim=-2)
        return torch.cat([*first.unbind(), *second.flip(0).unbind()], dim=-2)

    def scattered(self, whole: Tensor) -> Tensor:
        """Return this rank's part of the sum of all ranks' whole sequences: the transpose of ``gathered``."""
        chunks, collective = whole.chunk(2 * self.degree, dim=-2), torch.ops._c10d_functional
        ranks = [torch.cat([chunks[rank], chunks[-1 - rank]], dim=-2) for rank in range(self.degree)]
        pending = collective.reduce_scatter_tensor(torch.cat(ranks), "sum", self.degree, self.group.group_name)
        part: Tensor = collective.wait_tensor(pending)
        return part


class _Gathered(torch.autograd.Function):
    """An operation that gathers keys or values of whole sequences from all ranks' parts."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, context: Context) -> Tensor:
        ctx.context = context
        return context.gathered(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.context.scattered(*gradients), None
