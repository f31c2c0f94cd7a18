"""The network between cells: GPU i of one cell sends to GPU i of another, and all these channels send at the same time.

Sizes and bandwidths are per channel. A link that several channels of a cell pass gives each of them a part: a node's
cable and bus are divided by the GPUs of a cell, while ports and channels of pairs belong to one GPU. A transfer
between two cells so takes as long as the most loaded link takes for the load of all channels. Of a cable with several
cards (``Cable.lanes``) a GPU passes one: a card is divided by the GPUs of a cell that pass it, and cells that pass no
card in common do not meet. Cells with some cards in common and others not count as having all cards in common.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import combinations

import numpy as np

from penstock.solvers.model.network import Cable, Inside, Network


def cell_network(network: Network, cells: Sequence[Sequence[int]]) -> Network:
    """Return the network between the cells; a cell has the name of its first GPU, and belongs to that GPU's node."""
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
    """Return each first GPU whose cell is alone in its node, with the node's name: the cell gets the node's links."""
    cells_in = Counter(network.node_of[cell[0]] for cell in cells)
    firsts = (cell[0] for cell in cells if cells_in[network.node_of[cell[0]]] == 1)
    return {network.device_names[gpu]: network.node_names[network.node_of[gpu]] for gpu in firsts}


def _inside(inside: Inside | None, lanes: int) -> Inside | None:
    if inside is None or inside.form != "bus":
        return inside
    return inside._replace(bandwidth_bytes_per_s=max(1, inside.bandwidth_bytes_per_s // lanes))


def _cables(network: Network, cells: Sequence[Sequence[int]]) -> tuple[Cable, ...]:
    """Return the cables of the tree that channels pass, each with one channel's part.

    The cables of a cell's other GPUs are left out: the first GPU's cable counts as slow as the slowest of them.
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
        leaf_edges = [
            frozenset(ends) for gpu in cell for ends in tree.edges(network.place(gpu)) if _is_leaf(network, gpu)
        ]
        if _is_leaf(network, cell[0]):
            cable_parts = [parts[edge] for edge in leaf_edges]
            parts[leaf_edges[0]] = min(part for part, _late in cable_parts), max(late for _part, late in cable_parts)
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
    """Return a function from a number of cards to the number of groups that they form.

    Cell i of a node passes group i, modulo the number of groups.
    """
    size, numbers = len(cells[0]), network.number_in_node
    cells_in = Counter(network.node_of[cell[0]] for cell in cells)
    place_of: Counter[int] = Counter()
    in_order = True
    for cell in cells:
        node = network.node_of[cell[0]]
        in_order &= numbers[cell[0]] == place_of[node] * size
        place_of[node] += 1

    def apart(cards: int) -> int:
        groups = max(1, cards // size)
        return groups if in_order and (cards % size == 0 or max(cells_in.values()) <= groups) else 1

    return apart


def _is_leaf(network: Network, gpu: int) -> bool:
    """Return whether a GPU, or its node, has one cable."""
    return bool(network.tree.degree(network.place(gpu)) == 1)


def _lanes_through(network: Network, cells: Sequence[Sequence[int]]) -> dict[frozenset[str], int]:
    """Return the most channels between two cells that pass each cable of the tree: channels whose ends the cable
    separates.

    A cable that divides cells, such as a rail's cable, separates few of their channels or none.
    """
    sides: dict[frozenset[str], dict[int, int]] = {frozenset(edge): {} for edge in network.tree.edges}
    for number, cell in enumerate(cells):
        for lane, gpu in enumerate(cell):
            for edge in network.way_up(gpu):
                sides[edge][number] = sides[edge].get(number, 0) | 1 << lane
    return {edge: _most_apart(of_cell.values(), len(cells)) for edge, of_cell in sides.items()}


def _most_apart(below: Collection[int], cells: int) -> int:
    """Return the most channels that differ between two cells, at least 1; bit i of a cell: channel i is below."""
    masks = set(below) | ({0} if len(below) < cells else set())
    return max((int(a ^ b).bit_count() for a, b in combinations(masks, 2)), default=1)


def _lanes_matrix(network: Network, cells: Sequence[Sequence[int]]) -> np.ndarray | None:
    """Return the narrowest channel between any two cells, where bandwidths are measured pair by pair."""
    table = network.matrix_bytes_per_s
    if table is None:
        return None
    lanes = [np.asarray(each) for each in zip(*cells, strict=True)]
    narrowest = np.min([table[np.ix_(lane, lane)] for lane in lanes], axis=0)
    np.fill_diagonal(narrowest, 0)
    return np.asarray(narrowest)


def _slowest(table: np.ndarray | None, cells: Sequence[Sequence[int]]) -> np.ndarray | None:
    if table is None:
        return None
    lanes = [np.asarray(each) for each in zip(*cells, strict=True)]
    return np.asarray(np.max([table[np.ix_(lane, lane)] for lane in lanes], axis=0))
