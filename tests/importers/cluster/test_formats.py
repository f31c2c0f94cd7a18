"""Formats are recognised by their content, each by what no other has."""

from __future__ import annotations

import json
from typing import get_args

import pytest
import slurm_samples
import yaml
from node_samples import FABRIC
from slurm_samples import CONF_TREE as TREE
from slurm_samples import FLAT, SEVERAL, TORUS
from slurm_samples import SHOWN_TREE as SCONTROL_TREE
from test_any_text import TEXTS

from penstock.importers.cluster.formats import FORMATS, import_topology, recognised
from penstock.schemas.api.topology_import import Format, ImportOptions, ImportSource
from penstock.schemas.errors import InvalidDocument

SCONTROL_JSON = slurm_samples.as_json({"name": "n1", "state": ["IDLE"], "gres": "gpu:h100:4"})
SCONTROL_YAML = yaml.safe_dump(json.loads(SCONTROL_JSON)) + "- gres_used: gpu:1\n  topology: default:leaf1\n"
EXAMPLES: list[tuple[str, str]] = [
    *((name, text) for name, (_, text) in TEXTS.items() if name != "hypernodes"),
    ("hypernodes", "apiVersion: topology.volcano.sh/v1alpha1\nkind: HyperNode\nmetadata: {name: s}\n"),
    ("k8s-nodes", TEXTS["hypernodes"][1]),  # nodes and HyperNodes in one text
    ("slurm-conf", TREE),
    ("slurm-conf", "# site\n\nBlockName=b1 Nodes=n[1-2]\nBlockSizes=2\n"),
    ("slurm-yaml", SEVERAL),
    ("slurm-yaml", TORUS),
    ("slurm-yaml", FLAT),
    ("scontrol-topology", SCONTROL_TREE),
    ("scontrol-nodes", slurm_samples.CLUSTER),
    ("scontrol-nodes", slurm_samples.on_one_line(slurm_samples.CLUSTER)),
    ("scontrol-nodes", SCONTROL_JSON),
    ("scontrol-nodes", SCONTROL_YAML),
    ("ibnetdiscover", FABRIC),
    ("agents", '{"schema_version": 1, "name": "x", "nodes": []}'),
    ("agents", "schema_version: 1\nname: x\nuniform:\n  nodes: 2\n"),
]


@pytest.mark.parametrize(("name", "text"), EXAMPLES)
def test_content_tells_the_format(name: str, text: str) -> None:
    assert recognised(ImportSource(text=text)) == name
    assert recognised(ImportSource(text=text.replace("\n", "\r\n"))) == name


def test_every_format_has_a_reader_and_an_example() -> None:
    assert tuple(FORMATS) == get_args(Format)
    assert {name for name, _ in EXAMPLES} == set(FORMATS)
    for name, entry in FORMATS.items():
        assert callable(entry.reader(name))
        assert entry.what


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("", "site is empty"),
        (" \n", "site is empty"),
        ("hello\n", "site is of no known format"),
        (TREE + FABRIC, "site may be slurm-conf or ibnetdiscover"),
    ],
)
def test_a_text_that_may_be_nothing_or_several_things_is_asked_about(text: str, detail: str) -> None:
    with pytest.raises(InvalidDocument) as caught:
        recognised(ImportSource(text=text, name="site"))
    assert caught.value.detail == detail
    assert caught.value.remedy


def test_a_format_that_is_given_and_another_ones_text_is_told() -> None:
    with pytest.raises(InvalidDocument) as caught:
        import_topology([ImportSource(text=FABRIC, format="slurm-conf", name="fabric.txt")])
    assert caught.value.detail.startswith("fabric.txt is not Slurm's topology.conf: tree, blocks or rings, but what")
    assert caught.value.remedy == "--from ibnetdiscover (sources.format), or leave it out"


def test_no_source_is_no_import() -> None:
    with pytest.raises(InvalidDocument, match="no source"):
        import_topology([])


def test_faults_of_a_text_come_with_its_name_and_line() -> None:
    with pytest.raises(InvalidDocument) as caught:
        import_topology([ImportSource(text="SwitchName=a Nodes=n[1-\n", name="site.conf")])
    assert "site.conf" in caught.value.detail
    assert caught.value.faults[0].pointer.startswith("line 1, column ")


@pytest.mark.parametrize("format", [None, "nvidia-topo"])
def test_a_tool_that_is_not_read_is_named(format: str | None) -> None:
    text = "WEIGHT TABLE:\n             0000:01:00.0 0000:02:00.0\n0000:01:00.0 0            15\n"
    with pytest.raises(
        InvalidDocument, match=r"topo\.txt is the output of `amd-smi topology`, which Penstock cannot read"
    ) as caught:
        import_topology([ImportSource(text=text, name="topo.txt", format=format)])
    assert "NCCL_TOPO_DUMP_FILE" in str(caught.value.remedy)


def test_a_topology_with_nothing_to_add_is_one_already() -> None:
    text = "name: c\nuniform: {nodes: 1, devices_per_node: 2, kind: H100, memory_bytes: 80 GiB}\n"
    with pytest.raises(InvalidDocument, match=r"c\.yaml is already a Penstock topology"):
        import_topology([ImportSource(text=text, name="c.yaml")])
    options = ImportOptions(fabric="ports", fabric_bytes_per_s=10**9)
    assert import_topology([ImportSource(text=text)], options).topology.num_devices == 2
    assert recognised(ImportSource(text=text)) == "agents"
