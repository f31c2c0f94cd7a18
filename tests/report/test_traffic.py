"""Messages between devices: counted by hand, and everything that the judge sends is somewhere."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from penstock.report.blocks import Folded, Table, Text
from penstock.report.cluster_map import cluster_map, traffic_blocks
from penstock.report.traffic import traffic
from penstock.schemas.plan import PlanFile
from penstock.schemas.topology import ClusterTopology
from penstock.schemas.transformers.degrees import Degrees
from penstock.solvers.model.allocation import Stage, single_pipeline
from penstock.solvers.model.problem import Problem


def test_replicas_share_rows_or_take_turns(problem: Problem) -> None:
    """A byte of activations and one of gradients per sample over the cut, two micro-batches of one row; by hand.

    The second stage has a parameter of four bytes on two replicas: 2 (2 - 1) / 2 of its gradients go each way.
    """
    turns = single_pipeline((Stage(0, 0, (0,)), Stage(1, 1, (1, 2), "round_robin")), 2)
    flows = {(flow.source, flow.target): flow.sizes for flow in traffic(problem, turns, 100)}
    ring = flows[1, 2][2]
    assert ring == flows[2, 1][2] > 0
    assert flows == {
        (0, 1): (1, 0, 0), (0, 2): (1, 0, 0), (1, 0): (0, 1, 0), (2, 0): (0, 1, 0),
        (1, 2): (0, 0, ring), (2, 1): (0, 0, ring),
    }  # fmt: skip
    wide = replace(problem, global_batch_size=4)
    rows = single_pipeline((Stage(0, 0, (0,)), Stage(1, 1, (1, 2))), 2)
    split = {(flow.source, flow.target): flow.sizes[:2] for flow in traffic(wide, rows, 100)}
    assert split[0, 1] == split[0, 2] == (2, 0)


def test_utilisation_is_what_the_links_carry(problem: Problem) -> None:
    """10⁹ bytes a second: a byte takes a nanosecond; 10 ns in which two bytes leave device 0."""
    straight = single_pipeline((Stage(0, 0, (0,)), Stage(1, 1, (1,))), 2)
    forth, back = traffic(problem, straight, 10)
    assert (forth.sizes, back.sizes) == ((2, 0, 0), (0, 2, 0))
    shared = set(problem.network.route(0, 1).resources) & set(problem.network.route(1, 0).resources)  # type: ignore[union-attr]
    assert forth.utilisation == back.utilisation == pytest.approx(0.4 if shared else 0.2)


def test_the_map_has_every_flow(file: PlanFile, problem: Problem) -> None:
    topology = file.request.topology
    assert isinstance(topology, ClusterTopology)
    flows = traffic(problem, single_pipeline((Stage(0, 0, (0,)), Stage(1, 1, (1, 2), "round_robin")), 2), 100)
    drawn = cluster_map(file.plan, topology, flows)
    assert drawn.count('<path class="flow') == len(flows) == 6
    assert "node0/0 to node0/2: 1 B per global batch (activations 1 B)" in drawn
    (folded,) = traffic_blocks(file.plan, flows, [device.name for device in problem.devices])
    assert isinstance(folded, Folded)
    (table,) = folded.blocks
    assert isinstance(table, Table)
    assert len(table.rows) == len(flows)
    assert " style=" not in drawn, "the service's pages allow no inline style"


def test_what_moves_within_a_stage_is_said_not_to_be_drawn(file: PlanFile) -> None:
    """GPUs that share layers exchange more than stages do: no data at all would be untrue."""
    shared = file.plan.model_copy(update={"degrees": Degrees(tensor=2), "sharding": "parameters"})
    assert traffic_blocks(file.plan, (), ()) == (Text("No data is sent between devices."),)
    inside = "What the GPUs of a stage exchange (TP 2, parameters sharded) is part of its computing, not drawn."
    assert traffic_blocks(shared, (), ()) == (Text("No stage sends data to another."), Text(inside, "hint"))
    only = file.plan.model_copy(update={"sharding": "optimizer"})
    assert traffic_blocks(only, (), ()) == traffic_blocks(file.plan, (), ()), (
        "these are reduced as gradients are, which is drawn"
    )


def test_labels_stand_above_all_lines(file: PlanFile, problem: Problem) -> None:
    topology = file.request.topology
    assert isinstance(topology, ClusterTopology)
    flows = traffic(problem, single_pipeline((Stage(0, 0, (0,)), Stage(1, 1, (1, 2), "round_robin")), 2), 100)
    drawn = cluster_map(file.plan, topology, flows)
    assert drawn.rindex('class="flow') < drawn.index("<text")


@pytest.mark.parametrize("nodes", [128, 1250])
def test_a_large_cluster_is_a_small_picture(file: PlanFile, nodes: int) -> None:
    """Three devices of node0 hold stages; all others are one path, whose title counts them."""
    uniform = {
        "nodes": nodes,
        "devices_per_node": 8,
        "kind": "cpu",
        "memory_bytes": 1000,
        "fabric": {"bandwidth_bytes_per_s": 10**9},
        "nic": {"bandwidth_bytes_per_s": 10**9},
    }
    large = ClusterTopology.parse({"name": "large", "uniform": uniform})
    drawn = cluster_map(file.plan, large)
    assert f"{8 * nodes:,} devices in {nodes:,} nodes" in drawn
    assert len(drawn) < 60_000
    assert "<title>stage 1: node0/1, node0/2 (2 devices)</title>" in drawn
    idle = f"not used: node0/3, node0/4, node0/5, node0/6, node0/7, node1 … node{nodes - 1} ({8 * nodes - 3:,} devices)"
    assert f"<title>{idle}</title>" in drawn
    height = float(re.findall(r'viewBox="-2 -2 1004 (\d+)"', drawn)[0])
    assert height < 700, "it fits a screen"
    assert " style=" not in drawn


def test_nodes_stand_in_their_racks(file: PlanFile) -> None:
    """A box for each leaf switch, with its nodes by name."""
    uniform = {"nodes": 40, "devices_per_node": 8, "kind": "cpu", "memory_bytes": 1000}
    plain = ClusterTopology.parse({"name": "plain", "uniform": uniform}).expanded()
    links = [
        {"a": f"leaf{i // 20}", "b": node.name, "bandwidth_bytes_per_s": 10**9} for i, node in enumerate(plain.nodes)
    ]
    links += [{"a": "core", "b": f"leaf{i}", "bandwidth_bytes_per_s": 10**9} for i in range(2)]
    document = plain.model_dump(exclude_none=True) | {"switches": ["core", "leaf0", "leaf1"], "links": links}
    drawn = cluster_map(file.plan, ClusterTopology.parse(document))
    assert drawn.count('<rect class="node"') == 2
    assert "leaf0: node0 … node19 (20 nodes)" in drawn
    assert "leaf1: node20 … node39 (20 nodes)" in drawn
