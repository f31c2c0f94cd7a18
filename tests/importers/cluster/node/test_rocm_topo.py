"""The matrices of `rocm-smi --showtopo`."""

from __future__ import annotations

import pytest
from node_samples import rocm

from penstock.importers.cluster.formats import import_topology
from penstock.importers.cluster.node.rocm_topo import read_rocm_topo
from penstock.schemas.api.topology_import import ImportOptions, ImportSource, TopologyImported
from penstock.schemas.errors import InvalidDocument

ALL = [["XGMI"] * 4 for _ in range(4)]


def imported(text: str, **options: object) -> TopologyImported:
    return import_topology([ImportSource(text=text)], ImportOptions(**{"devices": ("MI300X",), **options}))


def test_devices_that_xgmi_joins_have_the_links_of_their_kind() -> None:
    (node,) = imported(rocm(ALL)).topology.nodes
    assert node.fabric is not None
    assert (node.fabric.form, node.fabric.bandwidth_bytes_per_s, len(node.devices)) == ("pairs", 64 * 10**9, 4)


def test_pairs_that_others_pass_on_have_no_link_of_their_own() -> None:
    weights = [[30 if {a, b} == {0, 3} else 15 for b in range(4)] for a in range(4)]
    facts = read_rocm_topo(rocm(ALL, weights))
    assert [(one.a, one.b, one.path) for one in facts.nodes[""].device_links] == [
        (a, b, "nvlink") for a, b in ((0, 1), (0, 2), (1, 2), (1, 3), (2, 3))
    ]
    assert "1 of 6 pairs have no link between them; others pass it on" in imported(rocm(ALL, weights)).assumptions


def test_pcie_between_some_is_not_xgmi_between_all() -> None:
    types = [["PCIE" if 3 in (a, b) else "XGMI" for b in range(4)] for a in range(4)]
    with pytest.raises(InvalidDocument, match="the bandwidth between the devices of a node"):
        imported(rocm(types))
    answer = imported(rocm(types), fabric_bytes_per_s=32 * 10**9)
    fabric = answer.topology.nodes[0].fabric
    assert fabric is not None
    assert fabric.form == "bus"
    assert "GPU3 has no NVLink to the others; only PCIe is counted" in answer.assumptions


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        (rocm(ALL).replace("Link Type", "Kind"), "the whole text", "no block 'Link Type between two GPUs'"),
        (rocm(ALL).replace("XGMI", "WIFI"), "line 9", "joined by 'WIFI'; known are XGMI and PCIE"),
        (rocm(ALL).replace("GPU3   XGMI", "GPU3   PCIE"), "line 9", "GPU0 and GPU3 are joined by 'XGMI' and 'PCIE'"),
        (rocm(ALL)[: rocm(ALL).rindex("GPU3")], "line 10", "there is no row for GPU3; is the text cut off?"),
        (rocm(ALL).rsplit("   ", 1)[0], "line 14", "GPU3 has 3 cells of 4; is the line cut off?"),
        (rocm(ALL).replace("GPU1   GPU2", "GPU1   GPU1"), "line 10", "no line of column names"),
    ],
)
def test_bad_texts(text: str, place: str, words: str) -> None:
    with pytest.raises(InvalidDocument) as caught:
        read_rocm_topo(text)
    assert any(fault.pointer == place and words in fault.detail for fault in caught.value.faults), caught.value
