"""All devices in one line: devices below one switch stand together, so stages cross few uplinks."""

from __future__ import annotations

from penstock.solvers.model.problem import Problem


def line_of(problem: Problem) -> tuple[int, ...]:
    """Return the devices node by node, nodes in the order of a walk through the network's tree."""
    nodes = problem.nodes()
    return tuple(device for node in problem.network.walk() for device in nodes[node])
