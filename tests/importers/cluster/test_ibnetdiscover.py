"""The reader of ``ibnetdiscover``: hosts, switches, each cable once with its rate; texts that contradict themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from node_samples import FABRIC, LEAF, SPINE

from penstock.importers.cluster.ibnetdiscover import read_ibnetdiscover
from penstock.schemas.errors import InvalidDocument


def test_each_cable_is_one_link_with_the_data_rate_of_its_lanes() -> None:
    """By hand: HDR has 50 Gbit/s of data on each lane; FDR has 14.0625 Gbit/s of signals, 64 of 66 bits are data."""
    facts = read_ibnetdiscover(FABRIC)
    fdr = int(4 * 14.0625e9 * 64 / 66 / 8)
    assert [(link.a, link.b, link.bandwidth_bytes_per_s) for link in facts.links] == [
        ("leaf01", "host01", 25_000_000_000),
        ("leaf01", "host02", 12_500_000_000),
        ("leaf01", "spine01", fdr),
        ("leaf01", "spine01", fdr),
    ]
    assert [(switch.name, switch.tier) for switch in facts.switches] == [("leaf01", 0), ("spine01", 1)]


def test_hosts_have_the_adapters_that_their_descriptions_name() -> None:
    facts = read_ibnetdiscover(FABRIC)
    nics = {
        name: [(nic.name, nic.bandwidth_bytes_per_s) for nic in node.nics or ()] for name, node in facts.nodes.items()
    }
    assert nics == {
        "host01": [("mlx5_0", 37_500_000_000), ("mlx5_1", 12_500_000_000)],
        "host02": [("HCA-1", 12_500_000_000)],
    }
    assert any("Aggregation Node" in note for note in facts.assumptions)


def test_switches_that_share_a_description_go_by_their_identifiers() -> None:
    names = [switch.name for switch in read_ibnetdiscover(FABRIC.replace(SPINE, LEAF)).switches]
    assert names == ["S-0000000000000001", "S-0000000000000002"]
    plain = [switch.name for switch in read_ibnetdiscover(FABRIC.replace(SPINE, "Top of [rack] 7")).switches]
    assert plain == ["leaf01", "Top_of_rack_7"]


def test_a_cable_without_a_rate_is_said() -> None:
    facts = read_ibnetdiscover(FABRIC.replace("4xFDR", "4x???").replace("2xHDR s=4 w=2 v=4", ""))
    assert [link.bandwidth_bytes_per_s for link in facts.links] == [25_000_000_000, 12_500_000_000, None, None]
    assert any("2 cables without a rate" in note for note in facts.assumptions)


@pytest.mark.parametrize(
    ("text", "at", "message"),
    [
        pytest.param("", "the whole text", "empty", id="empty"),
        pytest.param("# Topology file\n", "the whole text", "no Switch and no Ca", id="comments-only"),
        pytest.param("Segmentation fault\n", "line 1", "not a line of ibnetdiscover", id="another-text"),
        pytest.param('[1] "S-1"[1] # 4xHDR', "line 1", "before the first Switch", id="port-first"),
        pytest.param(FABRIC[: FABRIC.index('1"[1]\t\t# lid 10')], "line 21", "not a line of", id="cut-off-within"),
        pytest.param(FABRIC[: FABRIC.index('Ca\t1 "H-00000000000000aa"')], "line 14", "is it cut off?", id="cut-off"),
        pytest.param(FABRIC.replace("[40]", "[39]", 1), "line 13", "port 39 of S-0000000000000001", id="port-twice"),
        pytest.param(FABRIC + FABRIC.split("\n\n")[2], "line 32", "there twice, first on line 16", id="block-twice"),
        pytest.param(FABRIC.replace("mlx5_1", "mlx5_0"), "line 24", "do two hosts share a name?", id="names-twice"),
        pytest.param(
            FABRIC.replace("host01 mlx5_0", "a").replace("host01 mlx5_1", "b").replace("host02 HCA-1", "c"),
            "the whole text",
            "no adapter names its host",
            id="no-hosts",
        ),
    ],
)
def test_one_fault_with_its_place(text: str, at: str, message: str) -> None:
    with pytest.raises(InvalidDocument) as caught:
        read_ibnetdiscover(text)
    (fault,) = caught.value.faults
    assert fault.pointer == at
    assert message in fault.detail


def test_a_cable_whose_ends_contradict_each_other() -> None:
    with pytest.raises(InvalidDocument) as caught:
        read_ibnetdiscover(FABRIC.replace('"S-0000000000000001"[2]', '"S-0000000000000001"[7]'))
    (fault,) = caught.value.faults
    assert (fault.pointer, fault.code) == ("line 11", "contradiction")


def test_what_the_command_warns_of_on_standard_error_is_passed_over() -> None:
    warned = (
        "src/query_smp.c:203; umad (DR path slid 0; dlid 0; 0,2 Attr 0x15:1) bad status 110; Connection timed out\n"
    )
    opened = "ibwarn: [4711] mad_rpc_open_port: client_register for mgmt 1 failed\n"
    assert read_ibnetdiscover(warned + opened + FABRIC).links == tuple(
        replace(link, place=replace(link.place, line=link.place.line + 2)) for link in read_ibnetdiscover(FABRIC).links
    )
