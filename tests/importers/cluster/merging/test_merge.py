"""Facts of several sources as one topology: what is taken from whom, assumed, left out, asked for."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes_samples import listed, node, pod
from node_samples import FABRIC, MATRIX, SWITCHES, gpu, log, net, pci, queried, system
from slurm_samples import record

from penstock.importers.cluster.facts import (
    DeviceFacts,
    DeviceLinkFacts,
    LinkFacts,
    NicFacts,
    NodeFacts,
    Place,
    SourceFacts,
    SwitchFacts,
)
from penstock.importers.cluster.formats import import_topology
from penstock.importers.cluster.merging.cards import lanes_of
from penstock.importers.cluster.merging.merge import merge
from penstock.schemas.api.topology_import import ImportOptions, ImportSource, TopologyImported
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.topology import ClusterTopology, DeviceKind

pytestmark = pytest.mark.tier("ci")

GIB, GB, GBIT = 2**30, 10**9, 10**9 // 8
MEMORY = int(79.11 * GIB)
"""The memory of an H100 by torch."""
CONTEXT = MEMORY - 84_465_090_560
"""The memory of an H100 that was not free once CUDA ran."""
TREE = """\
SwitchName=leaf1 Nodes=n[1-2]
SwitchName=leaf2 Nodes=n[3-4]
SwitchName=top Switches=leaf[1-2]
"""


def imported(*texts: str | ImportSource, **options: Any) -> TopologyImported:
    sources = [text if isinstance(text, ImportSource) else ImportSource(text=text) for text in texts]
    result = import_topology(sources, ImportOptions(**options))
    assert ClusterTopology.parse_json(result.topology.canonical_json()) == result.topology
    assert result.assumptions == result.topology.assumptions
    return result


def refused(*texts: str | ImportSource, **options: Any) -> InvalidDocument:
    with pytest.raises(InvalidDocument) as caught:
        imported(*texts, **options)
    return caught.value


def nodes(*names: str, **changes: Any) -> str:
    return "".join(record(name, **changes) for name in names)


def links(result: TopologyImported) -> dict[tuple[str, str], float]:
    """Return the bandwidth of each link in Gbit/s, by its ends."""
    return {(link.a, link.b): link.bandwidth_bytes_per_s / GBIT for link in result.topology.links}


def lanes(result: TopologyImported) -> set[int | None]:
    return {link.lanes for link in result.topology.links}


def out(result: TopologyImported) -> dict[str, str]:
    return {group.nodes: group.why for group in result.left_out}


def facts(
    *node_facts: NodeFacts, switches: tuple[SwitchFacts, ...] = (), wires: tuple[LinkFacts, ...] = ()
) -> SourceFacts:
    return SourceFacts("scontrol-nodes", "by hand", {each.name: each for each in node_facts}, switches, wires)


def merged(*sources: SourceFacts, **options: Any) -> TopologyImported:
    return merge(sources, [None] * len(sources), ImportOptions(**options))


AT = Place("by hand", 1)


def test_slurm_tree_and_nodes() -> None:
    result = imported(TREE, nodes("n1", "n2", "n4") + record("n3", "IDLE+DRAIN"), name="site")
    topology = result.topology
    assert topology.name == "site"
    assert [each.name for each in topology.nodes] == ["n1", "n2", "n4"]
    first = topology.nodes[0]
    assert [device.id for device in first.devices] == [f"n1/{i}" for i in range(8)]
    assert {(device.kind, device.memory_bytes, device.context_bytes) for device in first.devices} == {
        ("H100", MEMORY, CONTEXT)
    }
    (communicators,) = {device.communicators for device in first.devices}
    assert communicators is not None
    assert (communicators.edge_bytes, communicators.group_bytes) == (17 * 2**20, 398 * 2**20)
    notes = [sentence for sentence in topology.assumptions if "each communicator takes" in sentence]
    assert len(notes) == 1
    assert "measured" in notes[0]
    assert first.fabric is not None
    assert (first.fabric.form, first.fabric.bandwidth_bytes_per_s) == ("ports", 450 * GB)
    assert links(result) == {
        ("n1", "leaf1"): 3200,
        ("n2", "leaf1"): 3200,
        ("n4", "leaf2"): 3200,
        ("leaf1", "top"): 6400,
        ("leaf2", "top"): 3200,
    }
    assert out(result) == {"n3": "it is drained"}
    assert result.free == "n[1-2,4]"
    assert [(each.format, each.nodes, each.switches) for each in result.sources] == [
        ("slurm-conf", 4, 3),
        ("scontrol-nodes", 4, 0),
    ]


def test_the_same_sources_give_the_same_bytes() -> None:
    texts = TREE, nodes("n1", "n2", "n3", "n4")
    assert imported(*texts).model_dump_json() == imported(*texts).model_dump_json()


def test_all_that_is_missing_is_asked_for_at_once() -> None:
    error = refused(TREE, devices=("Foo",), devices_per_node=2)
    assert [fault.pointer for fault in error.faults] == ["n[1-4]"] * 4
    assert error.remedy == "--memory 80GiB --fabric ports --fabric-bandwidth 450GB/s --nic 400Gbit/s"
    options = {"memory_bytes": GIB, "fabric": "bus", "fabric_bytes_per_s": 8 * GB, "nic_bytes_per_s": GB}
    result = imported(TREE, devices=("Foo",), devices_per_node=2, latency_ns=7, **options)
    first = result.topology.nodes[0]
    assert first.devices[0].kind == "Foo"
    assert first.fabric is not None
    assert (first.fabric.form, first.fabric.bandwidth_bytes_per_s) == ("bus", 8 * GB)
    assert links(result)["n1", "leaf1"] == 8
    assert result.topology.links[0].latency_ns == 7


def test_two_sizes_of_one_product_are_asked_for() -> None:
    error = refused(nodes("n1", gres="gpu:a100:8", tres="gres/gpu=8"))
    assert [fault.detail for fault in error.faults] == [
        "the memory of A100 (79.15 GiB or 39.5 GiB) is unknown; give --memory 80GiB (options.memory_bytes)"
    ]
    result = imported(nodes("n1", gres="gpu:a100:8", tres="gres/gpu=8"), memory_bytes=40 * GIB)
    assert result.topology.nodes[0].devices[0].memory_bytes == 40 * GIB


def test_the_user_may_say_more_of_a_product_than_its_name_and_nothing_else() -> None:
    bare = nodes("n1", gres="gpu:a100:8", tres="gres/gpu=8")
    for device, memory, form in (("A100-SXM4-40GB", int(39.5 * GIB), "ports"), ("A100-PCIE-80GB", 80 * GIB, "bus")):
        (node,) = imported(bare, devices=(device,)).topology.nodes
        assert node.fabric is not None
        assert (node.devices[0].memory_bytes, node.fabric.form) == (memory, form)
    sized = nodes("n1", gres="gpu:a100_80g:8", tres="gres/gpu=8")
    result = imported(sized, devices=("A100-SXM4-40GB",))
    assert result.topology.nodes[0].devices[0].memory_bytes == int(79.15 * GIB)
    assert any("has no effect" in note for note in result.assumptions)


def test_what_the_table_assumes_is_told() -> None:
    notes = imported(TREE, nodes("n1", "n2", "n3", "n4")).assumptions
    assert "a transfer between devices of a node begins 5 µs late: assumed" in notes
    assert any(
        sentence.startswith("driver and libraries take 0.4458 GiB of each H100: measured, ") for sentence in notes
    )


def test_a_sites_own_name_of_a_product_is_asked_for() -> None:
    text = nodes("n1", "n2", gres="gpu:big:4", tres="gres/gpu=4")
    assert refused(text).remedy == "--device-kind 'big=H100'"
    assert {device.kind for device in imported(text, devices=("BIG=H200",)).topology.nodes[0].devices} == {"H200"}
    assert {device.kind for device in imported(text, devices=("H200",)).topology.nodes[0].devices} == {"H200"}


def test_options_that_sources_leave_nothing_to_are_told() -> None:
    result = imported(nodes("n1"), devices=("A100", "big=H200"))
    assert result.topology.nodes[0].devices[0].kind == "H100"
    assert sum("has no effect" in note for note in result.assumptions) == 2


@pytest.mark.parametrize("devices", [("=H100",), ("big=",), ("H100", "A100")])
def test_devices_that_say_nothing_are_refused(devices: tuple[str, ...]) -> None:
    assert "neither PRODUCT=KIND nor the only kind" in str(refused(nodes("n1"), devices=devices))


def test_oversubscription_narrows_the_links_upwards() -> None:
    result = imported(TREE, nodes("n1", "n2", "n3", "n4"), oversubscription=4)
    assert links(result)["leaf1", "top"] == 1600
    assert links(result)["n1", "leaf1"] == 3200
    assert any("divided by 4" in note for note in result.assumptions)


# ---- joining ---------------------------------------------------------------------------------------------------------


def test_first_labels_join_where_they_mean_one_node() -> None:
    result = imported(TREE, nodes("n1.site.org", "n2.site.org", "n3", "n4"))
    assert [each.name for each in result.topology.nodes] == ["n1", "n2", "n3", "n4"]
    assert "'n1.site.org' is taken for the node 'n1' of another source, and so are 1 more" in result.assumptions[0]
    assert [each.name for each in imported(TREE, nodes("n1.site.org"), only="n1.site.org").topology.nodes] == ["n1"]
    error = refused(TREE, nodes("n1.a", "n1.b"))
    assert [(fault.pointer, fault.detail) for fault in error.faults] == [
        ("n1", "'n1' may be 'n1.a' or 'n1.b' of source 2 (scontrol-nodes)")
    ]
    error = refused(nodes("n1.a", "n1.b"), TREE)
    assert [fault.pointer for fault in error.faults] == ["n1"]
    apart = imported(nodes("10.0.0.1"), nodes("10.0.0.2"), nodes("10"))
    assert len(apart.topology.nodes) == 3


@pytest.mark.parametrize(
    ("other", "detail"),
    [
        ({"gres": "gpu:h100:4", "tres": "gres/gpu=4"}, "8 devices (a, line 1), but 4 devices (b, line 1)"),
        ({"gres": "gpu:a100:8", "tres": "gres/gpu=8"}, "device 0 is 'h100' (a, line 1), but 'a100' (b, line 1)"),
    ],
)
def test_contradictions_name_both_places(other: dict[str, str], detail: str) -> None:
    one = ImportSource(text=nodes("n1", "n2"), name="a")
    error = refused(one, ImportSource(text=nodes("n1", "n2", **other), name="b"))
    assert [(fault.pointer, fault.detail) for fault in error.faults] == [("n[1-2]", detail)]


def test_memory_that_differs_is_a_contradiction_unless_it_is_rounded() -> None:
    def smi(mib: int) -> ImportSource:
        return ImportSource(text=log(*(queried(i, memory=f"{mib} MiB") for i in range(8))), nodes="n1")

    rounded = imported(smi(81559), smi(81920)).topology.nodes[0].devices[0]
    assert rounded.memory_bytes == MEMORY
    assert "bytes of memory" in refused(smi(81559), smi(40960)).faults[0].detail


def test_a_text_without_names_is_of_all_nodes_that_are_like_it() -> None:
    slots = [
        pci(f"{i:04}:10:00.0", gpu(i, f"{i:04}:11:00.0", SWITCHES) + net(f"m{i}", f"{i:04}:12:00.0")) for i in range(4)
    ]
    dump = system("".join(slots))
    four, eight = nodes("n1", "n2", gres="gpu:h100:4", tres="gres/gpu=4"), nodes("n3")
    result = imported(four + eight, dump)
    assert any(note == "n[1-2] are each as source 2 (nccl-xml) describes one node" for note in result.assumptions)
    assert links(result)["n1/0", "switch"] == 400  # a card beside each device
    assert links(result)["n3", "switch"] == 3200
    named = imported(four, ImportSource(text=dump, nodes="n2"))
    assert {end for end, _ in links(named)} == {"n1", *(f"n2/{i}" for i in range(4))}
    assert "none of the other sources" in refused(eight, dump).faults[0].detail
    assert refused(four, ImportSource(text=dump, nodes="n[2-4]")).faults[0].pointer == "n[3-4]"
    assert "leave --node" in refused(ImportSource(text=four, nodes="n1")).faults[0].detail
    both = imported(ImportSource(text=dump, nodes="a,b"), devices=("H100",))
    assert [each.name for each in both.topology.nodes] == ["a", "b"]


def test_a_text_without_names_is_of_no_node_whose_devices_nobody_tells_where_others_are_told() -> None:
    result = imported(TREE, nodes("n1", "n2"), log(*(queried(i) for i in range(8))))
    assert "n[1-2] are each as source 3 (nvidia-query) describes one node" in result.assumptions
    assert out(result) == {"n[3-4]": "no source says which devices it has"}
    everywhere = imported(TREE, log(*(queried(i) for i in range(8))))
    assert len(everywhere.topology.nodes) == 4


def test_nvlink_by_one_source_and_pcie_alone_by_another_contradict() -> None:
    pcie = ImportSource(text=MATRIX.replace("NV18", "NODE"), name="topo.txt")
    error = refused(ImportSource(text=MATRIX, name="topo2.txt"), pcie, devices=("H100",))
    assert [fault.detail for fault in error.faults] == [
        "NVLink joins its devices (topo2.txt, line 1), but PCIe alone does (topo.txt, line 1)"
    ]


def test_one_node_alone_needs_no_network() -> None:
    result = imported(log(*(queried(i) for i in range(4))))
    assert [each.name for each in result.topology.nodes] == ["node0"]
    assert (result.topology.switches, result.topology.links, result.free) == ((), (), None)
    assert result.topology.nodes[0].devices[0].memory_bytes == MEMORY


def test_nodes_without_devices_known_down_in_parts_or_elsewhere_are_left_out() -> None:
    result = imported(
        TREE + "SwitchName=far Nodes=x1\n",
        nodes("n1", "n2")
        + record("n3", gres="(null)", tres="billing=1")
        + record("n4", gres="gpu:a100_1g.5gb:7", tres="gres/gpu=7")
        + record("lost"),
    )
    assert [each.name for each in result.topology.nodes] == ["n1", "n2"]
    assert out(result) == {
        "lost": "it hangs on no switch of source 1 (slurm-conf)",
        "n3": "it has no device",
        "n4": "its devices are partitions (MIG, vGPU, or shared in time); plans are for whole devices",
        "x1": "no source says which devices it has",
    }
    assert result.topology.switches == ("leaf1",)


def test_where_no_node_has_a_device_an_option_says_what_trains() -> None:
    idle, runs = (record(name, state, "(null)", "billing=1") for name, state in (("n1", "IDLE"), ("n2", "MIXED")))
    assert refused(idle + runs).remedy == "--devices-per-node 2 --device-kind cpu, if the job trains on CPUs"
    options = {"devices": ("cpu",), "memory_bytes": GIB, "fabric": "bus", "fabric_bytes_per_s": GB}
    result = imported(idle + runs, devices_per_node=2, nic_bytes_per_s=GB, **options)
    assert [device.id for node in result.topology.nodes for device in node.devices] == ["n1/0", "n1/1", "n2/0", "n2/1"]
    assert result.free == "n1"
    assert "sources count no device; a node has 2, as --devices-per-node says" in result.assumptions
    mixed = imported(idle + nodes("n3"), devices_per_node=2)
    assert out(mixed) == {"n1": "it has no device"}


def test_only_some_nodes() -> None:
    busy = record("n3", "ALLOCATED", allocated_tres="gres/gpu=8,gres/gpu:h100=8")
    result = imported(TREE, nodes("n1", "n2", "n4") + busy, only="n[1-3]", only_free=True)
    assert [each.name for each in result.topology.nodes] == ["n1", "n2"]
    assert out(result) == {"n3": "something runs there", "n4": "it was not asked for"}
    error = refused(TREE, only="n[1-9]")
    assert error.faults[0].pointer == "/options/only"
    assert "n[5-9]" in error.detail
    assert "are unknown" in refused(TREE, only_free=True, devices_per_node=8).detail


def test_where_nothing_is_left_the_reasons_are_told() -> None:
    error = refused(nodes("n1", "n2", state="DOWN"))
    assert [(fault.pointer, fault.detail) for fault in error.faults] == [("n[1-2]", "it is down")]


# ---- networks --------------------------------------------------------------------------------------------------------


def test_cables_have_their_own_bandwidth_and_come_before_switches() -> None:
    result = imported("SwitchName=x Nodes=host[01-02]", FABRIC, nodes("host01", "host02", "host03"))
    assert links(result) == {("host01", "leaf01"): 200, ("host02", "leaf01"): 100}
    assert "no cable of source 2" in out(result)["host03"]
    assert any("the switches of source 1 (slurm-conf) are not used" in note for note in result.assumptions)


@pytest.mark.tier("quick")
def test_spines_that_join_the_same_leaves_are_one() -> None:
    switches = tuple(SwitchFacts(name, AT) for name in ("l1", "l2", "s1", "s2", "dead", "end"))
    ends = [("l1", "s1"), ("l1", "s2"), ("s1", "l2"), ("l2", "s2"), ("n1", "l1"), ("n1", "l1"), ("l2", "n2")]
    wires = tuple(LinkFacts(a, b, AT, 25 * GB) for a, b in [*ends, ("s1", "dead"), ("dead", "end")])
    result = merged(facts(switches=switches, wires=wires), nodes_of("n1", "n2"))
    assert links(result) == {("n1", "l1"): 400, ("n2", "l2"): 200, ("l1", "s1"): 400, ("l2", "s1"): 400}
    assert [link.lanes for link in result.topology.links if link.a == "n1"] == [2]
    assert {link.lanes for link in result.topology.links if link.a != "n1"} == {None}
    assert "switches of by hand that join the same places are counted as one: s[1-2] as s1" in result.assumptions


def test_a_rings_links_share_the_cards() -> None:
    result = imported("RingName=r Nodes=n[1-3]", nodes("n1", "n2", "n3"))
    assert sorted(links(result).values()) == [1600, 1600, 1600]
    assert result.topology.switches == ()


def test_blocks_are_joined_by_an_assumed_switch() -> None:
    result = imported(
        "BlockName=b1 Nodes=n[1-2]\nBlockName=b2 Nodes=n[3-4]\nBlockSizes=2\n", nodes("n1", "n2", "n3", "n4")
    )
    assert links(result)["b1", "core"] == 6400
    assert any("does not say what joins the blocks b[1-2]" in note for note in result.assumptions)


def test_blocks_are_nvlink_domains_where_the_user_says_so() -> None:
    blocks = "BlockName=b1 Nodes=g[1-2]\nBlockName=b2 Nodes=g[3-4]\nBlockSizes=2,4\n"
    result = imported(blocks, devices=("GB200",), devices_per_node=4, nvlink_blocks=True)
    assert links(result)["g1", "b1"] == 4 * 900 * 8
    (above,) = set(result.topology.switches) - {"b1", "b2"}
    assert links(result)["g1", above] == 1600
    assert "no source has blocks" in refused(TREE, devices=("H100",), devices_per_node=8, nvlink_blocks=True).detail


def test_names_that_a_switch_shares_with_a_node_or_a_domain_are_told_apart() -> None:
    result = imported("SwitchName=n1 Nodes=n[1-2]\n", nodes("n1", "n2"))
    assert set(links(result)) == {("n1", "n1-switch"), ("n2", "n1-switch")}
    labels = {"nvidia.com/gpu.clique": "leaf1"}
    result = imported(TREE, listed(*(node(f"n{i}", labels=labels) for i in (1, 2, 3))))
    assert result.topology.switches == ("leaf1-nvlink", "top", "leaf1", "leaf2")
    assert out(result) == {"n4": "no source says which devices it has"}


def test_nvlink_domains_are_switches_beside_the_network() -> None:
    def labels(i: int) -> dict[str, str]:
        return {
            "nvidia.com/gpu.product": "NVIDIA-GB200",
            "nvidia.com/gpu.memory": "189471",
            "nvidia.com/gpu.clique": f"u.{i // 2}",
        }

    result = imported(listed(*(node(f"g{i}", gpus=4, labels=labels(i)) for i in range(5)), pod("p", "g0", 4)))
    assert result.topology.switches == ("u.0", "u.1", "switch")
    assert links(result)["g0", "u.0"] == 4 * 900 * 8
    assert links(result)["g0", "switch"] == 1600
    assert ("g4", "u.2") not in links(result)
    assert result.free == "g[1-4]"
    alone = imported(listed(*(node(f"g{i}", gpus=4, labels=labels(i)) for i in range(2))))
    assert alone.topology.switches == ("u.0",)
    domain = facts(switches=(SwitchFacts("d", AT, ("n1", "n2"), is_nvlink=True),))
    with_cards = merged(domain, nodes_of("n1", "n2", devices=(DeviceFacts(0, "L4"),)), nic_bytes_per_s=GB)
    assert with_cards.topology.switches == ("switch",)
    assert any("NVLink bandwidth of the domain d" in note for note in with_cards.assumptions)


@pytest.mark.tier("quick")
def test_cycles_and_two_parents_are_refused() -> None:
    def switch(name: str, *below: str) -> SwitchFacts:
        return SwitchFacts(name, AT, switches=below)

    with pytest.raises(InvalidDocument, match="above themselves: a → b → a"):
        merged(facts(switches=(switch("a", "b"), switch("b", "a"))), nodes_of("n1"))
    with pytest.raises(InvalidDocument, match="it is below 'a' and below 'b'"):
        merged(facts(switches=(switch("a", "c"), switch("b", "c"), SwitchFacts("c", AT, ("n1",)))), nodes_of("n1"))
    with pytest.raises(InvalidDocument, match="'d', which is not a switch"):
        merged(facts(switches=(switch("a", "d"),)), nodes_of("n1"))
    domains = tuple(SwitchFacts(name, AT, ("n1",), is_nvlink=True) for name in "ab")
    with pytest.raises(InvalidDocument, match="it is in 'a' and in 'b'"):
        merged(facts(switches=domains), nodes_of("n1"))


def nodes_of(*names: str, **fields: Any) -> SourceFacts:
    devices = tuple(DeviceFacts(i, "H100 SXM5") for i in range(4))
    return facts(*(NodeFacts(name, AT, **{"devices": devices, **fields}) for name in names))


# ---- inside a node ---------------------------------------------------------------------------------------------------


def mesh(pairs: dict[tuple[int, int], int], path: Any = "nvlink") -> tuple[DeviceLinkFacts, ...]:
    return tuple(DeviceLinkFacts(a, b, path, count) for (a, b), count in pairs.items())


PAIRS = [(a, b) for a in range(4) for b in range(a + 1, 4)]


@pytest.mark.tier("quick")
@pytest.mark.parametrize(
    ("product", "device_links", "form", "gb_per_s"),
    [
        pytest.param("V100-SXM2-16GB", mesh(dict.fromkeys(PAIRS, 2)), "pairs", 50, id="each pair has two links"),
        pytest.param("V100-SXM2-16GB", mesh({**dict.fromkeys(PAIRS, 2), (0, 1): 1}), "pairs", 25, id="the narrowest"),
        pytest.param("V100-SXM2-16GB", mesh(dict.fromkeys(PAIRS[1:], 1)), "pairs", 25, id="one pair without"),
        pytest.param(
            "A100-SXM4-40GB", mesh(dict.fromkeys(PAIRS, 12)), "ports", 300, id="more than there are: a switch"
        ),
        pytest.param("A100-PCIE-40GB", mesh({(0, 1): 12, (2, 3): 12}), "bus", 32, id="bridges of two"),
        pytest.param("A100-PCIE-40GB", mesh(dict.fromkeys(PAIRS, 1), "pcie"), "bus", 32, id="PCIe"),
        pytest.param("A100-PCIE-40GB", (), "bus", 32, id="as usual"),
    ],
)
def test_what_joins_the_devices_of_a_node(product: str, device_links: Any, form: str, gb_per_s: int) -> None:
    devices = tuple(DeviceFacts(i, product) for i in range(4))
    result = merged(nodes_of("n1", devices=devices, device_links=device_links))
    fabric = result.topology.nodes[0].fabric
    assert fabric is not None
    assert (fabric.form, fabric.bandwidth_bytes_per_s) == (form, gb_per_s * GB)


@pytest.mark.tier("quick")
def test_cards_of_pcie_nodes_are_asked_for_and_added_up_where_told() -> None:
    devices = tuple(DeviceFacts(i, "L40S") for i in range(4))
    with pytest.raises(InvalidDocument, match="network cards"):
        merged(nodes_of("n1", "n2", devices=devices))
    cards = NicFacts("m0", 25 * GB, (0, 1)), NicFacts("m1", 25 * GB, (2, 3))
    result = merged(nodes_of("n1", "n2", devices=devices, nics=cards))
    assert (set(links(result).values()), lanes(result)) == ({400}, {2})
    unequal = cards[0], NicFacts("m1", 50 * GB, (2, 3))
    assert lanes(merged(nodes_of("n1", "n2", devices=devices, nics=unequal))) == {None}


@pytest.mark.tier("quick")
@pytest.mark.parametrize(
    ("speeds", "devices", "expected"),
    [([GB], 4, None), ([GB] * 4, 4, 4), ([GB] * 4, 1, None), ([GB] * 2, 8, 2), ([GB] * 8, 4, 4), ([GB] * 10, 8, 10)],
)
def test_equal_cards_are_lanes(speeds: list[int], devices: int, expected: int | None) -> None:
    assert lanes_of(speeds, devices) == expected


def test_nodes_have_the_cards_that_they_are_sold_with() -> None:
    result = imported(TREE, nodes("n1", "n2", "n3", "n4"))
    assert {link.lanes for link in result.topology.links if link.a.startswith("n")} == {8}
    assert {link.lanes for link in result.topology.links if link.a.startswith("leaf")} == {None}


def test_mixed_devices_of_one_node_keep_their_kinds_and_ask_what_joins_them() -> None:
    text = nodes("n1", gres="gpu:h100:2,gpu:l4:2", tres="gres/gpu=4")
    assert refused(text).remedy == "--fabric ports --fabric-bandwidth 450GB/s"
    result = imported(text, fabric="bus", fabric_bytes_per_s=GB)
    assert [device.kind for device in result.topology.nodes[0].devices] == ["H100", "H100", "L4", "L4"]


def test_the_matrix_of_nvidia_smi_and_nothing_else() -> None:
    result = imported(MATRIX, devices=("H100",))
    (only,) = result.topology.nodes
    assert only.fabric is not None
    assert (only.fabric.form, only.fabric.bandwidth_bytes_per_s, len(only.devices)) == ("ports", 450 * GB, 3)


def test_pcie_alone_between_devices_that_are_sold_with_nvlink_is_doubted() -> None:
    only_pcie = MATRIX.replace("NV18", "NODE")
    assert only_pcie != MATRIX
    assert "which `nvidia-smi topo -mp` does not show" in refused(only_pcie, devices=("H100",)).faults[0].detail


# ---- topologies of Penstock's own ------------------------------------------------------------------------------------

MEASURED = """\
schema_version: 1
name: living agents
nodes:
- {name: n1, devices: [{id: n1/0, kind: cpu, memory_bytes: 4 GB}]}
- {name: n2, devices: [{id: n2/0, kind: cpu, memory_bytes: 4 GB}]}
switches: [star]
links:
- {a: n1, b: star, bandwidth_bytes_per_s: 100 MB/s, latency_ns: 40 us}
- {a: n2, b: star, bandwidth_bytes_per_s: 50 MB/s, latency_ns: 40 us}
links_from: measured
"""


def test_what_agents_have_measured_wins_over_what_would_be_assumed() -> None:
    alone = imported(ImportSource(text=MEASURED, format="agents"))
    assert alone.topology.links_from == "measured"
    assert links(alone) == {("n1", "star"): 0.8, ("n2", "star"): 0.4}
    below = imported(TREE, MEASURED)
    assert links(below)["n1", "leaf1"] == 0.8
    assert {device.kind for each in below.topology.nodes for device in each.devices} == {"cpu"}
    assert out(below) == {"n[3-4]": "no source says which devices it has"}


def test_a_topology_of_ones_own_keeps_what_no_other_source_says() -> None:
    text = """\
schema_version: 1
name: own
nodes:
- name: n1.site
  devices:
  - {id: n1.site/left, kind: H100, memory_bytes: 80 GB, context_bytes: 3 GB, price: 2.5, gpus: 8,
     communicators: {edge_bytes: 11, group_bytes: 12}}
  - {id: n1.site/right, kind: odd, memory_bytes: 80 GB}
  fabric: {form: ports, bandwidth_bytes_per_s: 450 GB/s}
- {name: n2, devices: [{id: n2/0, kind: H100, memory_bytes: 80 GB}]}
switches: [star]
links:
- {a: n1.site/left, b: star, bandwidth_bytes_per_s: 50 GB/s}
- {a: n1.site/right, b: star, bandwidth_bytes_per_s: 50 GB/s}
- {a: n2, b: star, bandwidth_bytes_per_s: 50 GB/s}
kinds:
- {name: odd, scale_from: H100, speed: 0.5}
"""
    topology = imported(ImportSource(text=text, format="agents")).topology
    left, right = topology.nodes[0].devices
    assert (left.id, left.context_bytes, left.price, left.gpus) == ("n1.site/left", 3 * GB, 2.5, 8)
    assert (right.id, right.context_bytes, right.gpus) == ("n1.site/right", 0, 1)
    assert topology.nodes[1].devices[0].context_bytes == CONTEXT  # the document does not say it, the table does
    assert left.communicators is not None
    assert (left.communicators.edge_bytes, right.communicators) == (11, None)
    assert [(kind.name, kind.speed) for kind in topology.kinds] == [("odd", 0.5)]
    kinds = (DeviceKind(name="odd", scale_from="A100", speed=9), DeviceKind(name="new", scale_from="H100", speed=2))
    assert [(kind.name, kind.speed) for kind in imported(text, kinds=kinds).topology.kinds] == [
        ("odd", 0.5),
        ("new", 2),
    ]
    short = record("n1", gres="gpu:h100:1,gpu:odd:1", tres="gres/gpu=2")
    short += record("n2", gres="gpu:h100:1", tres="gres/gpu=1")
    joined = imported(short, text)
    assert set(links(joined)) == {("n1/left", "star"), ("n1/right", "star"), ("n2", "star")}
    assert joined.topology.nodes[0].devices[0].price == 2.5


def test_a_measured_matrix_is_cut_to_the_nodes_that_are_left() -> None:
    rows = "[[0, 1, 2], [3, 0, 4], [5, 6, 0]]"
    three = "\n".join(f"- {{name: n{i}, devices: [{{id: n{i}/0, kind: cpu, memory_bytes: 1 GiB}}]}}" for i in range(3))
    measured = f"matrix: {{devices: [n0/0, n1/0, n2/0], bandwidth_bytes_per_s: {rows}}}"
    text = f"schema_version: 1\nname: m\nnodes:\n{three}\n{measured}\n"
    matrix = imported(text, only="n0,n2").topology.matrix
    assert matrix is not None
    assert (matrix.devices, matrix.bandwidth_bytes_per_s) == (("n0/0", "n2/0"), ((0, 2), (5, 0)))
