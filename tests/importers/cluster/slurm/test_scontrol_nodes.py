"""The reader of ``scontrol show nodes``: devices, states, what is taken; in lines, on one line each, and as JSON."""

from __future__ import annotations

import json

import pytest
import yaml
from slurm_samples import CLUSTER, as_json, on_one_line, record

from penstock.importers.cluster.facts import NodeFacts, SourceFacts
from penstock.importers.cluster.slurm.scontrol_nodes import read_scontrol_nodes
from penstock.importers.cluster.slurm.slurm_states import gres_counts, state_words, tracked_devices
from penstock.schemas.errors import InvalidDocument


def one(text: str) -> NodeFacts:
    (node,) = read_scontrol_nodes(text).nodes.values()
    return node


def products(node: NodeFacts) -> list[str | None]:
    assert node.devices is not None
    assert [device.index for device in node.devices] == list(range(len(node.devices)))
    return [device.product for device in node.devices]


@pytest.mark.parametrize("text", [CLUSTER, on_one_line(CLUSTER), "\ufeff" + CLUSTER.replace("\n", "\r\n")])
def test_devices_states_and_what_is_taken(text: str) -> None:
    facts = read_scontrol_nodes(text)
    assert list(facts.nodes) == ["n1", "n2", "n3", "login"]
    assert products(facts.nodes["n1"]) == ["h100"] * 8
    assert products(facts.nodes["login"]) == []
    assert [node.busy_devices for node in facts.nodes.values()] == [0, 3, 0, 0]
    assert [node.usable for node in facts.nodes.values()] == [True, True, False, True]
    drained = facts.nodes["n3"].why_not_usable
    assert drained == "it is drained (gpu 3 fell off: State=IDLE x=1 [root@2026-01-05T10:00:00])"
    assert any("planned" in note and "(n2)" in note for note in facts.assumptions)


def test_lines_are_those_of_the_text() -> None:
    assert [node.place.line for node in read_scontrol_nodes(on_one_line(CLUSTER)).nodes.values()] == [1, 2, 3, 4]
    assert read_scontrol_nodes(CLUSTER).nodes["n2"].place.line == record("n1").count("\n") + 1


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("IDLE", "IDLE"),
        ("DOWN*+DRAIN", "DOWN NOT_RESPONDING DRAIN"),
        ("idle~", "IDLE POWERED_DOWN"),
        ("MIXED-", "MIXED PLANNED"),
        ("ALLOCATED$@", "ALLOCATED MAINT REBOOT_REQUESTED"),
        ("IDLE+CLOUD+POWERED_DOWN", "IDLE CLOUD POWERED_DOWN"),
    ],
)
def test_signs_behind_states_are_words(state: str, words: str) -> None:
    assert state_words([state]) == words.split()


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ("ALLOCATED", ""),
        ("MIXED+PLANNED", ""),
        ("IDLE+CLOUD+POWERED_DOWN", ""),
        ("IDLE+COMPLETING", ""),
        ("DOWN*", "it is down and it does not respond"),
        ("IDLE+MAINT+RESERVED", "it is in maintenance"),
        ("IDLE+CLOUD+MAINTENANCE+RESERVED", "it is in maintenance"),
        ("IDLE+RESERVED", ""),
        ("MIXED+DRAIN", "it is drained"),
        ("DOWN+INVALID_REG", "it is down and it registered with less than its configuration says"),
        ("UNKNOWN", "it is in a state that Slurm does not know yet"),
        ("IDLE+ASLEEP", "Penstock does not know the state ASLEEP"),
    ],
)
def test_states_say_whether_a_node_takes_jobs_and_why_not(state: str, why: str) -> None:
    node = one(record("n", state))
    assert (node.usable, node.why_not_usable) == (not why, why)


@pytest.mark.parametrize(
    ("gres", "counts"),
    [
        ("gpu:8", [(None, 8)]),
        ("gpu", [(None, 1)]),
        ("gpu:tesla", [("tesla", 1)]),
        ("gpu:nvidia_h100_80gb_hbm3:4(S:0,2),shard:64", [("nvidia_h100_80gb_hbm3", 4)]),
        ("craynetwork:4,gpu:a100:2(IDX:0,3),gpu:v100:1", [("a100", 2), ("v100", 1)]),
        ("gpu:a100:no_consume:2", [("a100", 2)]),
        ("mps:100,nic:2", []),
    ],
)
def test_gres_texts(gres: str, counts: list[tuple[str | None, int]]) -> None:
    assert gres_counts(gres) == tuple(counts)


@pytest.mark.parametrize(
    ("tres", "count"),
    [
        ("cpu=64,mem=1G,gres/gpu=8,gres/gpu:h100=8", 8),
        ("cpu=64,gres/gpu:a100=2,gres/gpu:v100=1", 3),
        ("cpu=64,gres/gpumem=80G,gres/gpuutil=3", None),
        ("", None),
    ],
)
def test_trackable_resources(tres: str, count: int | None) -> None:
    assert tracked_devices(tres) == count


@pytest.mark.parametrize("slice_of", ["a100_3g.20gb", "1g.10gb", "nvidia_h100_80gb_hbm3_1g.10gb"])
def test_slices_of_devices_are_partitions(slice_of: str) -> None:
    node = one(record("n", gres=f"gpu:h100:1,gpu:{slice_of}:2", tres="gres/gpu=3"))
    assert node.devices is not None
    assert [device.is_partition for device in node.devices] == [False, True, True]


def test_untracked_devices_of_a_node_with_jobs_are_all_taken() -> None:
    states = {"n1": ("MIXED", "cpu=1"), "n2": ("IDLE", ""), "n3": ("MIXED", ""), "n4": ("UNKNOWN", "")}
    text = "".join(
        record(name, state, tres="billing=1", allocated_tres=allocated) for name, (state, allocated) in states.items()
    )
    facts = read_scontrol_nodes(text)
    assert [node.busy_devices for node in facts.nodes.values()] == [8, 0, 0, 0]
    assert any("(n1)" in note for note in facts.assumptions)


def test_reserved_nodes_are_there_and_taken() -> None:
    facts = read_scontrol_nodes(record("n", "IDLE+RESERVED"))
    assert (facts.nodes["n"].usable, facts.nodes["n"].busy_devices) == (True, 8)
    assert any("reserved" in note for note in facts.assumptions)


def test_details_say_what_is_taken_where_devices_are_not_tracked() -> None:
    used = record("n", "MIXED", gres="gpu:h100:8\n   GresUsed=gpu:h100:5(IDX:0-4)", tres="billing=1")
    assert one(used).busy_devices == 5


def test_a_node_with_fewer_devices_than_configured_takes_no_jobs() -> None:
    assert one(record("n", tres="gres/gpu=7")).why_not_usable == "Gres says 8 devices and CfgTRES 7"


def switches(facts: SourceFacts) -> dict[str, str]:
    return {switch.name: " ".join(switch.nodes + switch.switches) for switch in facts.switches}


def test_nodes_name_the_switches_that_they_are_below() -> None:
    places = {"n1": "tree:core:s1,blocks:b1", "n2": "tree:core:s1,blocks:b1", "n3": "tree:core:s2", "n4": "(null)"}
    facts = read_scontrol_nodes("".join(record(name, more=f"   Topology={at}\n") for name, at in places.items()))
    assert switches(facts) == {"core": "s1 s2", "s1": "n1 n2", "s2": "n3"}
    assert any("of several topologies tree is read" in note for note in facts.assumptions)
    torus = read_scontrol_nodes(record("n1", more="   Topology=cube:t:0:1:2\n"))
    assert switches(torus) == {}
    assert any("topology.yaml" in note for note in torus.assumptions)


def test_json_of_new_and_old_slurm() -> None:
    new = {"name": "n1", "state": ["IDLE", "DRAIN"], "reason": "fan", "gres": "gpu:h100:4(S:0-1)", "tres_used": ""}
    old = {"name": "n2", "state": "mixed", "state_flags": [], "gres": "gpu:h100:4", "gres_used": "gpu:h100:1(IDX:2)"}
    bare = {"name": "n3", "state": ["IDLE"], "gres": "", "tres": None}
    text = as_json(new | {"tres": "cpu=1,gres/gpu=4"}, old, bare)
    facts = read_scontrol_nodes(text)
    assert read_scontrol_nodes(yaml.safe_dump(json.loads(text))).nodes == facts.nodes
    assert [(node.usable, node.why_not_usable, node.busy_devices) for node in facts.nodes.values()] == [
        (False, "it is drained (fan)", 0),
        (True, "", 1),
        (True, "", 0),
    ]
    assert products(facts.nodes["n2"]) == ["h100"] * 4


@pytest.mark.parametrize(
    ("text", "at", "message"),
    [
        pytest.param(" \n", "the whole text", "empty", id="empty"),
        pytest.param("\x7fELF", "line 1, column 1", "binary", id="binary"),
        pytest.param("PARTITION AVAIL\n", "line 1", "before the first NodeName", id="another-command"),
        pytest.param(record("n") + record("n"), "line 15", "there twice, first on line 1", id="twice"),
        pytest.param("NodeName=n1 Arch=x86_64\n", "line 1", "'n1' has no State", id="cut-off"),
        pytest.param(record("n1") + record("n2")[:400], "line 15", "'n2' has no AllocTRES", id="cut-off-later"),
        pytest.param("NodeName= State=IDLE", "line 1", "no name of one node", id="no-name"),
        pytest.param("NodeName=a[1-2] State=IDLE", "line 1", "no name of one node", id="hostlist"),
        pytest.param(record("n", gres="gpu:a:b:c"), "line 1", "no gpu:type:count", id="gres"),
        pytest.param(record("n", gres="gpu:99999999"), "line 1", "1024 at most", id="too-many"),
        pytest.param("{", "line 1, column 2", "cut off", id="json-cut-off"),
        pytest.param('{"jobs": []}', "the whole text", "no list of nodes", id="json-of-jobs"),
        pytest.param(as_json({"state": []}), "nodes/0", "no node with a name", id="json-no-name"),
        pytest.param(as_json({"name": "a", "gres": 8}), "nodes/0", "gres of 'a' is no text", id="json-gres"),
        pytest.param(as_json({"name": "a", "state": [1]}), "nodes/0", "state of 'a' is no text", id="json-state"),
        pytest.param(as_json({"name": "a"}), "nodes/0", "'a' has no State", id="json-no-state"),
    ],
)
def test_one_fault_with_its_place(text: str, at: str, message: str) -> None:
    with pytest.raises(InvalidDocument) as caught:
        read_scontrol_nodes(text)
    (fault,) = caught.value.faults
    assert fault.pointer.split(", line ")[0] == at
    assert message in fault.detail
