"""Token counts per expert, for layers with experts. Loads no DTensor."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def has_numbers(tensor: Tensor) -> bool:
    """Return whether a tensor has numbers, unlike the tensors on which layers are traced."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def tokens_per_expert(chosen: Tensor, experts: int) -> list[int]:
    """Count how often each expert is ``chosen``; for a tensor without numbers, return counts as equal as possible."""
    if has_numbers(chosen):
        return torch.bincount(chosen.flatten(), minlength=experts).tolist()
    each, more = divmod(chosen.numel(), experts)
    return [each + (expert < more) for expert in range(experts)]
