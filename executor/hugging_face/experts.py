"""Experts of the library's mixtures that ranks share out, by an all-to-all of tokens, as in `divided`.

The library's expert parallelism has all tokens on every rank, and sums the results of each rank's experts. Here tokens
go to the ranks that have their experts. Where ranks also share layers, all of them have the same tokens: every rank
then sends a part of the tokens, and results are gathered.

.. [1] torchtitan, ``expert_parallel``: ``ReordererSequenceParallel``, which has tensor-parallel ranks send parts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from penstock.executor.divided.experts import ExpertParallel
from penstock.executor.divided.routing import tokens_per_expert

GROUPED = "penstock"
"""The library's name for experts that are computed by grouped products."""


class LibraryExperts(ExpertParallel):
    """A module of experts with the library's interface: tokens, their experts, and the weights of these experts.

    It computes this rank's experts by the library's forward.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        of_the_library: Any = module
        number, compute = int(of_the_library.num_experts), module.forward

        def compute_local(tokens: Tensor, counts: list[int]) -> Tensor:
            numbers = torch.arange(len(counts), device=tokens.device)
            chosen = numbers.repeat_interleave(torch.tensor(counts, device=tokens.device), output_size=len(tokens))
            results: Tensor = compute(tokens, chosen.unsqueeze(-1), tokens.new_ones(len(tokens), 1))
            return results

        module.forward = compute_local
        super()._apply(module, device_mesh)
        of_the_library.num_experts = number // device_mesh.size()
        exchanged = module.forward

        def forward(tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            return weighed(exchanged, number, tokens, chosen, weights)

        module.forward = forward
        return module


def weighed(
    exchanged: Callable[[Tensor, list[int]], Tensor], number: int, tokens: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """Sum the results of each token's experts by their weights, for tokens of shape (tokens, width).

    ``chosen``, ``weights``: shape (tokens, experts per token); there are ``number`` experts.
    """
    each = chosen.shape[-1]
    order = chosen.flatten().argsort(stable=True)
    results = exchanged(tokens[order // each], tokens_per_expert(chosen, number))
    by_token = (results * weights.flatten()[order].unsqueeze(-1))[order.argsort()]
    return by_token.view(len(tokens), each, -1).sum(1).to(tokens.dtype)


def grouped(module: nn.Module, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Run the library's implementation by grouped products; on the meta device, in every type."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    with _GroupsOnMeta() if tokens.is_meta and tokens.dtype != torch.bfloat16 else nullcontext():
        results: Tensor = grouped_mm_experts_forward(module, tokens, chosen, weights)
    return results


class _GroupsOnMeta(TorchFunctionMode):
    """A mode that replaces grouped products on the meta device, where torch has them only in bfloat16.

    One product of all rows with one of the matrices has the same shapes, operations and bytes.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in ("grouped_mm", "_grouped_mm"):
            rows, matrices = args[:2]
            return rows @ matrices[0]
        return func(*args, **(kwargs or {}))


def in_parts(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make each rank that shares layers call its experts with a part of the tokens, which all ranks have.

    The call raises ValueError for a number of tokens that the ranks cannot divide evenly.
    """
    whole = module.forward

    def forward(*arguments: Tensor) -> Tensor:
        if len(arguments[0]) % mesh.size():
            raise ValueError(f"{len(arguments[0])} tokens for experts cannot be split evenly over {mesh.size()} GPUs")
        part: Any = _Part.apply
        part_of_results = whole(*(part(each, mesh) for each in arguments))
        gathered: Tensor = _Joined.apply(part_of_results, mesh)  # type: ignore[no-untyped-call]
        return gathered

    module.forward = forward


class _Part(torch.autograd.Function):
    """An operation that takes this rank's rows of a tensor that all ranks have; backward gathers gradients."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return _local_rows(whole, mesh)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _all(gradients[0], ctx.mesh), None


class _Joined(torch.autograd.Function):
    """An operation that gathers the rows of all ranks; backward takes this rank's rows of the gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return _all(part, mesh)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _local_rows(gradients[0], ctx.mesh), None


def _local_rows(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    return whole.chunk(mesh.size())[mesh.get_local_rank()].clone()


def _all(part: Tensor, mesh: DeviceMesh) -> Tensor:
    collective = torch.ops._c10d_functional
    pending = collective.all_gather_into_tensor(part.contiguous(), mesh.size(), mesh.get_group().group_name)
    whole: Tensor = collective.wait_tensor(pending)
    return whole
