"""The parts of a placement: sets of a tree, regular plans, shares of several jobs, parts of topologies."""

from __future__ import annotations

import random
from itertools import combinations, product

import pytest
from random_clusters import KINDS, request, tree

from penstock.convert import to_problem
from penstock.convert.requests import devices_of, network_of
from penstock.examples import catalogue
from penstock.importers.pipedream import read_profile
from penstock.placing import answer
from penstock.placing.cluster import Cluster
from penstock.schemas.request import MemoryModel, PlanRequest
from penstock.schemas.topology import ClusterTopology, Device, Fabric, Link, MeasuredMatrix, Node
from penstock.solvers.model.result import Status
from penstock.solvers.placement import choice, regular
from penstock.solvers.placement.families import Families
from penstock.solvers.placement.joint import shares
from penstock.solvers.placement.site import Site


def site_of(topology: ClusterTopology) -> Site:
    devices = devices_of(topology)
    return Site(devices, network_of(topology), frozenset(range(len(devices))))


def even_tree(leaves: int, per_leaf: int) -> ClusterTopology:
    links, nodes = [], []
    for leaf in range(leaves):
        links.append(Link(a="top", b=f"leaf{leaf}", bandwidth_bytes_per_s=10**9))
        for number in range(per_leaf):
            name = f"n{leaf * per_leaf + number:02}"
            device = Device(id=f"{name}/0", kind="V100", memory_bytes=10**9)
            nodes.append(Node(name=name, devices=(device,)))
            links.append(Link(a=f"leaf{leaf}", b=name, bandwidth_bytes_per_s=10**8))
    switches = ("top", *(f"leaf{leaf}" for leaf in range(leaves)))
    return ClusterTopology(name="even", nodes=tuple(nodes), switches=switches, links=tuple(links))


def test_classes_of_an_even_tree_are_the_partitions_of_a_number() -> None:
    site = site_of(even_tree(3, 4))
    classes = {site.alike(site.whole_hosts(some)) for some in combinations(range(12), 4)}
    assert len(classes) == 4, "4, 3 + 1, 2 + 2, 2 + 1 + 1"


def test_what_a_set_looks_like_does_not_depend_on_the_cables_above_it() -> None:
    topology = even_tree(2, 3)
    wider = [
        link.model_copy(update={"bandwidth_bytes_per_s": 7}) if link.b == "leaf1" else link for link in topology.links
    ]
    site = site_of(topology.model_copy(update={"links": tuple(wider)}))
    assert site.alike(site.whole_hosts([0, 1])) == site.alike(site.whole_hosts([3, 4]))
    assert site.alike(site.whole_hosts([0, 1, 3])) != site.alike(site.whole_hosts([0, 3, 4]))


def test_of_a_matrix_no_two_nodes_are_alike() -> None:
    nodes = tuple(Node(name=f"n{i}", devices=(Device(id=f"n{i}/0", kind="V100", memory_bytes=1),)) for i in range(3))
    rows = ((0, 5, 5), (5, 0, 5), (5, 5, 0))
    matrix = MeasuredMatrix(devices=tuple(f"n{i}/0" for i in range(3)), bandwidth_bytes_per_s=rows)
    site = site_of(ClusterTopology(name="measured", nodes=nodes, matrix=matrix))
    assert len({site.alike(site.whole_hosts([host])) for host in range(3)}) == 3


@pytest.mark.parametrize("seed", range(6))
def test_sets_of_many_nodes_hold_the_tightest_ones_and_even_ones(seed: int) -> None:
    rng = random.Random(seed)
    topology = even_tree(4, 8)
    devices = devices_of(topology)
    free = frozenset(rng.sample(range(32), 24))
    site = Site(devices, network_of(topology), free)
    families = Families(site, range(24), 1, 24)
    assert not families.every_set
    per_leaf = [sum(device // 8 == leaf for device in free) for leaf in range(4)]
    for number in families.numbers():
        spread = []
        for chosen in families.sets(number):
            assert len(chosen) == len(set(chosen)) == number
            assert set(site.devices_of(chosen)) <= free
            spread.append(len({device // 8 for device in site.devices_of(chosen)}))
        fewest = next(k for k in range(1, 5) if sum(sorted(per_leaf)[-k:]) >= number)
        assert min(spread) == fewest
        assert max(spread) == min(4, number) or number == 1
        assert len(families.sets(number)) == len({site.alike(chosen) for chosen in families.sets(number)})


def test_leaves_that_are_broken_into_come_first() -> None:
    topology = even_tree(3, 4)
    site = Site(devices_of(topology), network_of(topology), frozenset(range(12)) - {5})
    (first, *_more) = Families(site, range(11), 3, 3).sets(3)
    assert {device // 4 for device in site.devices_of(first)} == {1}


@pytest.mark.parametrize("seed", range(4))
def test_the_topology_of_a_part_joins_devices_as_the_whole_does(seed: int) -> None:
    rng = random.Random(seed)
    cluster = Cluster(tree(rng, 7))
    some = rng.sample(range(len(cluster.devices)), 4)
    part = ClusterTopology.parse(cluster.part(some).model_dump())
    network, names = network_of(part), [device.name for device in devices_of(part)]
    for a, b in product(range(len(names)), repeat=2):
        if a != b:
            u, v = cluster.number_of[names[a]], cluster.number_of[names[b]]
            assert network.bandwidth(a, b) == cluster.network.bandwidth(u, v)
    assert sorted(names) == sorted(cluster.devices[number].name for number in some)


@pytest.mark.tier("ci")
def test_regular_plans_are_sound_and_near_the_bound() -> None:
    plan_request = PlanRequest(
        profile=catalogue.profile("bert-48"), topology=catalogue.cluster("2x4xV100"), global_batch_size=64
    )
    result = regular.plan(to_problem(plan_request))
    assert result.best is not None
    assert result.best.value_ns < 1.5 * result.bounds[0].bound_ns


@pytest.mark.parametrize("objective", ["throughput", "throughput_per_device"])
def test_sets_that_no_network_would_help_are_not_planned(monkeypatch: pytest.MonkeyPatch, objective: str) -> None:
    monkeypatch.setattr(choice, "SMALL", 0)
    fewer = 0
    for seed in range(3):
        placement_request = request(seed, planner="auto", objective=objective)
        (quick,) = answer(placement_request).choices
        with monkeypatch.context() as patched:
            patched.setattr(regular, "may_take", lambda *_arguments: True)
            (every,) = answer(placement_request).choices
        assert quick.value == every.value
        assert quick.nodes == every.nodes
        fewer += quick.planned < every.planned
    assert fewer


@pytest.mark.tier("ci")
def test_no_network_makes_a_plan_faster_than_none() -> None:
    plan_request = PlanRequest(
        profile=catalogue.profile("bert-48"), topology=catalogue.cluster("2x4xV100"), global_batch_size=64
    )
    problem = to_problem(plan_request)
    result = regular.plan(problem)
    assert result.best is not None
    value_ns = result.best.value_ns
    assert regular.may_take(problem, lambda _devices: value_ns)
    assert not regular.may_take(problem, lambda _devices: result.bounds[0].bound_ns - 1)


@pytest.mark.tier("ci")
@pytest.mark.parametrize("spare_bytes", [0, -1])
def test_one_stage_pays_nothing_for_tensors_with_several_readers(spare_bytes: int) -> None:
    """By hand: 4 layers of 1 + 2 ms and 1,000 bytes a sample, the first read by all others; 16 samples on a device.

    One micro-batch keeps 16 × 4 × 1,000 bytes, which is all the memory there is; with a byte less two are needed.
    """
    node = "forward_compute_time=1, backward_compute_time=2, activation_size=1000, parameter_size=0"
    edges = ((1, 2), (1, 3), (1, 4), (2, 3), (3, 4))
    text = "\n".join([f"node{i} -- L{i} -- {node}" for i in range(1, 5)] + [f"\tnode{a} -- node{b}" for a, b in edges])
    profile = read_profile(text, name="skips", micro_batch_size=1)
    assert [len(cut) for cut in profile.boundaries] == [1, 2, 2]
    device = Device(id="n/0", kind="V100", memory_bytes=16 * 4 * 1000 + spare_bytes)
    plan_request = PlanRequest(
        profile=profile,
        topology=ClusterTopology(name="one", nodes=(Node(name="n", devices=(device,)),)),
        global_batch_size=16,
        memory=MemoryModel(headroom_bytes=0),
        recompute="never",
    )
    best = regular.plan(to_problem(plan_request)).best
    assert best is not None
    assert best.allocation.num_micro_batches == (1 if spare_bytes == 0 else 2)
    assert best.value_ns == 16 * 4 * 3_000_000


@pytest.mark.tier("ci")
def test_regular_plans_say_what_is_missing() -> None:
    topology = catalogue.cluster("1x2xV100")
    plan_request = PlanRequest(profile=catalogue.profile("bert-48"), topology=topology, global_batch_size=64)
    small = topology.expanded()
    devices = tuple(device.model_copy(update={"memory_bytes": 2**30}) for device in small.nodes[0].devices)
    node = small.nodes[0].model_copy(update={"devices": devices})
    tight = plan_request.model_copy(update={"topology": small.model_copy(update={"nodes": (node,)})})
    result = regular.plan(to_problem(tight))
    assert result.status is Status.INFEASIBLE
    assert result.shortage is not None
    assert result.shortage.missing_bytes > 0


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_worth_most(seed: int) -> None:
    rng = random.Random(seed)
    hosts = rng.randint(2, 7)
    worth = [{n: rng.random() * n for n in rng.sample(range(1, 8), 3)} for _ in range(3)]
    numbers = shares(worth, hosts)
    assert sum(numbers) <= hosts
    best = max(
        sum(options.get(n, 0.0) for options, n in zip(worth, combination, strict=True))
        for combination in product(*([0, *options] for options in worth))
        if sum(combination) <= hosts
    )
    assert sum(options.get(n, 0.0) for options, n in zip(worth, numbers, strict=True)) == pytest.approx(best)


def test_kinds_that_the_profile_lacks_are_left_out() -> None:
    placement_request = request(0, planner="dapple")
    job = placement_request.jobs[0]
    costed = tuple(each for each in job.profile.measurements if each.device_kind == KINDS[0])  # type: ignore[union-attr]
    profile = job.profile.model_copy(update={"measurements": costed})  # type: ignore[union-attr]
    placement_request = placement_request.model_copy(update={"jobs": (job.model_copy(update={"profile": profile}),)})
    choice = answer(placement_request).choices[0]
    assert isinstance(placement_request.topology, ClusterTopology)
    kinds = {device.id: device.kind for node in placement_request.topology.nodes for device in node.devices}
    assert {kinds[device] for device in choice.devices} == {KINDS[0]}
    assert "of kinds that the profile 'chain' has no costs for" in choice.why[-1]


def test_a_node_without_a_fabric_keeps_its_cable() -> None:
    devices = tuple(Device(id=f"a/{i}", kind="V100", memory_bytes=1) for i in range(2))
    other = Node(
        name="b", devices=(Device(id="b/0", kind="V100", memory_bytes=1),), fabric=Fabric(bandwidth_bytes_per_s=9)
    )
    links = tuple(Link(a="s", b=name, bandwidth_bytes_per_s=5) for name in "ab")
    nodes = (Node(name="a", devices=devices), other)
    cluster = Cluster(ClusterTopology(name="t", nodes=nodes, switches=("s",), links=links))
    assert network_of(cluster.part([0, 1])).bandwidth(0, 1) == 5
