"""How many tokens a router sends to each expert, which layers with experts ask for. Loads no DTensor."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def has_numbers(tensor: Tensor) -> bool:
    """Whether a tensor is not one of those that layers are traced on."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def tokens_per_expert(chosen: Tensor, experts: int) -> list[int]:
    """The number of times that each expert is ``chosen``; as equal as can be where the tensor has no numbers."""
    if has_numbers(chosen):
        return torch.bincount(chosen.flatten(), minlength=experts).tolist()
    each, more = divmod(chosen.numel(), experts)
    return [each + (expert < more) for expert in range(experts)]
