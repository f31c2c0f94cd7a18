"""Collectives between hosts: each peer starts a rank for each of its devices, and they measure together over gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from penstock.executor.links.collective_probe import refuse_ranks, rows_of
from penstock.executor.links.link_peer import Host, ask, connect, read_line, write_line
from penstock.executor.links.local_ranks import TIMEOUT
from penstock.schemas.errors import InvalidDocument, RunFailed
from penstock.schemas.topology import MeasuredCollective


def measure_among_hosts(
    addresses: Sequence[str], hosts: Sequence[Host], *, progress: Callable[[str], None] | None = None
) -> tuple[MeasuredCollective, ...]:
    """Measure among the CPU devices of the peers' hosts.

    Raises InvalidDocument where hosts have other devices or unequally many, RunFailed when a rank fails.
    """
    _refuse_unequal(hosts)
    refuse_ranks(len(hosts[0].devices), len(hosts))
    if progress is not None:
        progress(f"measuring collectives among {len(hosts)} × {len(hosts[0].devices)} devices")
    with connect(addresses[0]) as store:
        write_line(store, {"ask": "store"})
        question = {
            "ask": "collectives",
            "nodes": len(hosts),
            "store": _field(addresses[0], read_line(store), "address"),
        }

        def ranks_of(node: int) -> Any:
            answer = ask(addresses[node], question | {"node": node}, wait_s=2 * TIMEOUT.total_seconds())
            return _field(addresses[node], answer, "outputs")

        with ThreadPoolExecutor(len(hosts)) as threads:
            answers = list(threads.map(ranks_of, range(len(hosts))))
    return rows_of(output for answer in answers for output in answer)


def _field(address: str, answer: dict[str, Any], what: str) -> Any:
    if what not in answer:
        raise RunFailed(f"{address} could not measure collectives: {answer.get('error', 'it gave no reason')}")
    return answer[what]


def _refuse_unequal(hosts: Sequence[Host]) -> None:
    for host in hosts:
        if other := [f"{device.id} is of kind {device.kind}" for device in host.devices if device.kind != "cpu"]:
            raise InvalidDocument(
                f"collectives are measured over gloo, among devices of kind cpu only; {other[0]}",
                remedy="leave --collectives out, and write the topology's `collectives` from a benchmark of your GPUs",
            )
        if len(host.devices) != len(hosts[0].devices):
            raise InvalidDocument(
                f"collectives are measured among hosts with equally many devices; {hosts[0].name!r} has "
                f"{len(hosts[0].devices)}, but {host.name!r} has {len(host.devices)}",
                remedy="start the peers with the same --cpu-devices",
            )
