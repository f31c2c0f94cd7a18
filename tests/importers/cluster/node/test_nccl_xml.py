"""NCCL's topology files: dumped, static, and broken."""

from __future__ import annotations

import pytest
from node_samples import SWITCHES, gpu, net, pci, system

from penstock.importers.cluster.facts import NodeFacts, SourceFacts
from penstock.importers.cluster.node.nccl_xml import read_nccl_xml
from penstock.schemas.errors import InvalidDocument

GEN5_X16 = 32 * 10**9 * 16 * 128 // (130 * 8)


def read(text: str) -> tuple[SourceFacts, NodeFacts]:
    facts = read_nccl_xml(text)
    assert list(facts.nodes) == [""]
    return facts, facts.nodes[""]


def test_a_dump_of_a_node_with_an_nvlink_switch() -> None:
    """Each device and its card are behind a separate PCI switch, and each processor has two such switches."""
    slots = [
        pci(f"0000:{i}0:00.0", gpu(i, f"0000:{i}1:00.0", SWITCHES) + net(f"mlx5_{i}", f"0000:{i}2:00.0"))
        for i in range(4)
    ]
    facts, node = read(system("".join(slots[:2]), "".join(slots[2:])))
    assert node.has_nvswitch
    assert [(one.a, one.b, one.path, one.links) for one in node.device_links] == [
        (a, b, "nvlink", 18) for a in range(4) for b in range(a + 1, 4)
    ]
    assert [(one.index, one.bus_id, one.pcie_bandwidth_bytes_per_s) for one in node.devices or ()] == [
        (i, f"0000:{i}1:00.0", GEN5_X16) for i in range(4)
    ]
    assert [(nic.name, nic.bandwidth_bytes_per_s, nic.near) for nic in node.nics or ()] == [
        (f"mlx5_{i}", 50 * 10**9, (i,)) for i in range(4)
    ]
    assert facts.assumptions == ()


def test_links_from_device_to_device_and_unknown_pcie() -> None:
    """As in clouds that hide the PCI tree: no speeds, a socket card beside the devices."""
    ends = ["0001:00:00.0", "00000002:00:00.0"]
    unknown = {"speed": "", "width": "0"}
    cpus = [
        gpu(i, ends[i], {ends[1 - i]: 12, "0003:00:00.0": 4}, to="0x030200", **unknown)
        + '<nic><net name="eth0" dev="0" speed="100000" port="0"/></nic>' * (i == 0)
        for i in (0, 1)
    ]
    facts, node = read(system(*cpus))
    assert node.has_nvswitch is False
    assert [(one.a, one.b, one.path, one.links) for one in node.device_links] == [(0, 1, "nvlink", 12)]
    assert [one.pcie_bandwidth_bytes_per_s for one in node.devices or ()] == [None, None]
    assert [(nic.name, nic.near) for nic in node.nics or ()] == [("eth0", (0,))]
    assert facts.assumptions == ("2 NVLinks lead to devices that are not in the file",)


def test_ways_over_pcie_and_their_narrowest_link() -> None:
    narrow = gpu(1, "0000:04:00.0", speed="16.0 GT/s PCIe")
    first = pci("0000:01:00.0", gpu(0, "0000:02:00.0") + narrow + pci("0000:05:00.0", gpu(2, "0000:06:00.0")))
    _, node = read(system(first + gpu(3, "0000:07:00.0", width="8"), gpu(4, "0000:08:00.0")))
    half = GEN5_X16 // 2
    assert {(one.a, one.b): (one.path, one.bandwidth_bytes_per_s) for one in node.device_links} == {
        (0, 1): ("pcie-switch", half),
        (0, 2): ("pcie", GEN5_X16),
        (1, 2): ("pcie", half),
        (0, 3): ("host-bridge", half),
        (1, 3): ("host-bridge", half),
        (2, 3): ("host-bridge", half),
        **{(a, 4): ("socket", None) for a in range(4)},
    }
    assert node.has_nvswitch is None


@pytest.mark.parametrize("speed", ["16 GT/s", "16.0 GT/s PCIe"])
def test_static_files_have_bare_pci_devices(speed: str) -> None:
    """The devices count by address, whatever the order of the file; NVLink is not in it."""
    cpus = []
    for bridge, numbers in (("ffff:ff:01.0", (3, 4)), ("ffff:ff:02.0", (1, 0xA))):
        leaves = "".join(
            f'<pci busid="{domain:04x}:00:00.0" class="{of}" link_speed="{speed}" link_width="16"/>'
            for number in numbers
            for domain, of in ((number, "0x030200"), (number + 0x100, "0x020700"))
        )
        cpus.append(pci(bridge, leaves))
    facts, node = read(system(*cpus))
    assert [one.bus_id for one in node.devices or ()] == [f"{i:04x}:00:00.0" for i in (1, 3, 4, 0xA)]
    assert (node.device_links, node.has_nvswitch) == ((), None)
    assert [(nic.name, nic.bandwidth_bytes_per_s, nic.near) for nic in node.nics or ()] == [
        ("0103:00:00.0", None, (1, 2)),
        ("0104:00:00.0", None, (1, 2)),
        ("0101:00:00.0", None, (0, 3)),
        ("010a:00:00.0", None, (0, 3)),
    ]
    assert len(facts.assumptions) == 2


def test_ranks_and_parts_of_one_device_count_once() -> None:
    twice = '<gpu dev="0" sm="107" mlopart="0" rank="0"/><gpu dev="0" sm="107" mlopart="1" rank="1"/>'
    unused = pci("0000:03:00.0", of="0x030200")
    facts, node = read(system(pci("0000:02:00.0", twice, of="0x030200") + unused))
    assert [(one.index, one.is_partition) for one in node.devices or ()] == [(0, True)]
    assert facts.assumptions == (
        "1 devices without a <gpu> are left out: the run that wrote the file did not use them",
    )


def test_links_to_the_device_itself_are_noted_and_do_not_count() -> None:
    """As clouds write them of bridges whose other end varies."""
    first = gpu(0, "0000:02:00.0", {"0000:02:00.0": 12}, to="0x030200")
    facts, node = read(system(first, gpu(1, "0000:03:00.0", {"0000:03:00.0": 12}, to="0x030200")))
    assert [one.path for one in node.device_links] == ["socket"]
    assert any(sentence.startswith("2 NVLinks lead from a device to itself") for sentence in facts.assumptions)


A, B = "0000:02:00.0", "0000:03:00.0"


@pytest.mark.parametrize(
    ("text", "pointer", "detail"),
    [
        ("<graphs/>", "line 1, column 1", "give what NCCL_TOPO_DUMP_FILE writes"),
        ("<nvidia_smi_log/>", "line 1, column 1", "give it as nvidia-query"),
        (system(""), "line 1, column 1", "there is no device"),
        (system(gpu(0, A))[:60], "line 2, column 1", "no XML: unclosed token (is the text cut off?)"),
        (system(gpu(0, A), gpu(0, B), hosts=("0x1", "0x2")), "line 6, column 1", "of another host than that in line 2"),
        (system(gpu(0, A) + gpu(0, B)), "line 6, column 1", "dev 0 stands already in line 4"),
        (system(gpu(0, A) + gpu(1, A)), "line 5, column 1", "0000:02:00.0 stands already in line 3"),
        (system("<pci/>" + gpu(0, A)), "line 3, column 1", "the <pci> has no busid"),
        (system(pci(A, "<gpu/>")), "line 3, column 88", "dev of <gpu> is missing"),
        (system(gpu(0, A, speed="17 GT/s")), "line 3, column 1", "'17 GT/s' is not a PCI Express rate"),
        (system(gpu(0, A, width="many")), "line 3, column 1", "link_width of <pci> has to be a whole number"),
        (system(gpu(0, A, width="64")), "line 3, column 1", "a link has 1 to 32 lanes, not 64"),
        (system(gpu(0, A) + net("n", B, "fast")), "line 5, column 93", "speed of <net> has to be a whole number"),
        (
            system("".join(gpu(i, f"{i:04x}:02:00.0") for i in range(257))),
            "line 1, column 1",
            "257 devices among 257 PCI devices and cards are more than a node has",
        ),
        (system(gpu(0, A, {B: 10**6})), "line 4, column 39", "count of <nvlink> has to be a whole number up to 512"),
        (
            system(gpu(0, A, {B: 12}, to="0x030200") + gpu(1, B, {A: 6}, to="0x030200")),
            "line 4, column 39",
            "dev 0 has 12 links to dev 1, but 6 are said back (line 6)",
        ),
        (
            system(gpu(0, A, SWITCHES) + gpu(1, B)),
            "line 6, column 1",
            "dev 1 has no link into the NVLink switch, where others have 18",
        ),
    ],
)
def test_bad_texts(text: str, pointer: str, detail: str) -> None:
    with pytest.raises(InvalidDocument) as caught:
        read_nccl_xml(text)
    refusals = [(fault.pointer, fault.detail) for fault in caught.value.faults]
    assert [one for one in refusals if one[0] == pointer and detail in one[1]], refusals


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(InvalidDocument) as caught:
        read_nccl_xml(system(gpu(0, A, speed="1 GT/s") + net("n", B, "x") + pci(A)))
    assert len(caught.value.faults) == 3
