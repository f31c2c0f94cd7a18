"""YAML as plain values; its aliases may name each other, so that a short text stands for a very large document."""

from __future__ import annotations

from typing import Any

import yaml

from penstock.schemas.bounded.budget import Budget
from penstock.schemas.errors import InvalidDocument


def load_yaml(text: str, origin: str) -> Any:
    """Return the value of a YAML text. Raises InvalidDocument, also where its aliases make the value too large."""
    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _count(node, Budget(origin), {})
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise InvalidDocument(f"{origin} is not YAML: {error}") from None
    except RecursionError:
        raise InvalidDocument(f"{origin} is nested too deeply") from None


def _count(node: yaml.Node, budget: Budget, sizes: dict[int, int]) -> int:
    """Return the characters and values that a node stands for. Repetitions by an alias count again each time."""
    if id(node) in sizes:
        budget.make(sizes[id(node)])
        return sizes[id(node)]
    sizes[id(node)] = 0  # a node that contains itself is refused where the document is validated
    if isinstance(node, yaml.ScalarNode):
        size = 1 + len(node.value)
    elif isinstance(node, yaml.MappingNode):
        size = 1 + sum(_count(each, budget, sizes) for pair in node.value for each in pair)
    else:
        size = 1 + sum(_count(each, budget, sizes) for each in node.value)
    sizes[id(node)] = size
    return size
