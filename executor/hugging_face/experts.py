"""Experts of the library's mixtures that ranks share out, by an all-to-all of tokens, as `divided` does of a job's own.

The library's own expert parallelism has all tokens on every rank, and sums what each rank's experts make of them. Here
tokens go to the ranks that have their experts. Where ranks share layers as well, whose tokens are whole on each, every
rank sends its part of them, and results are gathered.

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
"""The name that experts by grouped products have in the library."""


class LibraryExperts(ExpertParallel):
    """A module of experts that is called as the library calls its own: tokens, their experts, and the weights of these.

    It computes with this rank's experts by the library's own forward.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        of_the_library: Any = module
        number, compute = int(of_the_library.num_experts), module.forward

        def own(tokens: Tensor, counts: list[int]) -> Tensor:
            numbers = torch.arange(len(counts), device=tokens.device)
            chosen = numbers.repeat_interleave(torch.tensor(counts, device=tokens.device), output_size=len(tokens))
            made: Tensor = compute(tokens, chosen.unsqueeze(-1), tokens.new_ones(len(tokens), 1))
            return made

        module.forward = own
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
    """Of (tokens, width) the sum of what the chosen experts of each token make, by their weights.

    ``chosen``, ``weights``: (tokens, experts of each), of ``number`` experts.
    """
    each = chosen.shape[-1]
    order = chosen.flatten().argsort(stable=True)
    made = exchanged(tokens[order // each], tokens_per_expert(chosen, number))
    by_token = (made * weights.flatten()[order].unsqueeze(-1))[order.argsort()]
    return by_token.view(len(tokens), each, -1).sum(1).to(tokens.dtype)


def grouped(module: nn.Module, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """What the library's own implementation by grouped products makes, on the meta device in every type."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    with _GroupsOnMeta() if tokens.is_meta and tokens.dtype != torch.bfloat16 else nullcontext():
        made: Tensor = grouped_mm_experts_forward(module, tokens, chosen, weights)
    return made


class _GroupsOnMeta(TorchFunctionMode):
    """Grouped products on the meta device in other types than bfloat16, of which torch has none there.

    One product of all rows with one of the matrices has their shapes, operations and bytes kept.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in ("grouped_mm", "_grouped_mm"):
            rows, matrices = args[:2]
            return rows @ matrices[0]
        return func(*args, **(kwargs or {}))


def in_parts(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let each rank that shares layers call its experts with its part of the tokens, all of which are whole on each.

    Raises ValueError, when it is called, for tokens that the ranks do not divide.
    """
    whole = module.forward

    def forward(*given: Tensor) -> Tensor:
        if len(given[0]) % mesh.size():
            raise ValueError(f"{mesh.size()} GPUs cannot have equal parts of {len(given[0])} tokens for experts")
        part: Any = _Part.apply
        made = whole(*(part(each, mesh) for each in given))
        gathered: Tensor = _Joined.apply(made, mesh)  # type: ignore[no-untyped-call]
        return gathered

    module.forward = forward


class _Part(torch.autograd.Function):
    """This rank's rows of a tensor that all ranks have; of a gradient each has those rows."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return _own(whole, mesh)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _all(gradients[0], ctx.mesh), None


class _Joined(torch.autograd.Function):
    """The rows of all ranks; the gradient of each rank's result is whole."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return _all(part, mesh)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _own(gradients[0], ctx.mesh), None


def _own(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    return whole.chunk(mesh.size())[mesh.get_local_rank()].clone()


def _all(part: Tensor, mesh: DeviceMesh) -> Tensor:
    collective = torch.ops._c10d_functional
    made = collective.all_gather_into_tensor(part.contiguous(), mesh.size(), mesh.get_group().group_name)
    whole: Tensor = collective.wait_tensor(made)
    return whole
