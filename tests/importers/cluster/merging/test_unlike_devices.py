"""Nodes whose devices are not alike: what one device has is not taken for all."""

from __future__ import annotations

import pytest
from slurm_samples import record

from penstock.importers.cluster.formats import import_topology
from penstock.schemas.api.topology_import import ImportOptions, ImportSource, TopologyImported
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.topology import Fabric

GB = 10**9


def matrix(cells: str, count: int = 4) -> str:
    """Return the text of `nvidia-smi topo -m` of ``count`` devices with these cells above the diagonal, by rows."""
    above = iter(cells.split())
    table = [["X"] * count for _ in range(count)]
    for a in range(count):
        for b in range(a + 1, count):
            table[a][b] = table[b][a] = next(above)
    rows = [f"GPU{a}\t" + "\t".join(row) + "\n" for a, row in enumerate(table)]
    return "\t" + "\t".join(f"GPU{a}" for a in range(count)) + "\n" + "".join(rows)


def imported(text: str, **options: object) -> TopologyImported:
    return import_topology([ImportSource(text=text)], ImportOptions(**{"devices": ("H100",), **options}))


LONELY = matrix("NV18 NODE NV18 NODE NV18 NODE")
"""A node whose GPU2 has no NVLink."""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param(LONELY, "GPU2 has no NVLink to the others", id="one device without"),
        pytest.param(matrix("NV18 SYS SYS SYS SYS SYS"), "GPU2, GPU3 have no NVLink to the others", id="two without"),
        pytest.param(matrix("NV18 SYS SYS SYS SYS NV18"), "NVLink does not join all devices", id="two halves"),
        pytest.param(matrix("NV18 NV18 NV18 SYS NV18 NV18"), "NVLink does not join all devices", id="one pair"),
    ],
)
def test_nvlink_of_some_devices_is_not_taken_for_all(text: str, why: str) -> None:
    with pytest.raises(InvalidDocument) as caught:
        imported(text)
    (fault,) = caught.value.faults
    assert why in fault.detail
    assert caught.value.remedy == "--fabric-bandwidth 50GB/s"
    answer = imported(text, fabric_bytes_per_s=50 * GB)
    fabric = answer.topology.nodes[0].fabric
    assert isinstance(fabric, Fabric)
    assert (fabric.form, fabric.bandwidth_bytes_per_s) == ("bus", 50 * GB)
    assert any("only PCIe is counted" in sentence for sentence in answer.assumptions)


def test_devices_with_fewer_links_into_a_switch_bound_all_and_it_is_said() -> None:
    answer = imported(matrix("NV18 NV9 NV18 NV9 NV18 NV9"))
    fabric = answer.topology.nodes[0].fabric
    assert isinstance(fabric, Fabric)
    assert (fabric.form, fabric.bandwidth_bytes_per_s) == ("ports", 225 * GB)
    assert "every device is counted with 9 NVLinks, as many as the narrowest has" in answer.assumptions


def test_partitions_beside_whole_devices_are_left_out_alone() -> None:
    text = record("n1", gres="gpu:h100:6,gpu:h100_3g.40gb:4", tres="gres/gpu=10")
    text += record("n2", gres="gpu:h100-40c:2", tres="gres/gpu=2") + record("n3")
    answer = imported(text)
    assert [(node.name, len(node.devices)) for node in answer.topology.nodes] == [("n1", 6), ("n3", 8)]
    assert any(
        each == "n1: 4 partitions of devices (MIG, vGPU, or shared in time) are left out beside whole ones"
        for each in answer.assumptions
    )
    assert [(group.nodes, "vGPU" in group.why) for group in answer.left_out] == [("n2", True)]
