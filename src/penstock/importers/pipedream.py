"""The profile text of PipeDream's profiler, which DAPPLE's repository also ships, as a ModelProfile.

A line is a node (``node4 -- Conv2d(3, 64) -- forward_compute_time=1.5, backward_compute_time=3.0,
activation_size=8388608.0, parameter_size=7168.0``) or, indented by a tab or blanks, an edge (``node3 -- node4``).
Times are milliseconds and sizes bytes of one profiled micro-batch; ``activation_size`` may be a list ``[b1; b2]``.

Each distinct tensor counts once, at every cut between its writer and its last reader and in its writer's stash:

* ``__getitem__(k)`` takes output k out of its predecessor's list and makes no new tensor.
* A list with one size throughout and one entry for each reader is one tensor, written once for each edge (so are the
  cells of DAPPLE's AmoebaNet-36).

Where a list has other sizes, and as many as there are readers, its entries go one to each reader, in the order of the
edges; where their numbers differ, every reader reads all of them. PipeDream's optimizer adds up the lists, and counts
an output that ``__getitem__`` hands on a second time.

.. [1] Narayanan et al., PipeDream (SOSP 2019), section 3.1: the profiler, and the graph it writes.
.. [2] DAPPLE, section VI-A and Table II: the models and their profiled micro-batches.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal, InvalidOperation

from penstock.importers.linearise import Dataflow, Tensor, linearise
from penstock.importers.lines import Faults
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.profile import BoundaryTensor, Layer, LayerMeasurement, Measurement, ModelProfile, ProfileSource
from penstock.schemas.quantities import MAX_WIRE_INTEGER

_EDGE = re.compile(r"(node\d+) -- (node\d+)")
_NODE = re.compile(r"node(\d+) -- (.*?) -- (\w+\s*=.*)")
_TIMES = ("forward_compute_time", "backward_compute_time")
_SIZES = ("activation_size", "parameter_size")
_ITEM = re.compile(r"__getitem__\((\d+)\)")
_NODE_FORM = (
    "'nodeN -- description -- forward_compute_time=ms, backward_compute_time=ms, "
    "activation_size=bytes, parameter_size=bytes'"
)
_NS_PER_MS = 10**6


@dataclass(frozen=True, slots=True)
class _Node:
    number: int
    description: str
    forward_ns: int
    backward_ns: int
    output_bytes: tuple[int, ...]
    parameter_bytes: int
    line: int
    untimed: bool

    @property
    def operation(self) -> str:
        return self.description.split("(")[0].strip() or f"node{self.number}"


def read_profile(text: str, *, name: str, device_kind: str = "V100", micro_batch_size: int) -> ModelProfile:
    """Read the chain that a PipeDream or DAPPLE profile text describes.

    ``micro_batch_size`` is the number of samples of the text's times and sizes (DAPPLE writes it into the file name,
    ``pbs``). ``Input…`` nodes carry data-loading time and are dropped; other sources without parameters and backward
    pass become model inputs, listed in ``assumptions``. Sizes per sample are rounded up. The stash of a layer is its
    output: the text has no more.

    Raises InvalidDocument with one fault per line that is wrong.
    """
    if not name:
        raise InvalidDocument("a profile needs a name")
    if micro_batch_size < 1:
        raise InvalidDocument(f"the micro-batch size {micro_batch_size} has to be at least 1 sample")
    nodes, edges = _parse(text, name)
    inputs = _model_inputs(nodes, edges)
    graph = _dataflow(nodes, edges, inputs, name)
    order, crossing = linearise(graph)
    chain = [nodes[number] for number in order]
    if not any(node.forward_ns + node.backward_ns for node in chain):
        raise InvalidDocument(
            f"the profile text {name!r} has no times except for inputs; at least one other node needs a time"
        )
    names = _names(chain)
    return ModelProfile(
        name=name,
        layers=tuple(
            Layer(
                name=names[node.number],
                kind=node.operation,
                parameter_bytes=node.parameter_bytes,
                members=() if names[node.number] == node.description else (node.description[:512],),
            )
            for node in chain
        ),
        boundaries=tuple(
            tuple(_boundary_tensor(names, tensor, graph, micro_batch_size) for tensor in cut) for cut in crossing
        ),
        measurements=(
            Measurement(
                device_kind=device_kind,
                micro_batch_size=micro_batch_size,
                layers=tuple(
                    LayerMeasurement(
                        forward_ns=node.forward_ns,
                        backward_ns=node.backward_ns,
                        stash_bytes=sum(graph.output_bytes[node.number]),
                    )
                    for node in chain
                ),
            ),
        ),
        scaling="linear",
        assumptions=_assumptions(nodes, chain, inputs, graph),
        source=ProfileSource(
            method="imported",
            description=f"PipeDream profile text at {micro_batch_size} samples per micro-batch on {device_kind}",
            expected_error=0.2,
        ),
    )


def _parse(text: str, name: str) -> tuple[dict[int, _Node], list[tuple[int, int]]]:
    faults = Faults(f"the profile text {name!r}")
    nodes: dict[int, _Node] = {}
    edge_lines: list[tuple[int, int, int]] = []
    for number, raw in enumerate(text.lstrip("\ufeff").splitlines(), start=1):
        line = raw.strip()
        if not line:
            continue
        if edge := _EDGE.fullmatch(line):
            edge_lines.append((number, int(edge[1][4:]), int(edge[2][4:])))
        elif match := _NODE.fullmatch(line):
            node = _read_node(number, int(match[1]), match[2].strip(), match[3], faults)
            if node.number in nodes:
                faults.add(number, f"node{node.number} stands already in line {nodes[node.number].line}; write it once")
            nodes.setdefault(node.number, node)
        else:
            shown = line if len(line) <= 60 else line[:57] + "…"
            faults.add(number, f"{shown!r} is neither a node {_NODE_FORM} nor an indented edge 'nodeA -- nodeB'")
    for number, a, b in edge_lines:
        for end in (a, b):
            if end not in nodes:
                faults.add(number, f"the edge node{a} -- node{b} ends at node{end}, which no line describes")
        if a == b:
            faults.add(number, f"the edge node{a} -- node{b} leads back to its own node")
    faults.stop()
    if not nodes:
        raise InvalidDocument(f"the profile text {name!r} has no node; a node is {_NODE_FORM}")
    return nodes, list(dict.fromkeys((a, b) for _, a, b in edge_lines))


def _read_node(line: int, number: int, description: str, fields: str, faults: Faults) -> _Node:
    values: dict[str, str] = {}
    for field in fields.split(" -- ")[0].split(","):
        key, equals, value = (part.strip() for part in field.partition("="))
        if not equals or key not in (*_TIMES, *_SIZES):
            keys = ", ".join((*_TIMES, *_SIZES))
            faults.add(line, f"node{number}: {field.strip()!r} is not key=value with one of the keys {keys}")
        elif key in values:
            faults.add(line, f"node{number}: {key} is given twice")
        values[key] = value
    for key in _SIZES:
        if key not in values:
            faults.add(line, f"node{number}: {key} is missing; write {key}=bytes", code="missing")
    times = [_number(line, number, key, values.get(key, "0"), _NS_PER_MS, faults) for key in _TIMES]
    outputs = values.get("activation_size", "0")
    entries = outputs[1:-1].split(";") if outputs.startswith("[") and outputs.endswith("]") else [outputs]
    output_bytes = tuple(_number(line, number, "activation_size", entry, 1, faults) for entry in entries)
    if sum(output_bytes) > MAX_WIRE_INTEGER:
        faults.add(line, f"node{number}: activation_size adds up to more than 2^53 - 1 bytes")
    return _Node(
        number=number,
        description=description,
        forward_ns=times[0],
        backward_ns=times[1],
        output_bytes=output_bytes,
        parameter_bytes=_number(line, number, "parameter_size", values.get("parameter_size", "0"), 1, faults),
        line=line,
        untimed=any(key not in values for key in _TIMES),
    )


def _number(line: int, node: int, key: str, text: str, scale: int, faults: Faults) -> int:
    try:
        value = Decimal(text.strip())
    except InvalidOperation:
        value = Decimal("nan")
    if not value.is_finite():
        faults.add(line, f"node{node}: {key}={text.strip()!r} is not a finite number")
    elif value < 0:
        faults.add(line, f"node{node}: {key}={text.strip()} is negative")
    elif value > MAX_WIRE_INTEGER // scale:
        faults.add(line, f"node{node}: {key}={text.strip()} is more than 2^53 - 1 {'ns' if scale > 1 else 'bytes'}")
    else:
        return int((value * scale).to_integral_value(rounding=ROUND_CEILING))
    return 0


def _model_inputs(nodes: dict[int, _Node], edges: list[tuple[int, int]]) -> set[int]:
    """Return ``Input…`` nodes and nodes made from them alone without parameters and gradient: ids, masks, tables."""
    before: dict[int, list[int]] = {number: [] for number in nodes}
    read: set[int] = set()
    for a, b in edges:
        before[b].append(a)
        read.add(a)
    inputs = {number for number, node in nodes.items() if node.description.startswith("Input")}
    grew = True
    while grew:
        derived = {
            number
            for number, node in nodes.items()
            if number in read
            and not node.parameter_bytes
            and not node.backward_ns
            and inputs.issuperset(before[number])
        }
        grew = not derived <= inputs
        inputs |= derived
    return inputs


def _dataflow(nodes: dict[int, _Node], edges: list[tuple[int, int]], inputs: set[int], name: str) -> Dataflow:
    kept = sorted(set(nodes) - inputs)
    if not kept:
        raise InvalidDocument(f"the profile text {name!r} has only model inputs; a profile needs at least one layer")
    readers: dict[int, list[int]] = {number: [] for number in kept}
    before: dict[int, list[int]] = {number: [] for number in kept}
    for a, b in edges:
        if a in readers and b in readers:
            readers[a].append(b)
            before[b].append(a)
    items = {number: item for number in kept if (item := _item_of(nodes, before, number)) is not None}
    outputs: dict[int, tuple[tuple[int, ...], ...]] = {}
    sizes: dict[int, tuple[int, ...]] = {}
    for number in kept:
        read = _outputs_read(nodes[number].output_bytes, readers[number], items) if number not in items else ()
        outputs[number] = tuple(tuple(after) for _, after in read)
        sizes[number] = tuple(size for size, _ in read)
    for number, (writer, k) in items.items():
        outputs[writer] = (*outputs[writer][:k], (*outputs[writer][k], *readers[number]), *outputs[writer][k + 1 :])
    return Dataflow(name=name, outputs=outputs, output_bytes=sizes)


def _item_of(nodes: dict[int, _Node], before: dict[int, list[int]], number: int) -> tuple[int, int] | None:
    """Return the (writer, output) that a ``__getitem__`` node hands on; None for any other node."""
    node, item = nodes[number], _ITEM.fullmatch(nodes[number].description)
    if item is None or len(before[number]) != 1 or node.parameter_bytes:
        return None
    (writer,), k = before[number], int(item[1])
    sizes = nodes[writer].output_bytes
    return (writer, k) if len(sizes) > 1 and node.output_bytes == sizes[k : k + 1] else None


def _outputs_read(
    sizes: tuple[int, ...], readers: list[int], items: dict[int, tuple[int, int]]
) -> list[tuple[int, list[int]]]:
    """Return the size of each distinct output of a node, and which of its successors read it."""
    others = [reader for reader in readers if reader not in items]
    if len(others) < len(readers):
        readers_of = [[reader for reader in readers if items.get(reader, (0, k))[1] == k] for k in range(len(sizes))]
        return list(zip(sizes, readers_of, strict=True))
    if len(sizes) > 1 and len(sizes) == len(others):
        return [(sizes[0], others)] if len(set(sizes)) == 1 else [(s, [r]) for s, r in zip(sizes, others, strict=True)]
    return [(size, others) for size in sizes]


def _names(chain: list[_Node]) -> dict[int, str]:
    seen = Counter(node.operation for node in chain)
    names = {
        node.number: node.operation[:500] if seen[node.operation] == 1 else f"{node.operation[:480]}.{node.number}"
        for node in chain
    }
    if len(set(names.values())) < len(names):
        return {node.number: f"node{node.number}" for node in chain}
    return names


def _boundary_tensor(names: dict[int, str], tensor: Tensor, graph: Dataflow, micro_batch_size: int) -> BoundaryTensor:
    alone = len(graph.outputs[tensor.writer]) == 1
    name = names[tensor.writer] if alone else f"{names[tensor.writer]}.{tensor.output}"
    size = -(-tensor.bytes // micro_batch_size)
    return BoundaryTensor(name=name, bytes_per_sample=size, gradient_bytes_per_sample=size)


def _assumptions(nodes: dict[int, _Node], chain: list[_Node], inputs: set[int], graph: Dataflow) -> tuple[str, ...]:
    sentences = ["the stash of a layer is its output; what it keeps besides is not in the profile text"]
    loaders = [nodes[i].description for i in sorted(inputs) if nodes[i].description.startswith("Input")]
    if loaders:
        sentences.append(f"dropped, as they carry data-loading time: {', '.join(loaders)}")
    others = [nodes[i].description for i in sorted(inputs) if not nodes[i].description.startswith("Input")]
    if others:
        sentences.append(f"model inputs, delivered by the batch and crossing no cut: {', '.join(others)}")
    if any(node.untimed for node in chain):
        sentences.append("nodes without a forward_compute_time or backward_compute_time take none there")
    if any(len(node.output_bytes) > len(graph.output_bytes[node.number]) > 0 for node in chain):
        sentences.append("outputs of one size, as many as there are readers, are one tensor that all of them read")
    if any(not graph.output_bytes[node.number] for node in chain):
        sentences.append("__getitem__ hands on an output of the node before it and makes no tensor of its own")
    if any(len(graph.output_bytes[node.number]) > 1 for node in chain):
        sentences.append("outputs of a node go one to each reader, in the order of the edges, where there are as many")
    return tuple(sentences)
