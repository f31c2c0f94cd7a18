"""The network as cells see it: GPU i of one cell sends to GPU i of another, and all these lanes send at the same time.

Sizes and bandwidths are those of one lane. A link that several lanes of a cell pass gives each of them its part: a
node's cable and bus are divided by the GPUs of a cell, while ports and channels of pairs belong to one GPU. A transfer
between two cells so takes as long as the most loaded link takes for what all lanes put on it. Of a cable with several
cards (``Cable.lanes``) a GPU passes one: a card is divided by the GPUs of a cell that pass it, and cells that pass no
card in common do not meet. Where cells have some cards in common and others not, they count as having all in common.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import combinations

import numpy as np

from penstock.solvers.model.network import Cable, Inside, Network


def cell_network(network: Network, cells: Sequence[Sequence[int]]) -> Network:
    """Return the network between the cells; a cell has the name of its first GPU, and that GPU's node."""
    nodes = sorted({network.node_of[cell[0]] for cell in cells})
    number_of = {node: number for number, node in enumerate(nodes)}
    firsts = [cell[0] for cell in cells]
    matrices = [_lanes_matrix(network, cells), _slowest(network.matrix_latency_ns, cells)]
    return Network(
        device_names=tuple(network.device_names[first] for first in firsts),
        node_names=tuple(network.node_names[node] for node in nodes),
        node_of=tuple(number_of[network.node_of[first]] for first in firsts),
        insides=tuple(_inside(network.insides[node], len(cells[0])) for node in nodes),
        cables=_cables(network, cells),
        matrix_bytes_per_s=matrices[0],
        matrix_latency_ns=matrices[1],
    )


def _alone(network: Network, cells: Sequence[Sequence[int]]) -> dict[str, str]:
    """Return the first GPUs of cells that are alone in their node, with its name: the node's links are theirs."""
    held = Counter(network.node_of[cell[0]] for cell in cells)
    firsts = (cell[0] for cell in cells if held[network.node_of[cell[0]]] == 1)
    return {network.device_names[gpu]: network.node_names[network.node_of[gpu]] for gpu in firsts}


def _inside(inside: Inside | None, lanes: int) -> Inside | None:
    if inside is None or inside.form != "bus":
        return inside
    return inside._replace(bandwidth_bytes_per_s=max(1, inside.bandwidth_bytes_per_s // lanes))


def _cables(network: Network, cells: Sequence[Sequence[int]]) -> tuple[Cable, ...]:
    """Return the cables of the tree that lanes pass, each with one lane's part.

    Those of a cell's other GPUs are left out: the first one's own cable is as slow as the slowest of them.
    """
    lanes = _lanes_through(network, cells)
    apart = _cards_apart(network, cells)
    names = _alone(network, cells)
    others = {network.device_names[gpu] for cell in cells for gpu in cell[1:]}
    tree = network.tree
    kept = [network.cables[number] for number in sorted(tree.edges[ends]["cable"] for ends in tree.edges)]
    edges = {frozenset(cable[:2]): cable for cable in kept}
    parts = {
        edge: (cable.lane_bytes_per_s // -(-lanes[edge] // cable.lanes), cable.latency_ns)
        for edge, cable in edges.items()
    }
    for cell in cells:
        own = [frozenset(ends) for gpu in cell for ends in tree.edges(network.place(gpu)) if _is_leaf(network, gpu)]
        if _is_leaf(network, cell[0]):
            found = [parts[edge] for edge in own]
            parts[own[0]] = min(part for part, _late in found), max(late for _part, late in found)
    return tuple(
        cable._replace(
            a=names.get(cable.a, cable.a),
            b=names.get(cable.b, cable.b),
            bandwidth_bytes_per_s=max(1, parts[edge][0]) * apart(cable.lanes),
            latency_ns=parts[edge][1],
            lanes=apart(cable.lanes),
        )
        for edge, cable in edges.items()
        if cable.a not in others and cable.b not in others
    )


def _cards_apart(network: Network, cells: Sequence[Sequence[int]]) -> Callable[[int], int]:
    """Return the number of groups that a number of cards forms: cell i of a node passes group i modulo it."""
    size, numbers = len(cells[0]), network.number_in_node
    held = Counter(network.node_of[cell[0]] for cell in cells)
    place_of: Counter[int] = Counter()
    in_order = True
    for cell in cells:
        node = network.node_of[cell[0]]
        in_order &= numbers[cell[0]] == place_of[node] * size
        place_of[node] += 1

    def apart(cards: int) -> int:
        groups = max(1, cards // size)
        return groups if in_order and (cards % size == 0 or max(held.values()) <= groups) else 1

    return apart


def _is_leaf(network: Network, gpu: int) -> bool:
    """Return whether a GPU, or its node, has one cable."""
    return bool(network.tree.degree(network.place(gpu)) == 1)


def _lanes_through(network: Network, cells: Sequence[Sequence[int]]) -> dict[frozenset[str], int]:
    """Return how many lanes between two cells pass each cable of the tree at most: those whose ends it separates.

    Where a cable divides cells, as that of a rail does, it separates few of their lanes or none.
    """
    sides: dict[frozenset[str], dict[int, int]] = {frozenset(edge): {} for edge in network.tree.edges}
    for number, cell in enumerate(cells):
        for lane, gpu in enumerate(cell):
            for edge in network.way_up(gpu):
                sides[edge][number] = sides[edge].get(number, 0) | 1 << lane
    return {edge: _most_apart(of_cell.values(), len(cells)) for edge, of_cell in sides.items()}


def _most_apart(below: Collection[int], cells: int) -> int:
    """Return the largest number of lanes that differ between two cells, at least 1; bit i of a cell: lane i below."""
    masks = set(below) | ({0} if len(below) < cells else set())
    return max((int(a ^ b).bit_count() for a, b in combinations(masks, 2)), default=1)


def _lanes_matrix(network: Network, cells: Sequence[Sequence[int]]) -> np.ndarray | None:
    """Return the narrowest lane between any two cells, where bandwidths are measured pair by pair."""
    table = network.matrix_bytes_per_s
    if table is None:
        return None
    lanes = [np.asarray(each) for each in zip(*cells, strict=True)]
    found = np.min([table[np.ix_(lane, lane)] for lane in lanes], axis=0)
    np.fill_diagonal(found, 0)
    return np.asarray(found)


def _slowest(table: np.ndarray | None, cells: Sequence[Sequence[int]]) -> np.ndarray | None:
    if table is None:
        return None
    lanes = [np.asarray(each) for each in zip(*cells, strict=True)]
    return np.asarray(np.max([table[np.ix_(lane, lane)] for lane in lanes], axis=0))
