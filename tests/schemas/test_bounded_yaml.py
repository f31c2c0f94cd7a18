"""YAML whose aliases stand for too much is refused before anything is made of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.input_files import read_raw
from penstock.importers.cluster.node.xml_tree import read_xml
from penstock.importers.lines import Faults
from penstock.schemas.bounded.yaml_text import load_yaml
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.topology import ClusterTopology

LAUGHS = "\n".join(["a0: &a0 [lol]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))])
MAPPINGS = "\n".join(["a0: &a0 {x: 1}", *(f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}" for i in range(1, 40))])
MERGED = "\n".join(["a0: &a0 {x0: 1}", *(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}" for i in range(1, 40))])


@pytest.mark.parametrize("text", [LAUGHS, MAPPINGS, MERGED], ids=["lists", "mappings", "merged"])
def test_aliases_that_stand_for_too_much_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(
        InvalidDocument, match=r"reading the text takes more than the allowed 4,000,000 characters and values"
    ):
        load_yaml(text, "the text")
    file = tmp_path / "cluster.yaml"
    file.write_text(text, encoding="utf-8")
    for read in (ClusterTopology.read, lambda path: read_raw(str(path))):
        with pytest.raises(InvalidDocument, match=r"reading .*cluster\.yaml.* takes more than"):
            read(file)


def test_plain_aliases_are_read_and_deep_nesting_is_a_fault() -> None:
    assert load_yaml("a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}", "the text")["c"] == {"x": 1, "y": 2}
    with pytest.raises(InvalidDocument, match="the text is nested too deeply"):
        load_yaml("[" * 5000, "the text")


def test_a_long_text_of_many_pieces_in_xml_is_read_in_linear_time() -> None:
    """Each escaped letter is a piece; added one to the next they took a minute."""
    root = read_xml(f"<system>{'&amp;' * 400_000}</system>", Faults("the file"), root="system", is_instead={})
    assert root.text == "&" * 400_000
