"""Nodes of Kubernetes: devices, states, places by labels."""

from __future__ import annotations

import json

import pytest
import yaml
from kubernetes_samples import Object, hypernode, kueue_topology, listed, member, node, pod

from penstock.importers.cluster.facts import SourceFacts
from penstock.importers.cluster.kubernetes.kubernetes_nodes import read_k8s_nodes
from penstock.schemas.errors import InvalidDocument

TIER = "fabric.topograph.run/tier-"


def tree(facts: SourceFacts, *, nvlink: bool = False) -> dict[str, tuple[str, ...]]:
    """Return the switches and nodes below each switch."""
    return {one.name: one.switches + one.nodes for one in facts.switches if one.is_nvlink == nvlink}


def refused(text: str) -> list[tuple[str, str]]:
    with pytest.raises(InvalidDocument) as caught:
        read_k8s_nodes(text)
    return [(fault.pointer.split(", line ")[0], fault.detail) for fault in caught.value.faults]


def test_devices_come_from_capacity_and_feature_discovery() -> None:
    facts = read_k8s_nodes(listed(node("gpu-0"), node("cpu-0", gpus=0, status={"capacity": {"cpu": "8"}})), "cluster")
    devices = facts.nodes["gpu-0"].devices
    assert devices is not None
    assert [device.index for device in devices] == list(range(8))
    assert {(device.product, device.memory_bytes) for device in devices} == {("NVIDIA-H100-80GB-HBM3", 81559 * 2**20)}
    assert not any(device.is_partition for device in devices)
    assert facts.nodes["cpu-0"].devices == ()
    assert str(facts.nodes["cpu-0"].place) == "cluster, items/1"
    assert facts.nodes["gpu-0"].usable
    assert facts.nodes["gpu-0"].busy_devices is None
    assert any("kubectl get nodes,pods -A" in note for note in facts.assumptions)


@pytest.mark.parametrize("form", ["one node", "NodeList", "yaml list", "yaml documents"])
def test_forms_of_the_text(form: str) -> None:
    one = node("gpu-0")
    untyped = {key: value for key, value in one.items() if key not in ("kind", "apiVersion")}
    text = {
        "one node": json.dumps(one),
        "NodeList": json.dumps({"kind": "NodeList", "apiVersion": "v1", "items": [untyped]}),
        "yaml list": yaml.safe_dump({"kind": "List", "apiVersion": "v1", "items": [one]}),
        "yaml documents": "# nodes\n---\n" + yaml.safe_dump(one) + "---\n" + yaml.safe_dump(pod("p", "gpu-0", 0)),
    }[form]
    facts = read_k8s_nodes("\ufeff" + text)
    assert [len(one.devices or ()) for one in facts.nodes.values()] == [8]


@pytest.mark.parametrize(
    ("labels", "capacity", "count"),
    [
        pytest.param(
            {"nvidia.com/gpu.product": "A100-SXM4-40GB-MIG-1g.5gb"}, {"nvidia.com/gpu": "56"}, 56, id="single"
        ),
        pytest.param({"nvidia.com/gpu.product": "A10-SHARED", "nvidia.com/gpu.count": "2"}, {"nvidia.com/gpu": "8"}, 8),
        pytest.param({"nvidia.com/gpu.replicas": "4", "nvidia.com/gpu.count": "2"}, {"nvidia.com/gpu.shared": "8"}, 8),
        pytest.param({}, {"nvidia.com/mig-1g.5gb": "4", "nvidia.com/mig-3g.20gb": 2}, 6, id="mixed"),
    ],
)
def test_partitions_are_said(labels: dict[str, str], capacity: Object, count: int) -> None:
    status = {"capacity": capacity, "allocatable": capacity}
    (facts,) = read_k8s_nodes(listed(node("n", gpus=0, labels=labels, status=status))).nodes.values()
    assert facts.devices is not None
    assert (len(facts.devices), {device.is_partition for device in facts.devices}) == (count, {True})


def test_devices_of_amd() -> None:
    labels = {"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM", "amd.com/gpu.vram": "192G"}
    status = {"capacity": {"amd.com/gpu": "8"}, "allocatable": {"amd.com/gpu": "8"}}
    (facts,) = read_k8s_nodes(listed(node("n", gpus=0, labels=labels, status=status))).nodes.values()
    assert facts.devices is not None
    assert {(one.product, one.memory_bytes) for one in facts.devices} == {("AMD_Instinct_MI300X_OAM", 192 * 2**30)}


TAINT = "node.kubernetes.io/unreachable"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"status": {"conditions": [{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}]}}, "ready"),
        ({"spec": {"unschedulable": True}}, "cordoned"),
        ({"spec": {"taints": [{"key": TAINT, "effect": "NoExecute"}]}}, TAINT),
        ({"status": {"allocatable": {"nvidia.com/gpu": "6"}}}, "2 of its 8 nvidia.com/gpu are not allocatable"),
        ({"status": {"capacity": {"cpu": "1"}, "allocatable": {}}}, "offers none of the 8 devices"),
        ({"labels": {"nvidia.com/gpu.count": "4"}}, "4 more are of some other kind"),
        ({"status": {"capacity": {"nvidia.com/gpu": "8", "amd.com/gpu": "1"}}}, "two vendors"),
    ],
)
def test_nodes_that_cannot_be_used_say_why(changed: Object, why: str) -> None:
    nodes = read_k8s_nodes(listed(node("good"), node("bad", **changed))).nodes
    assert nodes["good"].usable
    assert not nodes["bad"].usable
    assert why in nodes["bad"].why_not_usable


def test_taints_that_jobs_may_tolerate_are_told() -> None:
    taints = [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}, {"key": "team", "value": "a", "effect": "NoSchedule"}]
    facts = read_k8s_nodes(listed(node("a", spec={"taints": taints})))
    assert facts.nodes["a"].usable
    assert [note for note in facts.assumptions if "tolerate" in note] == [
        "jobs are taken to tolerate team:NoSchedule, a taint of a"
    ]


def test_pods_say_what_is_taken() -> None:
    pods = [pod("p", "a", 4), pod("q", "a", 1), pod("done", "b", 8, "Succeeded"), pod("waits", None, 8, "Pending")]
    facts = read_k8s_nodes(listed(node("a"), node("b"), *pods))
    assert {name: one.busy_devices for name, one in facts.nodes.items()} == {"a": 5, "b": 0}


def test_one_product_with_two_memories_is_told() -> None:
    small = node("small", labels={"nvidia.com/gpu.memory": "40960"})
    notes = read_k8s_nodes(listed(node("a"), node("b"), small)).assumptions
    assert "NVIDIA-H100-80GB-HBM3 has 40.0 GiB on small, 79.6 GiB on a, b: kinds are mixed" in "\n".join(notes)


def test_labels_of_topograph_make_a_tree() -> None:
    zone = {"topology.kubernetes.io/zone": "z", "topology.kubernetes.io/region": "r"}
    places = [("a", "l0", "s0"), ("b", "l0", "s0"), ("c", "l1", "s0"), ("d", "l2", "s1")]
    nodes = [
        node(name, labels={f"{TIER}0": leaf, f"{TIER}1": spine, "nvidia.com/gpu.clique": "u.1"} | zone)
        for name, leaf, spine in places
    ]
    facts = read_k8s_nodes(listed(*nodes))
    assert tree(facts) == {
        "z": ("s0", "s1"),
        "s0": ("l0", "l1"),
        "s1": ("l2",),
        "l0": ("a", "b"),
        "l1": ("c",),
        "l2": ("d",),
    }
    assert [(one.tier, one.layer) for one in facts.switches if one.name in ("l0", "s0")] == [
        (1, f"{TIER}1"),
        (0, f"{TIER}0"),
    ]
    assert tree(facts, nvlink=True) == {"u.1": ("a", "b", "c", "d")}


@pytest.mark.parametrize(
    ("block", "rack"),
    [
        ("network.topology.nvidia.com/spine", "network.topology.nvidia.com/leaf"),
        ("topology.k8s.aws/network-node-layer-1", "topology.k8s.aws/network-node-layer-2"),
        ("cloud.google.com/gce-topology-block", "cloud.google.com/gce-topology-subblock"),
        ("oci.oraclecloud.com/host.network_block_id", "oci.oraclecloud.com/host.rack_id"),
        ("oci.oraclecloud.com/rdma.network_block_id", "oci.oraclecloud.com/rdma.local_block_id"),
        ("backend.coreweave.cloud/superpod", "backend.coreweave.cloud/leafgroup"),
        ("ib.coreweave.cloud/superpod", "ib.coreweave.cloud/leafgroup"),
        ("cloud.provider.com/topology-block", "cloud.provider.com/topology-rack"),
    ],
)
def test_racks_are_keyed_by_their_full_path(block: str, rack: str) -> None:
    nodes = [node(f"n{b}{r}", labels={block: f"block-{b}", rack: f"rack-{r}"}) for b in (0, 1) for r in (0, 1)]
    facts = read_k8s_nodes(listed(*nodes))
    assert tree(facts) == {
        "block-0": ("block-0/rack-0", "block-0/rack-1"),
        "block-1": ("block-1/rack-0", "block-1/rack-1"),
    } | {f"block-{b}/rack-{r}": (f"n{b}{r}",) for b in (0, 1) for r in (0, 1)}
    assert any("rack-0 under block-0, block-1, and 1 more such" in note for note in facts.assumptions)


def test_accelerator_domains_nest_and_come_before_cliques() -> None:
    key = "accelerator.topograph.run/"
    labels = [{f"{key}domain": "d", f"{key}sub-domain": f"d.r{i}", "nvidia.com/gpu.clique": "u.1"} for i in (0, 1)]
    facts = read_k8s_nodes(listed(*(node(f"n{i}", labels=of_node) for i, of_node in enumerate(labels))))
    assert tree(facts, nvlink=True) == {"d": ("d.r0", "d.r1"), "d.r0": ("n0",), "d.r1": ("n1",)}


def test_a_clique_of_zeros_is_no_domain() -> None:
    clique = {"nvidia.com/gpu.clique": "00000000-0000-0000-0000-000000000000.0"}
    facts = read_k8s_nodes(listed(*(node(name, labels=clique) for name in "ab")))
    assert tree(facts, nvlink=True) == {}


def test_kueue_names_the_labels_of_a_site() -> None:
    topology = kueue_topology(
        "site", "example.com/hall", "example.com/row", "example.com/none", "kubernetes.io/hostname"
    )
    labels = [{"example.com/hall": "h", "example.com/row": row, f"{TIER}0": "ignored"} for row in "xy"]
    nodes = [node(f"n{i}", labels=of_node | {"kubernetes.io/hostname": f"n{i}"}) for i, of_node in enumerate(labels)]
    facts = read_k8s_nodes(listed(*nodes, topology))
    assert tree(facts) == {"h": ("x", "y"), "x": ("n0",), "y": ("n1",)}
    assert "no node carries the label example.com/none of the Topology 'site'" in facts.assumptions
    assert refused(listed(*nodes, topology, kueue_topology("other", "a")))[0][0] == "items/2"


def test_nodes_without_some_labels_hang_where_these_end() -> None:
    labels = [{f"{TIER}0": "l", f"{TIER}1": "s"}, {f"{TIER}1": "s"}, {}]
    facts = read_k8s_nodes(listed(*(node(f"n{i}", labels=of_node) for i, of_node in enumerate(labels))))
    assert tree(facts) == {"s": ("l", "n1"), "l": ("n0",)}
    assert any("missing on n1:" in note for note in facts.assumptions)


def test_labels_that_nodes_without_devices_lack_or_that_are_empty_are_not_told() -> None:
    labels = {f"{TIER}0": "l", "ds.coreweave.com/nvlink.domain": "rack-7", "ib.coreweave.cloud/fabric": ""}
    facts = read_k8s_nodes(listed(node("n0", labels=labels), node("n1", labels=labels), node("login", gpus=0)))
    assert tree(facts) == {"l": ("n0", "n1")}
    assert tree(facts, nvlink=True) == {"rack-7": ("n0", "n1")}
    assert not any("missing" in note for note in facts.assumptions)


def test_karpenter_tells_a_devices_name_and_memory() -> None:
    bare = node("a", gpus=0, labels={"karpenter.k8s.aws/instance-gpu-name": "a100"})
    bare["metadata"]["labels"]["karpenter.k8s.aws/instance-gpu-memory"] = "40960"
    bare["status"]["capacity"]["nvidia.com/gpu"] = bare["status"]["allocatable"]["nvidia.com/gpu"] = "8"
    devices = read_k8s_nodes(listed(bare)).nodes["a"].devices
    assert devices is not None
    assert {(each.product, each.memory_bytes) for each in devices} == {("a100", 40960 * 2**20)}


def test_hypernodes_of_the_same_text_are_the_switches() -> None:
    objects = [node("a1", labels={f"{TIER}0": "l"}), node("b1"), hypernode("s0", 1, member("Node", regex="^a"))]
    facts = read_k8s_nodes(listed(*objects))
    assert tree(facts) == {"s0": ("a1",)}
    assert any("topology labels of nodes are not read" in note for note in facts.assumptions)


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("", [("the whole text", "it is empty")]),
        ("PK\0\3", [("the whole text", "it is binary, or not UTF-8")]),
        ("NAME STATUS\nn0 Ready", [("the whole text", "'NAME STATUS n0 Ready' is no Kubernetes object; print")]),
        ("[]", [("the whole text", "[] is no Kubernetes object")]),
        (listed(), [("the whole text", "there is no node among them, but no object; give `kubectl get nodes")]),
        (listed(pod("p", "n", 1)), [("the whole text", "there is no node among them, but 1 Pod; give")]),
        ('{"kind": "List", "items": 3}', [("items", "`items` has to be a list of objects, not 3")]),
        (
            listed(node("a"), 7, node("a")),
            [("items/1", "7 is no"), ("items/2", "the node 'a' stands already at items/0")],
        ),
        (listed(node("a/b")), [("items/0/metadata/name", "it has to be a name: letters")]),
        (listed(node("a", labels={"x": 1})), [("items/0/metadata/labels/x", "it has to be a text")]),  # type: ignore[dict-item]
        (listed(node("a", labels={"x/y": "v" * 64})), [("items/0/metadata/labels", "the value of 'x/y', 'vvvv")]),
        (
            listed(node("a", labels={"nvidia.com/gpu.memory": "big"})),
            [("items/0/metadata/labels", "nvidia.com/gpu.mem")],
        ),
        (
            listed(node("a", status={"capacity": {"nvidia.com/gpu": "8k"}})),
            [("items/0/status/capacity", "nvidia.com/gpu has to be a number of devices up to 1024; it is '8k'")],
        ),
        (
            listed(node("a", labels={f"{TIER}{i}": "s" for i in range(17)})),
            [("items", "nodes have labels of 17 levels; there are 16 at most")],
        ),
        (listed(node("a"))[:200], [("line 10, column 1", "")]),
        ("kind: Node\nmetadata: {name: [}", [("line 2, column 19", "while parsing")]),
        ("a: &a {}\nb: *a", [("line 2, column 4", "the alias *a is not read")]),
        ("a: " + "[" * 200, [("line 1, column 103", "it is nested deeper than 100 levels")]),
        ("[" * 100_000, [("the whole text", "it is nested too deeply")]),
    ],
)
def test_bad_texts(text: str, faults: list[tuple[str, str]]) -> None:
    refusals = refused(text)
    assert len(refusals) == len(faults)
    for (pointer, detail), (wanted_pointer, wanted) in zip(refusals, faults, strict=True):
        assert pointer.startswith(wanted_pointer.split(",")[0])
        assert wanted in detail
