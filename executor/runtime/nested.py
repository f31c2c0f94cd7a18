"""Tensors within the values that a job returns: nested tuples, lists and mappings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def on_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return ``value`` with each tensor replaced by ``function`` of it; other parts are unchanged."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: on_tensors(function, one) for key, one in value.items()}
    if isinstance(value, list):
        return [on_tensors(function, one) for one in value]
    if isinstance(value, tuple):
        parts = [on_tensors(function, one) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value
