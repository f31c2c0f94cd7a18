"""Collectives measured among real processes over gloo: which there are, what they are worth, and a plan by them."""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack
from typing import get_args

import pytest
from peers import host, peer

from penstock.convert import to_problem
from penstock.examples import catalogue
from penstock.executor.links.collective_probe import SIZES_BYTES, Span, measure_collectives, rows_of, spans
from penstock.executor.links.host_collectives import measure_among_hosts
from penstock.executor.links.link_peer import Host
from penstock.executor.links.link_probe import LinkMeasurement, measured_cluster
from penstock.questions.solve import solve
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import MeasuredCollective
from penstock.schemas.transformers.degrees import Operation
from penstock.solvers.costs.collectives import all_reduce_ns

pytestmark = pytest.mark.tier("ci")


def assert_plausible(rows: tuple[MeasuredCollective, ...], measured: list[Span]) -> None:
    """Check each operation of each span at each size: from microseconds to seconds, longer for more bytes in all."""
    times_of: dict[tuple[str, Span], dict[int, int]] = defaultdict(dict)
    for row in rows:
        times_of[row.operation, Span(row.devices_per_node, row.nodes)][row.size_bytes] = row.time_ns
    assert times_of.keys() == {(operation, span) for operation in get_args(Operation) for span in measured}
    for times in times_of.values():
        assert list(times) == list(SIZES_BYTES)
        assert all(1_000 < time < 2 * 10**9 for time in times.values())
    together = [sum(times[size] for times in times_of.values()) for size in SIZES_BYTES]
    assert together[0] < together[-1]


@pytest.mark.parametrize(
    ("devices_per_node", "nodes", "expected"),
    [
        (2, 1, [(2, 1)]),
        (8, 1, [(2, 1), (4, 1), (8, 1)]),
        (6, 1, [(2, 1), (4, 1), (6, 1)]),
        (1, 3, [(1, 3)]),
        (4, 2, [(2, 1), (4, 1), (1, 2), (4, 2)]),
    ],
)
def test_spans(devices_per_node: int, nodes: int, expected: list[tuple[int, int]]) -> None:
    assert spans(devices_per_node, nodes) == expected


@pytest.mark.tier("nightly")
def test_processes_measure_what_a_plan_then_takes() -> None:
    """Four processes stand for two nodes of two; the table goes through documents into the times of a plan."""
    rows = measure_collectives(2, 2)
    assert_plausible(rows, [Span(2, 1), Span(1, 2), Span(2, 2)])
    link = LinkMeasurement(10**9, 1000, {})
    cluster = measured_cluster(link, nodes=2, devices_per_node=2, memory_bytes=2**34, kind="V100", collectives=rows)
    assert type(cluster).parse(cluster.model_dump(mode="json")) == cluster
    request = PlanRequest(
        profile=catalogue.profile("gpt2-small"), topology=cluster, global_batch_size=8, planner="dp", degrees=None
    )
    values = [tuple(row.model_dump().values()) for row in rows]
    (largest,) = [row[4] for row in values if row[:4] == ("all_reduce", 2, 2, SIZES_BYTES[-1])]
    assert all_reduce_ns(to_problem(request), SIZES_BYTES[-1], (0, 1, 2, 3)) >= largest
    plan = solve(request).plan
    assert plan is not None
    assert "the topology's 45 measurements among 1 × 2, 2 × 1, 2 × 2 devices × nodes" in " ".join(plan.assumptions)


def test_a_batch_takes_what_its_slowest_rank_takes() -> None:
    """Three batches on two ranks: 5, 9 and 7 at least, and their median is 7."""
    ranks = [[["send", 2, 1, 64, [5, 2, 7]]], [["send", 2, 1, 64, [1, 9, 3]]]]
    assert rows_of(ranks) == (
        MeasuredCollective(operation="send", devices_per_node=2, nodes=1, size_bytes=64, time_ns=7),
    )


@pytest.mark.tier("nightly")
def test_peers_measure_together() -> None:
    hosts = [host("a"), host("b")]
    with ExitStack() as stack:
        addresses = [stack.enter_context(peer(one)) for one in hosts]
        assert_plausible(measure_among_hosts(addresses, hosts), [Span(1, 2)])


@pytest.mark.tier("quick")
@pytest.mark.parametrize(
    ("hosts", "word"),
    [
        ([host("a"), host("b", kind="H100")], "b/0 is of kind H100"),
        ([host("a", 2), host("b", 3)], "'a' has 2, but 'b' has 3"),
        ([host("a")], "not 1 .*: 1 × 1"),
        ([host("a", 65)], "not 65 .*: 1 × 65"),
    ],
)
def test_what_cannot_be_measured_is_told(hosts: list[Host], word: str) -> None:
    with pytest.raises(InvalidDocument, match=word):
        measure_among_hosts(["127.0.0.1:1"] * len(hosts), hosts)
