"""The matrix of `nvidia-smi topo -m`, as drivers and terminals give it."""

from __future__ import annotations

import pytest
from node_samples import HEADER, MATRIX, ROWS

from penstock.importers.cluster.facts import NodeFacts
from penstock.importers.cluster.node.nvidia_topo import read_nvidia_topo
from penstock.schemas.errors import InvalidDocument


def read(text: str) -> NodeFacts:
    facts = read_nvidia_topo(text)
    assert list(facts.nodes) == [""]
    return facts.nodes[""]


def refused(text: str) -> dict[str, str]:
    with pytest.raises(InvalidDocument) as caught:
        read_nvidia_topo(text)
    return {fault.pointer: fault.detail for fault in caught.value.faults}


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(MATRIX, id="as printed"),
        pytest.param("user@host:~$ nvidia-smi topo -m\n" + MATRIX.replace("\n", "\r\n"), id="pasted with the prompt"),
        pytest.param("\t\x1b[4m" + MATRIX[1:].replace(" ID\n", " ID\x1b[0m\n", 1), id="underlined"),
        pytest.param("\t[4m" + MATRIX[1:].replace(" ID\n", " ID[0m\n", 1), id="underlined, without the escapes"),
        pytest.param(MATRIX.expandtabs(), id="blanks for tabs"),
        pytest.param(MATRIX.replace("\tNUMA Affinity\tGPU NUMA ID\n", "\n"), id="header without the last columns"),
    ],
)
def test_tabs_blanks_and_escapes(text: str) -> None:
    node = read(text)
    assert [device.index for device in node.devices or ()] == [0, 1, 2]
    assert [(one.a, one.b, one.path, one.links) for one in node.device_links] == [
        (a, b, "nvlink", 18) for a, b in ((0, 1), (0, 2), (1, 2))
    ]
    assert [(nic.name, nic.near) for nic in node.nics or ()] == [("mlx5_0", (1,)), ("mlx5_bond_1", (0,))]
    assert node.has_nvswitch is None, "that depends on how many links such a device has"


def test_codes_of_old_drivers_and_cards_by_name() -> None:
    node = read(
        "\tGPU0\tGPU1\tGPU2\tGPU3\tmlx5_0\tCPU Affinity\n"
        "GPU0\t X \tPIX\tPXB\tSOC\tSOC\t0-13\n"
        "GPU1\tPIX\t X \tPHB\tNV2\tSOC\t0-13\n"
        "GPU2\tPXB\tPHB\t X \tNODE\tSOC\t0-13\n"
        "GPU3\tSOC\tNV2\tNODE\t X \tSOC\t0-13\n"
        "mlx5_0\tSOC\tSOC\tSOC\tSOC\t X\n\nLegend:\n"
    )
    assert [one.path for one in node.device_links] == [
        "pcie-switch",
        "pcie",
        "socket",
        "host-bridge",
        "nvlink",
        "host-bridge",
    ]
    assert [nic.near for nic in node.nics or ()] == [()]


def test_rows_of_cards_may_be_missing() -> None:
    node = read("\tGPU0\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNODE\tSYS\t0-19\t0\n")
    assert [(nic.name, nic.near) for nic in node.nics or ()] == [("NIC0", (0,)), ("NIC1", ())]


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("", {"the whole text": "it is empty"}),
        ("\x00\x01", {"the whole text": "no line of column names"}),
        ("GPU 0: NVIDIA H100 (UUID: GPU-0)", {"the whole text": "it begins with 'GPU 0: NVIDIA H100 (UUID: GPU-0)'"}),
        (MATRIX + MATRIX, {"line 18": "a second matrix begins"}),
        (
            MATRIX.replace("GPU1\tNV18\t X", "GPU1\tNV12\t X"),
            {"line 2, column 10": "GPU0 to GPU1 is NV18, but GPU1 to GPU0 is NV12 (line 3, column 6); both are one"},
        ),
        (
            MATRIX.replace("PXB\tNODE\t0", "PXX\tNODE\t0"),
            {"line 2, column 20": "GPU0 to NIC0: 'PXX' is none of X, NV1"},
        ),
        (MATRIX.replace("PXB\tNODE\t0", "\tNODE\t0"), {"line 2, column 20": "GPU0 to NIC0: it is empty"}),
        (MATRIX.replace("GPU1\tNV18\t X ", "GPU1\tNV18\tNV18"), {"line 3, column 11": "has to be X, itself"}),
        (
            MATRIX.replace("GPU0\t X \tNV18", "GPU0\t X \tX"),
            {"line 2, column 10": "GPU0 to GPU1 is X; it cannot be X"},
        ),
        (
            HEADER + ROWS[:60],
            {"line 1": "there is no row for GPU2; is the text cut off?", "line 3": "GPU1 has 2 cells of 5"},
        ),
        (
            HEADER + ROWS[: ROWS.index("GPU2") + 10],
            {"line 4": "GPU2 has 2 cells of 5; is the line cut off?"},
        ),
        (HEADER + ROWS.replace("NIC1\t", "GPU1\t"), {"line 6, column 1": "the row GPU1 stands already in line 3"}),
        (HEADER + ROWS.replace("NIC1\t", "NIC7\t"), {"line 6, column 1": "the row 'NIC7' has no column of this name"}),
        (
            MATRIX.replace("NIC0\tNIC1", "NIC0NIC1", 1).replace("PXB\tNODE", "PXBNODE"),
            {"line 1, column 17": "'NIC0NIC1' is NIC0 and NIC1 glued together: a tab was lost"},
        ),
        (
            MATRIX.replace("\tGPU1\tGPU2", "\tGPU1GPU2", 1),
            {"line 1, column 7": "'GPU1GPU2' is GPU1 and GPU2 glued together"},
        ),
        (
            HEADER + ROWS.replace("NV18\tPXB\tNODE\t0-63,128-191\t0\t\tN/A", "NV18\tPXBNODE"),
            {"line 2, column 20": "GPU0 has 4 cells of 5; 'PXBNODE' is several cells: a tab was lost"},
        ),
        (MATRIX.replace("\tNIC1\tCPU", "\tNIC0\tCPU"), {"line 1": "there are two columns NIC0"}),
    ],
)
def test_bad_texts(text: str, faults: dict[str, str]) -> None:
    details = refused(text)
    assert details.keys() >= faults.keys()
    assert all(wanted in details[pointer] for pointer, wanted in faults.items()), details
