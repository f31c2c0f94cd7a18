"""Models and clusters by name."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import paper_models
import pytest
import yaml
from repository import ROOT

from penstock.examples import catalogue
from penstock.examples.models import MODELS
from penstock.facts.device_table import PROFILED
from penstock.schemas.errors import InvalidDocument, NotFound
from penstock.schemas.topology import ClusterTopology, DeviceKind

TOPOLOGIES = Path(catalogue.__file__).parent / "topologies"
GBIT = 10**9 // 8

# Parameters in units of 10^6, and where the number is published.
PUBLISHED = {
    "gpt2-small": 124.4 + 50257 * 768 / 1e6,  # GPT-2 as released; here the head is not tied to the embedding
    "gpt2-xl": 1557.6 + 50257 * 1600 / 1e6,  # the same
    "gpt-20b": 20_554.6,  # GPT-NeoX-20B, table 1
    "llama-3-8b": 8_030.3,  # Llama 3 8B as released
    "llama-3-70b": 70_553.7,  # Llama 3 70B as released
    "bert-base": 109.5,  # as released, with the pooler
    "bert-large": 335.1,  # as released, with the pooler
    "bert-48": 640.0,  # DAPPLE, table II
    "xlnet-36": 500.0 * 2**20 / 1e6,  # DAPPLE, table II: a layer's 13 × 2^20 are 13M in its profile
    "gnmt-16": 291.0,  # DAPPLE, table II
    "transformer-big": 213.0 + 37_000 * 1024 / 1e6,  # Vaswani et al., table 3; here the logits are not tied
    "awd-lstm": 24.2 + 4.0,  # Merity et al., section 5; here the logits are not tied
    "vgg-19": 143.7,  # Simonyan and Zisserman, table 2
    "resnet-50": 25.56,  # torchvision
    "resnet-101": 44.55,  # torchvision
    "resnet-152": 60.19,  # torchvision
    "resnext-50": 25.03,  # torchvision
    "inception-v3": 23.83,  # torchvision, without the auxiliary classifier
    "densenet-121": 7.98,  # torchvision
    "amoebanet-36": 933.0,  # DAPPLE, table II
}


@pytest.mark.parametrize("name", [*catalogue.model_names(), *paper_models.MODELS])
def test_profiles_load_and_know_all_devices(name: str) -> None:
    profile = paper_models.profile(name)
    assert profile.name == name
    assert profile.device_kinds == tuple(PROFILED)
    assert profile.source.method == "analytic"
    for measurement in profile.measurements:
        assert sum(layer.forward_ns for layer in measurement.layers) > 0
        assert sum(layer.backward_ns for layer in measurement.layers) > 0
        assert all(layer.stash_bytes >= 0 for layer in measurement.layers)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_are_within_two_percent_of_the_published(name: str) -> None:
    profile = paper_models.profile(name)
    width = 4 if profile.parameter_dtype == "fp32" else 2
    millions = sum(layer.parameter_bytes for layer in profile.layers) / width / 1e6
    assert millions == pytest.approx(PUBLISHED[name], rel=0.02)


def test_every_model_of_the_table_is_shipped_and_small() -> None:
    assert set(catalogue.model_names()) == set(MODELS)
    total = sum(path.stat().st_size for path in (TOPOLOGIES.parent / "profiles").glob("*.json"))
    assert total < 5_000_000


def test_faster_devices_take_less_time() -> None:
    profile = catalogue.profile("llama-3-8b")
    totals = {
        m.device_kind: sum(layer.forward_ns + layer.backward_ns for layer in m.layers)
        for m in profile.measurements
        if m.micro_batch_size == 1
    }
    assert totals["H200"] <= totals["H100"] < totals["A100"] < totals["V100"] < totals["GTX1080Ti"]


@pytest.mark.cases(5)
@pytest.mark.parametrize("path", sorted(TOPOLOGIES.glob("*.yaml")), ids=lambda path: path.stem)
def test_topologies_parse_under_their_own_name(path: Path) -> None:
    cluster = ClusterTopology.read(path)
    assert cluster.name == path.stem
    assert catalogue.cluster(path.stem) == cluster
    assert path.read_text(encoding="utf-8").startswith("#")


@pytest.mark.parametrize(
    ("name", "nodes", "devices", "kind"),
    [
        ("dapple-config-a", 2, 16, "V100"),
        ("dapple-config-b", 16, 16, "V100"),
        ("dapple-config-c", 16, 16, "V100"),
        ("spp-testbed-1", 4, 8, "GTX1080Ti"),
        ("spp-testbed-2", 1, 4, "V100"),
        ("spp-mixed-8x4", 8, 32, "V100"),
        ("wpipe-env-1", 1, 8, "V100"),
        ("wpipe-env-2", 8, 64, "V100"),
        ("madpipe-12", 1, 8, "V100"),
        ("madpipe-24", 1, 8, "V100"),
        ("avgpipe-3x2", 3, 6, "V100"),
        ("cpu-2-hosts", 2, 4, "cpu"),
        ("h100-8x8", 8, 64, "H100"),
        ("8x8xH100", 8, 64, "H100"),
        ("2x4xV100", 2, 8, "V100"),
        ("16xA100", 2, 16, "A100"),
        ("4xh200", 1, 4, "H200"),
        ("1x1xGTX1080Ti", 1, 1, "GTX1080Ti"),
        ("8x8xB200", 8, 64, "B200"),
        ("4x72xGB200", 4, 288, "GB200"),
        ("2x8xB300", 2, 16, "B300"),
        ("1x72xgb300", 1, 72, "GB300"),
        ("4x8xH20", 4, 32, "H20"),
    ],
)
def test_clusters_have_the_devices_their_names_say(name: str, nodes: int, devices: int, kind: str) -> None:
    cluster = catalogue.cluster(name).expanded()
    all_devices = [device for node in cluster.nodes for device in node.devices]
    assert (len(cluster.nodes), len(all_devices)) == (nodes, devices)
    assert {device.kind for device in all_devices} == {kind}


def test_the_mixed_cluster_is_the_one_that_its_page_shows() -> None:
    """Two kinds on two switches; a shell command of ``docs/your-cluster.md`` plans with it."""
    text = (ROOT / "examples/topologies/a100-v100-mixed.yaml").read_text()
    assert f'```yaml title="mixed.yaml"\n{text}```' in (ROOT / "docs/your-cluster.md").read_text()
    cluster = catalogue.cluster("a100-v100-mixed")
    kinds = [device.kind for node in cluster.nodes for device in node.devices]
    assert (kinds.count("A100"), kinds.count("V100"), len(kinds)) == (8, 8, 16)
    assert ([link.lanes for link in cluster.links], cluster.switches) == (
        [4, 4, None, None, None],
        ("new-rack", "old-rack"),
    )


def test_a_node_has_one_nic_per_modern_device() -> None:
    assert catalogue.cluster("8x8xH100").expanded().links[0].bandwidth_bytes_per_s == 8 * 400 * GBIT
    assert [catalogue.cluster(name).expanded().links[0].lanes for name in ("8x8xH100", "h100-8x8", "2x4xA100")] == [
        8,
        8,
        4,
    ]
    assert [catalogue.cluster(name).expanded().links[0].lanes for name in ("8x8xV100", "2x1xA100")] == [None, None]
    assert catalogue.cluster("2x2xH100").expanded().links[0].bandwidth_bytes_per_s == 2 * 400 * GBIT
    assert catalogue.cluster("2x4xV100").expanded().links[0].bandwidth_bytes_per_s == 25 * GBIT


def test_shipped_profiles_plan_for_kinds_that_they_lack_by_the_ratio_of_bf16_products() -> None:
    (scaled,) = catalogue.cluster("8x8xB200").kinds
    assert (scaled.name, scaled.scale_from) == ("B200", "H100")
    assert scaled.speed == pytest.approx(2250 * 0.51 / (989 * 0.45), rel=1e-3)
    assert catalogue.cluster("8x8xH100").kinds == ()
    notes = " ".join(catalogue.cluster("8x8xB200").assumptions)
    assert "H100 at 2.578 times the speed" in notes
    assert "40%" in notes


def test_a_kind_has_its_costs_from_its_own_then_the_kind_that_it_is_like_then_from_further_away() -> None:
    topology = catalogue.cluster("8x8xGB200")
    assert topology.costed_from("GB200", ("H100", "B200", "GB200")) == ("GB200", 1.0)
    assert topology.costed_from("GB200", ("H100", "B200")) == ("B200", 1.111)
    assert topology.costed_from("GB200", ("H100", "A100")) == ("H100", pytest.approx(1.111 * 2.578))
    assert topology.costed_from("GB200", ("A100",)) is None
    around = tuple(DeviceKind(name=a, scale_from=b, speed=2) for a, b in (("a", "b"), ("b", "a")))
    assert topology.model_copy(update={"kinds": around}).costed_from("a", ()) is None


@pytest.mark.parametrize(
    ("operation", "members", "size_bytes", "measured_us"),
    [
        ("all_gather", 8, 2**30, 1590.3),
        ("all_gather", 8, 2**26, 162.4),
        ("reduce_scatter", 8, 2**30, 1544.4),
        ("all_reduce", 8, 2**30, 3115.0),
        ("all_to_all", 8, 2**30, 1562.6),
    ],
)
def test_collectives_of_b200_against_what_openxla_measured(
    operation: str, members: int, size_bytes: int, measured_us: float
) -> None:
    """openxla/xla, ``collective_interpolator_data.h`` (Apache-2.0), compute capability 10.0: not what they are from."""
    rows = [
        row
        for row in catalogue.cluster("8x8xB200").collectives or ()
        if (row.operation, row.devices_per_node, row.nodes) == (operation, members, 1)
    ]
    sizes, times = [row.size_bytes for row in rows], [row.time_ns for row in rows]
    interpolated_ns = times[0] + (times[1] - times[0]) * (size_bytes - sizes[0]) / (sizes[1] - sizes[0])
    assert interpolated_ns / 1000 == pytest.approx(measured_us, rel=0.3)


def test_collectives_of_other_kinds_are_left_to_the_formulas() -> None:
    assert catalogue.cluster("8x8xH100").collectives is None
    assert catalogue.cluster("8x1xB200").collectives is None
    spans = {row.devices_per_node for row in catalogue.cluster("4x72xGB200").collectives or ()}
    assert spans == {2, 4, 8, 16, 32, 64, 72}
    assert any("among more than 8" in each for each in catalogue.cluster("4x72xGB200").assumptions)
    assert not any("among more than 8" in each for each in catalogue.cluster("8x8xB200").assumptions)


def test_the_mixed_cluster_is_the_stated_draw() -> None:
    draw = random.Random(0)
    inside = [draw.randint(96, 128) if i < 3 else draw.randint(160, 200) for i in range(8)]
    between = {(i, j): draw.randint(32, 40) for i in range(8) for j in range(i + 1, 8)}
    matrix = yaml.safe_load((TOPOLOGIES / "spp-mixed-8x4.yaml").read_text(encoding="utf-8"))["matrix"]
    for a, row in enumerate(matrix["bandwidth_bytes_per_s"]):
        for b, bandwidth in enumerate(row):
            i, j = sorted((a // 4, b // 4))
            expected = 0 if a == b else inside[i] if i == j else between[i, j]
            assert bandwidth == expected * GBIT


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("8x8xH900", "H200"),
        ("dapple-configa", "dapple-config-a"),
        ("nonsense", "h100-8x8"),
        ("2x4V100", "mean 2x4xV100?"),
    ],
)
def test_unknown_clusters_name_what_is_near(name: str, near: str) -> None:
    with pytest.raises(NotFound) as caught:
        catalogue.cluster(name)
    assert name.split("x")[-1] in caught.value.detail
    assert near in (caught.value.remedy or "")


def test_unknown_models_name_what_is_near() -> None:
    with pytest.raises(NotFound) as caught:
        catalogue.profile("llama-70b")
    assert "llama-3-70b" in (caught.value.remedy or "")


@pytest.mark.parametrize("name", ["0x8xH100", "8x0xH100", "12xA100", "100000x8xV100"])
def test_impossible_numbers_are_refused(name: str) -> None:
    with pytest.raises(InvalidDocument):
        catalogue.cluster(name)


@pytest.mark.tier("ci")
def test_the_catalogue_needs_no_torch() -> None:
    code = "import sys; from penstock.examples import catalogue as c; c.profile('resnet-50'); c.cluster('8x8xH100')"
    code += "; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
