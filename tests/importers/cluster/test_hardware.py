"""The table of devices: spellings of products, and figures that all say where they are from."""

from __future__ import annotations

import pytest

from penstock.executor.devices import device_kind
from penstock.facts.device_table import DEVICES
from penstock.importers.cluster import hardware

GIB, GB = 2**30, 10**9


@pytest.mark.parametrize(
    ("product", "kind", "form", "memory_bytes"),
    [
        ("H100-SXM5-80GB", "H100", "SXM5", int(79.11 * GIB)),
        ("NVIDIA H100 80GB HBM3", "H100", "SXM5", int(79.11 * GIB)),  # nvidia-smi
        ("NVIDIA-H100-80GB-HBM3", "H100", "SXM5", int(79.11 * GIB)),  # GPU feature discovery
        ("nvidia_h100_80gb_hbm3", "H100", "SXM5", int(79.11 * GIB)),  # Slurm, AutoDetect=nvml
        ("h100", "H100", "SXM5", int(79.11 * GIB)),
        ("NVIDIA-H100-80GB-HBM3-SHARED", "H100", "SXM5", int(79.11 * GIB)),
        ("NVIDIA H100 PCIe", "H100", "PCIe", 80 * GB),
        ("NVIDIA H100 NVL", "H100", "NVL", 94 * GB),
        ("A100-SXM4-40GB", "A100", "SXM4", int(39.5 * GIB)),
        ("NVIDIA A100-SXM4-80GB", "A100", "SXM4", int(79.15 * GIB)),
        ("A100-PCIE-40GB", "A100", "PCIe", 40 * GIB),
        ("a100_80g", "A100", "SXM4", int(79.15 * GIB)),
        ("a100", "A100", "SXM4", None),  # there are two sizes
        ("Tesla V100-SXM2-32GB", "V100", "SXM2", int(31.73 * GIB)),
        ("v100", "V100", "SXM2", None),
        ("NVIDIA L40S", "L40S", "PCIe", 48 * GB),
        ("NVIDIA L4", "L4", "PCIe", 24 * GB),
        ("NVIDIA H200", "H200", "SXM5", int(139.8 * GIB)),
        ("NVIDIA B200", "B200", "SXM6", int(178.35 * GIB)),
        ("NVIDIA-GB200", "GB200", "NVL72", int(184.31 * GIB)),
        ("NVIDIA B300 SXM6 AC", "B300", "SXM6", int(267.69 * GIB)),
        ("NVIDIA GB300", "GB300", "NVL72", int(276.5 * GIB)),
        ("nvidia-h100-mega-80gb", "H100", "SXM5", int(79.11 * GIB)),  # GKE
        ("NVIDIA A40", "A40", "PCIe", 48 * GB),
        ("NVIDIA GH200 480GB", "GH200", "96 GB", 96 * GB),  # the processor's memory
        ("NVIDIA GH200 144G HBM3e", "GH200", "144 GB", 144 * GB),
        ("AMD Instinct MI300X", "MI300X", "OAM", 192 * GB),
        ("NVIDIA A10", "A10", "PCIe", 24 * GB),
        ("Tesla-T4", "T4", "PCIe", 16 * GB),
        ("NVIDIA GeForce GTX 1080 Ti", "GTX1080Ti", "PCIe", 11 * GIB),
    ],
)
def test_spellings_of_products(product: str, kind: str, form: str, memory_bytes: int | None) -> None:
    match = hardware.recognise(product)
    assert match is not None
    assert (match.hardware.kind, match.hardware.form) == (kind, form)
    assert (match.memory.value if match.memory else None) == memory_bytes


@pytest.mark.parametrize(
    "product",
    [
        "",
        "gpu",
        "big",
        "rtx4090",
        "A100X",
        "H100-WS",
        "H100-40GB",
        "H100 PCIe NVL",
        "A100-40GB-80GB",
        "A100 H100",
        "80GB",
    ],
)
def test_what_the_table_does_not_know_is_not_guessed(product: str) -> None:
    assert hardware.recognise(product) is None


@pytest.mark.tier("ci")
@pytest.mark.parametrize(
    "product",
    [
        *("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "Tesla V100-SXM2-32GB", "NVIDIA L40S", "NVIDIA B200"),
        *("NVIDIA B300 SXM6 AC", "NVIDIA GB300", "NVIDIA A40", "NVIDIA A30", "NVIDIA L40"),
        *("NVIDIA GH200 480GB", "NVIDIA GB200", "NVIDIA GeForce GTX 1080 Ti", "Tesla T4", "AMD Instinct MI300X"),
    ],
)
def test_agents_and_profiles_call_devices_so_as_well(product: str) -> None:
    match = hardware.recognise(product)
    assert match is not None
    assert device_kind(product) == match.hardware.kind


@pytest.mark.parametrize(
    ("product", "is_part"),
    [
        ("NVIDIA-A100-SXM4-40GB-MIG-1g.5gb", True),
        ("a100_3g.20gb", True),
        ("nvidia_a100_1g.5gb+me", True),
        ("h100-40c", True),
        ("NVIDIA A40-48Q", True),
        ("GRID A100D-3-40C", True),
        ("NVIDIA-A100-SXM4-40GB", False),
        ("NVIDIA H100 80GB HBM3", False),
        ("GH200 144G", False),
    ],
)
def test_partitions(product: str, is_part: bool) -> None:
    assert hardware.is_partition(product) == is_part


def test_every_figure_says_where_it_is_from_and_is_possible() -> None:
    for kind, forms in hardware.table().items():
        assert len({form.form for form in forms}) == len(forms)
        for form in forms:
            assert form.kind == kind
            figures = [*form.memory, form.context, form.fabric_bytes_per_s, form.fabric_latency_ns, form.nic_latency_ns]
            figures += [form.nvlink.bytes_per_s] if form.nvlink else []
            figures += [form.nic_bytes_per_s] if form.nic_bytes_per_s else []
            assert all(figure.value > 0 and figure.source for figure in figures)
            assert all(figure.source != hardware.ASSUMED for figure in (*form.memory, form.fabric_bytes_per_s))
            if form.fabric == "ports" and form.nvlink:
                assert form.fabric_bytes_per_s.value == form.nvlink.total_bytes_per_s


def test_what_collectives_reach_is_possible() -> None:
    collectives = [form.collectives for forms in hardware.table().values() for form in forms if form.collectives]
    assert len(collectives) == 4
    for each in collectives:
        assert each.source
        assert each.most_members >= 2
        assert all(0 < reach.share <= 1 and reach.each_ns > 0 for reach in each.reach.values())


def test_the_device_kinds_that_profiles_can_be_computed_for_have_nodes() -> None:
    for kind in DEVICES:
        assert hardware.usual(kind).node_nic_bytes_per_s(8)
