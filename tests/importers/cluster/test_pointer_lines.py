"""Pointers of JSON and YAML texts come with their lines."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes_samples import listed, node

from penstock.importers.cluster.kubernetes.kubernetes_nodes import read_k8s_nodes
from penstock.importers.cluster.pointer_lines import lines_of
from penstock.schemas.errors import InvalidDocument

YAML = """\
# two documents
kind: Node
metadata:
  name: a
  labels: {x: y}
---
---
- first
- second:
    - third
"""


def test_lines_of_yaml_documents() -> None:
    wanted = {"document 1/metadata/labels": 5, "document 2/0": 8, "document 2/1/second/0": 10}
    assert lines_of(YAML, wanted) == wanted
    assert lines_of(YAML, ["document 1/metadata/uid", "document 9/x"]) == {"document 1/metadata/uid": 4}


def test_a_text_that_is_no_yaml_has_no_lines() -> None:
    assert lines_of('{"a": [', ["a"]) == {}


values = st.recursive(
    st.integers() | st.text("ab:#-", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("klm", min_size=1, max_size=3), inner),
    max_leaves=12,
)


@given(document=st.dictionaries(st.text("klm", min_size=1, max_size=3), values, min_size=1))
def test_every_value_of_a_printed_json_stands_on_its_line(document: dict[str, Any]) -> None:
    lines = json.dumps(document, indent=1).split("\n")
    at: dict[str, int] = {}

    def walk(value: Any, pointer: str, line: int) -> int:
        """Record the first line of a value and each part, and return its last line. A line has one value or bracket."""
        at[pointer] = line
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        end = line
        for key, each in inner:
            end = walk(each, f"{pointer}/{key}".lstrip("/"), end + 1)
        return end + (isinstance(value, dict | list) and bool(value))

    assert walk(document, "", 1) == len(lines)
    del at[""]
    assert lines_of("\n".join(lines), at) == at


@pytest.mark.parametrize("indent", [1, 4])
def test_a_label_that_is_too_long_is_told_by_line(indent: int) -> None:
    text = json.dumps(json.loads(listed(node("a"), node("b", labels={"x": "v" * 64}))), indent=indent)
    with pytest.raises(InvalidDocument) as caught:
        read_k8s_nodes(text)
    last = [number for number, line in enumerate(text.split("\n"), start=1) if '"labels"' in line][-1]
    assert caught.value.faults[0].pointer == f"items/1/metadata/labels, line {last}"
