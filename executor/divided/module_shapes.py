"""A check that a divided layer computes like the whole layer, by the shapes of its modules' inputs and results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

Shape = tuple[int, ...]


class ModuleShapes:
    """The shapes of the tensors that each module within a layer takes and returns, call by call."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Shape]] = defaultdict(list)

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Note the calls of ``module`` and of its submodules within this context."""
        handles = []
        for name, each in module.named_modules():
            takes, gives = f"{name or 'it'} takes", f"{name or 'it'} gives"
            handles.append(
                each.register_forward_pre_hook(
                    lambda _, args, kwargs, key=takes: self._note(key, (args, kwargs)), with_kwargs=True
                )
            )
            handles.append(each.register_forward_hook(lambda *call, key=gives: self._note(key, call[-1])))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, key: str, tensors: Any) -> None:
        """Note shapes; a tensor that ranks share is noted with its whole shape and a mark."""
        for leaf in tree_leaves(tensors):
            if isinstance(leaf, Tensor):
                self.seen[key].append((*leaf.shape, -1) if isinstance(leaf, DTensor) else tuple(leaf.shape))


def misfit(whole: Mapping[str, list[Shape]], divided: Mapping[str, list[Shape]], degree: int) -> str | None:
    """Return the first place where a divided layer's tensors are neither the whole layer's nor parts of them, or None.

    A rank has a tensor whole, or its part along one dimension.
    """
    for key, shapes in divided.items():
        expected = whole.get(key, [])
        if len(shapes) != len(expected):
            return f"{key} {len(shapes)} tensors instead of {len(expected)}"
        for shape, full in zip(shapes, expected, strict=True):
            shared = len(shape) == len(full) + 1 and shape[-1] == -1
            if shape[:-1] != full if shared else not _is_part(shape, full, degree):
                here = f"{shape[:-1]} over all GPUs" if shared else f"{shape} on a GPU"
                return f"{key} {here} where {full} is whole; what one layer or module writes is not what the next reads"
    return None


def _is_part(shape: Shape, full: Shape, degree: int) -> bool:
    if len(shape) != len(full):
        return False
    apart = [(here, there) for here, there in zip(shape, full, strict=True) if here != there]
    return len(apart) <= 1 and all(here == -(-there // degree) for here, there in apart)
