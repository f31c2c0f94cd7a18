"""Placements on small clusters against every set of nodes, each planned by the exact planner."""

from __future__ import annotations

from functools import cache
from itertools import chain, combinations

import pytest
from random_clusters import request

from penstock.placing import answer
from penstock.placing.cluster import Cluster
from penstock.placing.job_problem import Job
from penstock.planning.judge import judge
from penstock.schemas.api.placement import PlacementRequest
from penstock.schemas.topology import ClusterTopology

pytestmark = pytest.mark.tier("ci")

SEEDS = range(4)


@cache
def every_set(seed: int) -> tuple[tuple[int, tuple[str, ...], int, int, float], ...]:
    """Return for each set of nodes its class, names, devices, the exact time of a step, and its price."""
    placement_request = request(seed)
    assert isinstance(placement_request.topology, ClusterTopology)
    cluster = Cluster(placement_request.topology)
    job = Job(placement_request.jobs[0], cluster, frozenset(range(len(cluster.devices))), "")
    hosts = range(len(job.site.hosts))
    sets = []
    for some in chain.from_iterable(combinations(hosts, size) for size in range(1, len(hosts) + 1)):
        chosen = job.site.whole_hosts(some)
        result = job.solve(job.problem(chosen), None)
        assert result.best is not None
        devices = job.site.devices_of(chosen)
        price = sum(cluster.devices[device].price or 0 for device in devices)
        names = tuple(job.site.hosts[host].name for host, _count in chosen)
        sets.append((job.site.alike(chosen), names, len(devices), result.best.value_ns, price))
    return tuple(sets)


def placed(placement_request: PlacementRequest) -> tuple[float, int, int]:
    """Return value, time and devices of the placement, whose plan passes the judge."""
    choice = answer(placement_request).choices[0]
    assert choice.plan_file is not None
    assert choice.value is not None
    assert choice.bound is not None
    assert choice.time_per_global_batch_ns is not None
    assert choice.every_set
    assert judge(choice.plan_file).faults == ()
    assert choice.value <= choice.bound
    return choice.value, choice.time_per_global_batch_ns, len(choice.devices)


@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", SEEDS)
def test_sets_that_are_alike_take_the_same_time(seed: int) -> None:
    times: dict[int, set[int]] = {}
    for kind, _names, _devices, time_ns, _price in every_set(seed):
        times.setdefault(kind, set()).add(time_ns)
    assert all(len(each) == 1 for each in times.values())
    assert len(times) < len(every_set(seed))


@pytest.mark.cases(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_no_set_is_faster_and_none_as_fast_has_fewer_devices(seed: int) -> None:
    _value, time_ns, devices = placed(request(seed))
    assert (time_ns, devices) <= min((time, count) for _kind, _names, count, time, _price in every_set(seed))
    assert time_ns == min(time for _kind, _names, _count, time, _price in every_set(seed))


@pytest.mark.cases(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_no_set_does_more_per_device(seed: int) -> None:
    value, time_ns, devices = placed(request(seed, objective="throughput_per_device"))
    assert time_ns * devices == min(time * count for _kind, _names, count, time, _price in every_set(seed))
    assert value == pytest.approx(4e9 / time_ns / devices)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_price_allows_the_fastest_of_what_it_buys(seed: int) -> None:
    most = sorted(price for *_rest, price in every_set(seed))[len(every_set(seed)) // 2]
    placement_request = request(seed, objective="fastest_within_budget", budget={"price_per_hour": most})
    best = min(time for _kind, _names, _count, time, price in every_set(seed) if price <= most)
    assert placed(placement_request)[1] <= best


@pytest.mark.cases(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_deadline_is_kept_by_the_fewest_devices(seed: int) -> None:
    times = sorted(time for _kind, _names, _count, time, _price in every_set(seed))
    deadline = times[len(times) // 3]
    placement_request = request(seed, objective="fastest_within_budget", budget={"time_per_global_batch_ns": deadline})
    value, time_ns, devices = placed(placement_request)
    assert time_ns <= deadline
    fewest = min(count for _kind, _names, count, time, _price in every_set(seed) if time <= deadline)
    assert devices == fewest == -value


@pytest.mark.parametrize("seed", SEEDS)
def test_so_many_nodes_and_no_others_are_looked_at(seed: int) -> None:
    placement_request = request(seed, allowed={"min": 2, "max": 2})
    choice = answer(placement_request).choices[0]
    best = min(time for _kind, names, _count, time, _price in every_set(seed) if len(names) == 2)
    assert choice.time_per_global_batch_ns == best
    assert [row.nodes for row in choice.rows] == [2]
