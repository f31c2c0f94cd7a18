"""The values of a checkpoint other than tensors, as JSON text: options of optimizers, states of schedules.

Reading such a text creates numbers, texts, containers and small tensors, and never calls code that the text names. A
value that JSON lacks is an object with the one key ``penstock``: ``{"penstock": ["tuple", [...]]}``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from penstock.schemas.errors import UnsupportedRequest

DTYPES = {str(one).removeprefix("torch."): one for one in vars(torch).values() if isinstance(one, torch.dtype)}
"""Torch's types of numbers, by their names in files."""

_TAG = "penstock"


def to_text(name: str, value: Any) -> str:
    """Return the JSON text of a value. Raises UnsupportedRequest for a value that holds anything but data."""
    return json.dumps(_plain(name, value))


def from_text(text: str) -> Any:
    """Return the value of a text. Raises ValueError, TypeError or KeyError for a text that ``to_text`` never makes."""
    return _value(json.loads(text))


def _plain(name: str, value: Any) -> Any:
    """Return a value in JSON's types; ``name``: the name of the entry, for the error."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_plain(name, one) for one in value]
    if type(value) is dict and _TAG not in value and all(isinstance(key, str) for key in value):
        return {key: _plain(name, one) for key, one in value.items()}
    for kind, (of, parts, _) in _TAGGED.items():
        if isinstance(value, of):
            return {_TAG: [kind, _plain(name, parts(value))]}
    raise UnsupportedRequest(
        f"{name!r} has a value of type {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot "
        "store: only numbers, texts, lists, tuples, dicts, sets and tensors are written",
        remedy="keep such a value out of the optimizer's options and of the schedule's state_dict",
    )


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(one) for one in plain]
    if not isinstance(plain, dict):
        return plain
    if _TAG not in plain:
        return {key: _value(one) for key, one in plain.items()}
    kind, parts = plain[_TAG]
    make = _TAGGED[kind][2]
    return make(_value(parts))


def _tensor(parts: list[Any]) -> torch.Tensor:
    dtype, numbers = parts
    return torch.tensor(numbers, dtype=DTYPES[dtype])


_TAGGED: Mapping[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tuple": (tuple, list, tuple),
    "counter": (Counter, lambda counter: [list(item) for item in counter.items()], lambda items: Counter(dict(items))),
    "dict": (dict, lambda items: [list(item) for item in items.items()], dict),
    "set": (set, list, set),
    "dtype": (torch.dtype, lambda dtype: str(dtype).removeprefix("torch."), DTYPES.__getitem__),
    "tensor": (
        torch.Tensor,
        lambda tensor: [str(tensor.dtype).removeprefix("torch."), tensor.tolist()],
        _tensor,
    ),
}
"""The type of each tag, the function that converts it to JSON's types, and the function that converts back."""
