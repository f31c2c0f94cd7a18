"""How many tokens a router sends to each expert, which layers with experts ask for. Loads no DTensor."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def tokens_per_expert(chosen: Tensor, experts: int) -> list[int]:
    """The number of times that each expert is ``chosen``; as equal as can be where the tensor has no numbers."""
    if not chosen.is_meta and not isinstance(chosen, FakeTensor):
        return torch.bincount(chosen.flatten(), minlength=experts).tolist()
    each, more = divmod(chosen.numel(), experts)
    return [each + (expert < more) for expert in range(experts)]
