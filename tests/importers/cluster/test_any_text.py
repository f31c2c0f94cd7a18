"""Readers answer any text with facts or InvalidDocument: true texts, also when they are cut, doubled or changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kubernetes_samples import graph, hypernode, instance, kueue_topology, listed, member, node, pod
from node_samples import FABRIC, MATRIX, SWITCHES, gpu, log, net, pci, queried, rocm, system
from slurm_samples import CLUSTER, SEVERAL
from slurm_samples import CONF_TREE as CONF
from slurm_samples import SHOWN_TREE as SHOWN

from penstock.importers.cluster.facts import SourceFacts
from penstock.importers.cluster.formats import import_topology
from penstock.importers.cluster.ibnetdiscover import read_ibnetdiscover
from penstock.importers.cluster.kubernetes.hypernodes import read_hypernodes
from penstock.importers.cluster.kubernetes.kubernetes_nodes import read_k8s_nodes
from penstock.importers.cluster.kubernetes.topograph import read_topograph
from penstock.importers.cluster.node.nccl_xml import read_nccl_xml
from penstock.importers.cluster.node.nvidia_query import read_nvidia_query
from penstock.importers.cluster.node.nvidia_topo import read_nvidia_topo
from penstock.importers.cluster.node.rocm_topo import read_rocm_topo
from penstock.importers.cluster.slurm.scontrol_nodes import read_scontrol_nodes
from penstock.importers.cluster.slurm.scontrol_topology import read_scontrol_topology
from penstock.importers.cluster.slurm.slurm_conf import read_slurm_conf
from penstock.importers.cluster.slurm.slurm_yaml import read_slurm_yaml
from penstock.schemas.api.topology_import import ImportSource
from penstock.schemas.errors import InvalidDocument

LABELS = {"a/row": "r", "a/rack": "x", "nvidia.com/gpu.clique": "u.1"}
NODES = [node("n1", labels=LABELS), node("n2", labels=LABELS), pod("p", "n1", 2)]
TREE = [hypernode("s", 1, member("Node", regex="^n")), hypernode("t", 2, member("HyperNode", exact="s"))]
TEXTS: dict[str, tuple[Callable[[str], SourceFacts], str]] = {
    "slurm-conf": (read_slurm_conf, CONF),
    "slurm-yaml": (read_slurm_yaml, SEVERAL),
    "scontrol-topology": (read_scontrol_topology, SHOWN),
    "scontrol-nodes": (read_scontrol_nodes, CLUSTER),
    "ibnetdiscover": (read_ibnetdiscover, FABRIC),
    "k8s-nodes": (read_k8s_nodes, listed(*NODES, kueue_topology("site", "a/row", "a/rack"))),
    "hypernodes": (read_hypernodes, listed(*NODES, *TREE)),
    "topograph": (read_topograph, graph(instance("a", "l", "s", nvlink_domain="d"), instance("b", "m", "s"))),
    "nvidia-topo": (read_nvidia_topo, MATRIX),
    "nvidia-query": (read_nvidia_query, log(queried(1), queried(2))),
    "rocm-topo": (read_rocm_topo, rocm([["XGMI"] * 3] * 3)),
    "nccl-xml": (
        read_nccl_xml,
        system(pci("0000:01:00.0", gpu(0, "0000:02:00.0", SWITCHES) + net("m", "0000:03:00.0"))),
    ),
}
STUFF = st.sampled_from(["", "0", "-1", "null", "[]", "{", '"', "<", "&x;", "\t", "\n", "\0", "é", "9" * 30, "\ud800"])
CHANGE = st.tuples(st.floats(0, 1), st.floats(0, 0.2), STUFF | st.text(max_size=3), st.booleans())


@pytest.mark.parametrize("name", TEXTS)
@settings(max_examples=40)
@given(changes=st.lists(CHANGE, max_size=3))
@example(changes=[])
def test_facts_or_invalid_document(name: str, changes: list[tuple[float, float, str, bool]]) -> None:
    reader, text = TEXTS[name]
    for start, length, stuff, doubled in changes:
        begin = int(start * len(text))
        end = begin + int(length * len(text))
        text = text[:begin] + (text[begin:end] * 2 if doubled else "") + stuff + text[end:]
    try:
        assert reader(text).format == name
        faults = None
    except InvalidDocument as error:
        faults = error.faults
    if faults is not None:
        assert changes, "the text itself is good"
        assert faults
        assert all(fault.pointer and fault.detail for fault in faults)


@pytest.mark.parametrize("part", ["\n", " ", "- \n", "{", "NodeName=a\n", "SwitchName=a ", '"kind": ', "BlockName="])
def test_formats_are_told_apart_in_linear_time(part: str) -> None:
    """A megabyte that backtracking would search again from each of its lines."""
    with pytest.raises(InvalidDocument):
        import_topology([ImportSource(text=part * (1_000_000 // len(part)))])
