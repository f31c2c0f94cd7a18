"""Costs at a choice of degrees that are computed on some hosts and reused on others, as if computed there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from penstock.examples import catalogue
from penstock.placing.cluster import Cluster
from penstock.placing.job_placement import with_open_jobs
from penstock.placing.job_problem import Job
from penstock.schemas.api.placement import PlacementRequest
from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.degrees.contract import Problems, contract
from penstock.solvers.model.problem import Measured, Problem
from penstock.solvers.placement.site import Chosen


def job() -> Job:
    """Build a job on nodes of H100 and of A100, in some of which GPUs are connected more slowly or are busy."""
    quick, slow = (catalogue.cluster(f"4x8x{kind}").expanded() for kind in ("H100", "A100"))
    names = {node.name: f"slow{number}" for number, node in enumerate(slow.nodes)}
    nodes = [*quick.nodes]
    for node in slow.nodes:
        devices = tuple(
            each.model_copy(update={"id": each.id.replace(node.name, names[node.name])}) for each in node.devices
        )
        fabric = node.fabric.model_copy(update={"bandwidth_bytes_per_s": node.fabric.bandwidth_bytes_per_s // 20})
        nodes.append(node.model_copy(update={"name": names[node.name], "devices": devices, "fabric": fabric}))
    links = [
        *quick.links,
        *(
            each.model_copy(update={"a": names.get(each.a, each.a), "b": names.get(each.b, each.b)})
            for each in slow.links
        ),
    ]
    whole = quick.model_copy(update={"nodes": tuple(nodes), "links": tuple(links)})
    fields: dict[str, Any] = {"name": "job", "profile": catalogue.profile("llama-3-8b"), "global_batch_size": 16}
    busy = ["slow1/1", "slow1/6", "node2/3"]
    request = with_open_jobs(PlacementRequest.parse({"topology": whole, "jobs": [fields], "busy": busy}))
    cluster = Cluster(whole)
    return Job(request.jobs[0], cluster, cluster.free(None, busy), "")


def sets(of: Job, rng: random.Random) -> Iterator[tuple[frozenset[tuple[int, int]], Problem]]:
    """Yield random sets of hosts, each with the groups of its hosts."""
    hosts = range(len(of.site.hosts))
    for _ in range(10):
        chosen: Chosen = of.site.whole_hosts(rng.sample(hosts, rng.randint(1, 3)))
        yield frozenset((of.site.hosts[host].group, count) for host, count in chosen), of.problem(chosen)


def contents(problem: Problem) -> dict[str, Any]:
    """Return all fields of a problem but its source, and values that are cached."""
    network, left_out = problem.network, {"real", "network", "variants", "_costs"}
    values = {each.name: plain(getattr(problem, each.name)) for each in fields(problem) if each.name not in left_out}
    joined = (network.device_names, network.node_names, network.node_of, network.insides, network.cables)
    return values | {"network": joined}


def plain(value: Any) -> Any:
    """Return a value with its arrays as lists, so that two of them can be compared."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, Measured):
        return [plain(getattr(value, each.name)) for each in fields(value)]
    return [plain(each) for each in value] if isinstance(value, (tuple, list)) else value


@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", range(2))
def test_a_choice_on_other_hosts_of_the_same_groups_is_what_it_would_be_by_itself(seed: int) -> None:
    known_by_groups: dict[object, Problems] = {}
    careless: Problems = {}
    shared = different = 0
    for groups, problem in sets(job(), random.Random(seed)):
        shared_costs = known_by_groups.setdefault(groups, {})
        for choice in problem.choices:
            try:
                expected = contract(problem, choice)
            except UnsupportedRequest:
                continue
            shared += choice in shared_costs
            reused = contract(problem, choice, shared_costs)
            assert contents(reused) == contents(expected)
            assert reused.real is problem or choice.degrees.cell == 1
            for kind in {device.kind for device in expected.devices}:
                for rows in (1, 3):
                    assert (reused.costs(kind, rows).backward_ns == expected.costs(kind, rows).backward_ns).all()
            try:
                different += contents(contract(problem, choice, careless)) != contents(expected)
            except KeyError:
                different += 1
    assert shared > 10
    assert different, "groups of hosts make no difference, so that this test would pass whatever is shared"
