"""`nvidia-smi -q -x`."""

from __future__ import annotations

import pytest
from node_samples import PRODUCT, log
from node_samples import queried as gpu

from penstock.importers.cluster.facts import SourceFacts
from penstock.importers.cluster.node.nvidia_query import read_nvidia_query
from penstock.schemas.errors import InvalidDocument


def fabric(state: str = "Completed", cluster: str = "00000000-0000-0000-0000-000000000000") -> str:
    inside = f"<state>{state}</state><cliqueId>3</cliqueId><clusterUuid>{cluster}</clusterUuid>"
    return f"<fabric>{inside}</fabric>"


def read(text: str) -> SourceFacts:
    facts = read_nvidia_query(text)
    assert list(facts.nodes) == [""]
    return facts


def test_devices_and_their_pcie_links_at_their_best() -> None:
    node = read(log(gpu(0x1B), gpu(0x43, memory="N/A", generation="N/A"))).nodes[""]
    first, second = node.devices or ()
    assert (first.index, first.product, first.memory_bytes) == (0, PRODUCT, 81559 * 2**20)
    assert first.bus_id == "0000:1b:00.0"
    assert first.pcie_bandwidth_bytes_per_s == 32 * 10**9 * 16 * 128 // (130 * 8)
    assert (second.index, second.memory_bytes, second.pcie_bandwidth_bytes_per_s) == (1, None, None)
    assert not first.is_partition


def test_partitions_stand_for_a_device_in_mig_mode() -> None:
    part = "<mig_device><index>0</index><fb_memory_usage><total>20096 MiB</total></fb_memory_usage></mig_device>"
    divided = gpu(1, mig="Enabled", more=f"<mig_devices>{part}{part}</mig_devices>")
    devices = read(log(divided, gpu(2), gpu(3, mig="Enabled"))).nodes[""].devices
    assert devices is not None
    assert [(one.index, one.is_partition) for one in devices] == [(0, True), (1, True), (2, False), (3, True)]
    assert devices[0].memory_bytes == 20096 * 2**20


@pytest.mark.parametrize(
    ("more", "has_nvswitch", "domains"),
    [
        ("", None, 0),
        (fabric("N/A"), None, 0),
        (fabric(), True, 0),
        (fabric(cluster="7f3c2a10-5b4e-4d6a-9c1e-2b8f0e6d4a91"), True, 1),
    ],
)
def test_nvlink_fabric(more: str, has_nvswitch: bool | None, domains: int) -> None:
    facts = read(log(gpu(1, more=more), gpu(2, more=more)))
    assert facts.nodes[""].has_nvswitch is has_nvswitch
    assert sum("7f3c2a10-5b4e-4d6a-9c1e-2b8f0e6d4a91.3" in note for note in facts.assumptions) == domains


def test_a_device_outside_the_fabric_of_the_others_is_refused() -> None:
    with pytest.raises(InvalidDocument) as caught:
        read(log(gpu(1, more=fabric()), gpu(2, more=fabric("In Progress")), gpu(3, more=fabric())))
    (fault,) = caught.value.faults
    assert fault.detail.startswith("device 1 is not in the NVLink fabric (state In Progress), where 2 others are")


ENTITIES = '<!ENTITY a "xxxxxxxx">\n<!ENTITY b "&a;&a;&a;&a;">'
BOMB = f"<!DOCTYPE nvidia_smi_log [\n{ENTITIES}\n]>\n<nvidia_smi_log>&b;</nvidia_smi_log>"


@pytest.mark.parametrize(
    ("text", "pointers", "detail"),
    [
        ("", ["the whole text"], "it is empty"),
        ("GPU 0: NVIDIA H100", ["line 1, column 1"], "no XML: syntax error"),
        ("\x00\x01", ["line 1, column 1"], "no XML"),
        (log(gpu(1))[:-30], ["line 16, column 47"], "no XML: unclosed token"),
        (BOMB, ["line 2, column 12"], "it declares entities"),
        ('<!DOCTYPE x [<!ENTITY % p SYSTEM "http://x/y">%p;]><x/>', ["line 1, column 46"], "it declares entities"),
        ("<nvidia_smi_log>" * 100, ["line 1, column 1025"], "it is nested deeper than 64 levels"),
        ("<system/>", ["line 1, column 1"], "is <system>: that is an NCCL topology; give it as nccl-xml"),
        ("\n<html/>", ["line 2, column 1"], "is <html>: it has to be <nvidia_smi_log>"),
        (log(), ["line 3, column 1"], "there is no <gpu> in it"),
        (log(gpu(1), attached=8), ["line 4, column 2"], "attached_gpus is 8, and there are 1 <gpu>"),
        (log(gpu(1), gpu(1)), ["line 18, column 2"], "0000:01:00.0 stands already in line 5"),
        (
            log(gpu(1, memory="lots", generation="9")),
            ["line 15, column 20", "line 11, column 15"],
            "the memory has to be such as 81559 MiB; it is 'lots'",
        ),
    ],
)
def test_bad_texts(text: str, pointers: list[str], detail: str) -> None:
    with pytest.raises(InvalidDocument) as caught:
        read_nvidia_query(text)
    assert sorted(fault.pointer for fault in caught.value.faults) == sorted(pointers)
    assert any(detail in fault.detail for fault in caught.value.faults)


def test_a_dtd_is_not_opened(tmp_path_factory: pytest.TempPathFactory) -> None:
    """An entity that a file named by the DOCTYPE declares stays unknown."""
    dtd = tmp_path_factory.mktemp("dtd") / "nvsmi_device_v12.dtd"
    dtd.write_text(f'<!ENTITY product "{PRODUCT}">')
    text = log(gpu(1).replace(PRODUCT, "&product;")).replace("nvsmi_device_v12.dtd", dtd.as_uri())
    with pytest.raises(InvalidDocument, match="the <gpu> has no product_name"):
        read_nvidia_query(text)
