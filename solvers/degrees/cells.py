"""Cells: neighbouring GPUs of one kind that hold a replica together (tensor fastest, then context)."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.model.degrees import Degrees
from penstock.solvers.model.problem import Problem, per_problem

Cells = tuple[tuple[int, ...], ...]


def cells_of(problem: Problem, degrees: Degrees) -> Cells:
    """Return the cells in the order of the topology; GPUs that fill none are left out.

    A cell lies inside a node, or consists of whole neighbouring nodes of equal size; its GPUs are of one kind. Raises
    UnsupportedRequest where tensor parallelism would leave a node, or no cell can be made.
    """
    mesh, group = degrees.mesh, degrees.expert_group
    if degrees.cell % mesh or degrees.cell % group:
        raise UnsupportedRequest(
            f"at {degrees}, {mesh} GPUs share a sequence and {group} GPUs share experts, but neither number divides "
            "the other",
            remedy="degrees at which tensor × context divides expert × expert tensor, or the reverse",
        )
    largest = _largest_node(problem)
    if degrees.tensor > largest:
        raise UnsupportedRequest(
            f"tensor {degrees.tensor} needs {degrees.tensor} GPUs in one node, but the largest node has {largest}",
            remedy=f"a tensor degree of at most {largest}",
        )
    cells = _cells(problem, degrees.cell)
    if not cells:
        raise UnsupportedRequest(
            f"{degrees} needs {degrees.cell} neighbouring GPUs of one kind that lie in one node or fill whole nodes, "
            "which the cluster lacks",
            remedy="smaller degrees, or a cluster with such nodes",
        )
    return cells


@per_problem
def _largest_node(problem: Problem) -> int:
    return max(len(node) for node in problem.nodes())


@per_problem
def _cells(problem: Problem, size: int) -> Cells:
    nodes = problem.nodes()
    inside = [cell for node in nodes for cell in _chunks(node, size)]
    cells = inside if size <= _largest_node(problem) else _of_whole_nodes(nodes, size)
    return tuple(cell for cell in cells if len({problem.devices[gpu].kind for gpu in cell}) == 1)


def _chunks(node: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(node[at : at + size]) for at in range(0, len(node) - size + 1, size)]


def _of_whole_nodes(nodes: Sequence[Sequence[int]], size: int) -> list[tuple[int, ...]]:
    """Return runs of neighbouring nodes of equal size; nodes that fit into no run are left out."""
    cells: list[tuple[int, ...]] = []
    run: list[int] = []
    width = 0
    for node in nodes:
        if len(node) != width:
            run, width = [], len(node)
        run = [*run, *node]
        if len(run) == size:
            cells.append(tuple(run))
            run = []
    return cells
