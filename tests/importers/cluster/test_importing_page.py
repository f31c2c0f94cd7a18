"""The pages on imports: the table is hardware.yaml, all formats and options are there, the reader reads."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, get_args

import pytest
from repository import ROOT

from penstock.importers.cluster.hardware_page import renewed
from penstock.importers.cluster.merging.merge import merge
from penstock.schemas.api.topology_import import Format, ImportOptions
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.options.importing import IMPORT_OPTIONS

PAGE = (ROOT / "docs" / "your-cluster.md").read_text(encoding="utf-8")
ADDING = ROOT / "docs" / "extending.md"


def test_the_table_is_that_of_the_data() -> None:
    assert renewed(PAGE) == PAGE, "python -m penstock.importers.cluster.hardware_page docs/your-cluster.md"


def test_formats_and_options_are_all_there() -> None:
    formats = PAGE.partition("### Formats\n")[2].partition("\n#")[0]
    assert re.findall(r"^\| `([a-z0-9][a-z0-9-]+)` \|", formats, re.MULTILINE) == list(get_args(Format))
    flags = {option.pointer: option.flag for option in IMPORT_OPTIONS.values()} | {"/options/name": "--name"}
    for field in ImportOptions.model_fields:
        assert flags[f"/options/{field}"] in PAGE, field


@pytest.mark.tier("ci")
def test_the_reader_of_the_page_on_adding_one() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", ADDING.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (code,) = (block for block in blocks if "def read_racks" in block)
    names: dict[str, Any] = {}
    exec(code, names)
    read = names["read_racks"]
    facts = replace(read("r1: n1 n2\nr2: n3\n"), format="slurm-conf")  # one that is in the table of formats
    result = merge([facts], [None], ImportOptions(devices=("H100",), devices_per_node=8))
    assert [node.name for node in result.topology.nodes] == ["n1", "n2", "n3"]
    with pytest.raises(InvalidDocument, match="line 2: 'r2' has no colon"):
        read("r1: n1\nr2\n")
