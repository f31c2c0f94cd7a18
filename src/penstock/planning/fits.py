"""Legal layouts of a transformer on a cluster, and the layouts that fit into its memory: closed forms, no search."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from penstock.examples import catalogue
from penstock.examples.shapes import SHAPES
from penstock.planning.inputs import find_shape, find_topology, read_config
from penstock.schemas.api.fits import Degree, FitsAnswer, FitsRequest, FitsRow, MemoryParts, RefusedLayouts
from penstock.schemas.api.terms import NO_TERMS, Terms
from penstock.schemas.errors import Fault, InvalidDocument, UnsupportedRequest
from penstock.schemas.quantities import MAX_WIRE_INTEGER
from penstock.schemas.topology import ClusterTopology
from penstock.schemas.transformers.degrees import ALONE, Module
from penstock.schemas.transformers.shape import TransformerShape
from penstock.shapes import parameters
from penstock.shapes.gpu_memory import Memory, memory_of_stages, vocabulary_rows
from penstock.shapes.hugging_face import remarks
from penstock.shapes.layout import FULL, SHARDINGS, Layout, divisors, layouts, uneven_said
from penstock.shapes.legality import Broken, broken
from penstock.shapes.routing import Routing

MOST_LAYOUTS = 4096
MOST_STAGES = 2**17
"""Virtual stages of all legal layouts together; the time of an answer grows with them."""
LARGEST_MICRO_BATCH = 16
_VARIED = ("tensor", "context", "expert", "pipeline", "virtual_stages", "micro_batch_size")


class _Cluster(NamedTuple):
    """The facts of a cluster that matter here."""

    gpus: int
    in_node: int
    """The largest number of GPUs such that every node consists of whole groups of it."""
    available_bytes: int
    alike: bool


class _Fullest(NamedTuple):
    layout: Layout
    stage: int
    memory: Memory


def fits(
    model: str | Path | Mapping[str, Any] | TransformerShape,
    topology: str | Path | ClusterTopology,
    **more: Any,
) -> FitsAnswer:
    """List the layouts of a model that are legal on a cluster, and whether each fits into its memory.

    Parameters
    ----------
    model
        A shape, the name of a shipped one (``"llama-3-70b"``), or the ``config.json`` of a Hugging Face model, by the
        file's name or as its content.
    topology
        A document, a file name, or the name of a shipped example (``"8x8xH100"``).
    more
        Fields of FitsRequest: ``tensor=8``, ``pipeline="all"``, ``sharding=("optimizer", "parameters")``, …; a single
        value is a list of one.

    Raises UnsupportedRequest for a degree that no layout can have, with the rule that it breaks.
    """
    listed = {name: [value] if _single(name, value) else value for name, value in more.items()}
    request = {**model_field(model), "topology": find_topology(topology), **listed}
    return answer(FitsRequest.parse(request, units=True))


def answer(request: FitsRequest, _terms: Terms = NO_TERMS) -> FitsAnswer:
    """Answer a request with an inline topology.

    Raises UnsupportedRequest for a degree that no layout can have, and for more layouts than are looked at at once;
    InvalidDocument for a topology by hash and for a config.json that describes no transformer.
    """
    shape, cluster = _shape(request), _cluster(request)
    legal: list[Layout] = []
    refused: list[tuple[Layout, list[Broken]]] = []
    tried = _layouts(request, shape, cluster)
    for layout in tried:
        wrong = broken(shape, layout, cluster.gpus)
        if wrong:
            refused.append((layout, wrong))
        else:
            legal.append(layout)
    without = _refuse_illegal(request, legal, refused)
    stages = sum(layout.pipeline * layout.virtual_stages for layout in legal)
    if stages > MOST_STAGES:
        raise UnsupportedRequest(
            f"{len(legal)} legal layouts have {stages:,} stages; the limit is {MOST_STAGES:,}",
            remedy="give fewer values for the micro-batch size, the sharding or the pipeline",
        )
    fullest = sorted((_fullest(shape, layout) for layout in legal), key=partial(_rank, cluster.available_bytes))
    return FitsAnswer(
        model=shape.name,
        parameters=parameters.total(shape),
        gpus=cluster.gpus,
        available_bytes=cluster.available_bytes,
        tried=len(tried),
        legal=len(legal),
        fitting=sum(one.memory.total <= cluster.available_bytes for one in fullest),
        rows=tuple(_row(one, cluster.available_bytes) for one in fullest[: request.rows]),
        refused=_grouped(refused),
        assumptions=(*without, *_assumptions(request, shape, cluster, fullest[: request.rows])),
    )


def model_field(model: str | Path | Mapping[str, Any] | TransformerShape) -> dict[str, Any]:
    """Return the field of a request for a model by value, by name or by the file of a configuration."""
    if isinstance(model, TransformerShape):
        return {"shape": model}
    if isinstance(model, Mapping):
        return {"hugging_face": dict(model)}
    path, name = Path(model), str(model)
    if name in SHAPES or not (path.suffix or path.exists()):
        return {"shape": catalogue.shape(name)}
    return {"hugging_face": read_config(path)}


def _single(name: str, value: object) -> bool:
    """Return whether a value means a list of one."""
    if name in (*_VARIED, "sharding"):
        return isinstance(value, int | str) and value != "all"
    return name == "recompute" and isinstance(value, str) and value not in ("none", "full")


def _shape(request: FitsRequest) -> TransformerShape:
    model = request.hugging_face if request.shape is None else request.shape
    assert model is not None
    routing = Routing(request.routing_imbalance, request.capacity_factor)
    return find_shape(model, request.sequence_length, routing)


def _cluster(request: FitsRequest) -> _Cluster:
    """Return the facts of a cluster.

    Raises InvalidDocument for a topology by hash, UnsupportedRequest for devices with several GPUs.
    """
    if isinstance(request.topology, str):
        raise InvalidDocument("the topology has to be inline here, not a hash")
    nodes = request.topology.expanded().nodes
    devices = [device for node in nodes for device in node.devices]
    if grouped := next((device for device in devices if device.gpus > 1), None):
        raise UnsupportedRequest(
            f"device {grouped.id!r} has {grouped.gpus} GPUs; degrees of parallelism count single GPUs",
            remedy="a topology with a device per GPU",
        )
    memories = {max(0, device.memory_bytes - device.context_bytes) for device in devices}
    in_node = math.gcd(*(len(node.devices) for node in nodes))
    return _Cluster(len(devices), in_node, min(memories), len(memories) == 1)


def _layouts(request: FitsRequest, shape: TransformerShape, cluster: _Cluster) -> list[Layout]:
    """Return all combinations of the requested degrees. Raises UnsupportedRequest for too many."""
    values_of = {name: _values(name, getattr(request, name), request, shape, cluster) for name in _VARIED}
    shardings = _shardings(request)
    number = math.prod(len(values) for values in values_of.values()) * len(shardings)
    if number > MOST_LAYOUTS:
        every = {**values_of, "sharding": shardings}
        counts = ", ".join(f"{len(values)} of {name}" for name, values in every.items() if len(values) > 1)
        raise UnsupportedRequest(
            f"the request has {number:,} layouts ({counts}); the limit is {MOST_LAYOUTS:,}",
            remedy="give values instead of 'all' for some of the degrees",
        )
    rest = Layout(
        expert_tensor=request.expert_tensor,
        global_batch_size=request.global_batch_size,
        recompute=_recomputed(request),
        sequence_parallel=request.sequence_parallel,
        framework=request.framework,
        context_kind=request.context_kind,
        uneven=True,
    )
    return list(layouts(cluster.gpus, values_of, shardings, rest))


def _recomputed(request: FitsRequest) -> frozenset[Module]:
    """Return the modules of a layer that are recomputed. Raises UnsupportedRequest for some with others."""
    if request.recompute == "none":
        return frozenset()
    if request.recompute == "full":
        return FULL
    alone = next((each for each in request.recompute if each in ALONE), None)
    if alone is not None and (len(set(request.recompute)) > 1 or request.framework != "torch"):
        raise UnsupportedRequest(
            f"recompute {', '.join(request.recompute)} is not possible with framework {request.framework}: {alone!r} "
            "are torchtitan's selective checkpoints, which overlap with the other modules",
            remedy=f"framework torch and only {alone}, or the other modules without {alone}",
        )
    if alone is not None and request.context != (1,):
        raise UnsupportedRequest(
            f"the memory of recompute {alone!r} is unknown under context parallelism",
            remedy="context 1, or recompute full",
        )
    return frozenset(request.recompute)


def _values(
    name: str, requested: Degree, request: FitsRequest, shape: TransformerShape, cluster: _Cluster
) -> Sequence[int]:
    """Return the values of one degree: the requested ones, or all that the cluster and the model could have."""
    if requested != "all":
        return tuple(dict.fromkeys(requested))
    match name:
        case "tensor":
            return divisors(cluster.in_node)
        case "expert":
            return (1,) if shape.experts is None else divisors(cluster.gpus)
        case "pipeline":
            return [each for each in divisors(cluster.gpus) if each <= shape.layers]
        case "virtual_stages":
            both = {*divisors(shape.layers), *divisors(shape.layers + 2)}
            return sorted(each for each in both if 2 * each <= shape.layers) or (1,)
        case "micro_batch_size":
            most = min(LARGEST_MICRO_BATCH, request.global_batch_size or LARGEST_MICRO_BATCH)
            return [2**power for power in range(most.bit_length())]
        case _:
            return divisors(cluster.gpus)


def _shardings(request: FitsRequest) -> Sequence[Any]:
    if request.sharding != "all":
        return tuple(dict.fromkeys(request.sharding))
    return [one for one in SHARDINGS if request.framework == "torch" or one != "parameters_kept"]


def _refuse_illegal(
    request: FitsRequest, legal: Sequence[Layout], refused: Sequence[tuple[Layout, list[Broken]]]
) -> list[str]:
    """Refuse a value that was asked for and that no legal layout has. Raises UnsupportedRequest.

    Where other values of the degree have layouts, these are the answer, and a sentence names each refused value.
    """
    sentences: list[str] = []
    for name in (*_VARIED, "sharding"):
        requested = getattr(request, name)
        for value in () if requested == "all" else requested:
            if any(getattr(layout, name) == value for layout in legal):
                continue
            having = [rules for layout, rules in refused if getattr(layout, name) == value]
            about = [rules for rules in having if any(one.degree == name for one in rules)]
            if not legal and not about:
                continue
            if not legal or len(requested) == 1:
                _refuse(min(about or having, key=len))
            word = name.replace("_", " ")
            sentences.append(f"no layout has {word} {value}: {min(about or having, key=len)[0].sentence}")
    if not legal:
        _refuse(min((rules for _layout, rules in refused), key=len))
    return sentences


def _refuse(rules: Sequence[Broken]) -> None:
    """Raise UnsupportedRequest with the rules that one layout breaks."""
    more = len(rules) - 1
    rest = "" if more == 0 else ", and another rule is broken" if more == 1 else f", and {more} more rules are broken"
    raise UnsupportedRequest(
        f"no such layout: {rules[0].sentence.partition(';')[0]}{rest}",
        faults=tuple(Fault(f"/{one.degree}", one.sentence, one.rule.replace("_", "-")) for one in rules),
    )


def _fullest(shape: TransformerShape, layout: Layout) -> _Fullest:
    stages = memory_of_stages(shape, layout)
    totals = [one.total for one in stages]
    stage = totals.index(max(totals))
    if max(totals[stage], parameters.total(shape)) > MAX_WIRE_INTEGER:
        raise UnsupportedRequest(f"{shape.name} would take more bytes on one GPU than Penstock counts (2^53)")
    return _Fullest(layout, stage, stages[stage])


def _rank(available: int, one: _Fullest) -> tuple[bool, int, int, int]:
    """Return the key of the order: layouts that fit, then most headroom, then the smallest groups."""
    layout, total = one.layout, one.memory.total
    return total > available, total, layout.tensor * layout.context, layout.pipeline * layout.virtual_stages


def _row(one: _Fullest, available: int) -> FitsRow:
    layout, memory = one.layout, one.memory
    return FitsRow(
        fits=memory.total <= available,
        tensor=layout.tensor,
        context=layout.context,
        expert=layout.expert,
        pipeline=layout.pipeline,
        virtual_stages=layout.virtual_stages,
        data=layout.data,
        micro_batch_size=layout.micro_batch_size,
        micro_batches=layout.micro_batches,
        sharding=layout.sharding,
        fullest_stage=one.stage,
        memory=MemoryParts(
            **{f"{name}_bytes": size for name, size in memory._asdict().items()}, total_bytes=memory.total
        ),
        headroom_bytes=available - memory.total,
    )


def _grouped(refused: Iterable[tuple[Layout, list[Broken]]]) -> tuple[RefusedLayouts, ...]:
    """Return one entry per rule, the most frequent first; a layout counts for the first rule that it breaks."""
    counts: Counter[str] = Counter()
    first: dict[str, Broken] = {}
    for _layout, rules in refused:
        counts[rules[0].rule] += 1
        first.setdefault(rules[0].rule, rules[0])
    return tuple(
        RefusedLayouts(rule=rule, degree=first[rule].degree, sentence=first[rule].sentence, layouts=number)
        for rule, number in counts.most_common()
    )


def _assumptions(
    request: FitsRequest, shape: TransformerShape, cluster: _Cluster, listed: Sequence[_Fullest]
) -> Iterable[str]:
    """Yield the assumptions of the answer, in sentences."""
    yield f"samples of {shape.sequence_length} tokens; Adam; computation in bf16"
    yield from dict.fromkeys(filter(None, (uneven_said(shape.layers, one.layout) for one in listed)))
    if request.global_batch_size is None:
        yield "enough micro-batches to fill the pipeline"
    if not cluster.alike:
        yield "every GPU has the memory of the smallest"
    widest = max((one.layout.tensor for one in listed), default=1)
    if widest > cluster.in_node:
        yield f"tensor-parallel groups of {widest} GPUs span nodes, which slows every layer"
    if any(one.layout.context > 1 for one in listed):
        yield f"GPUs that share sequences see one another's keys and values by {listed[0].layout.context_by}"
    if shape.latent is None and widest > shape.kv_heads:
        yield f"key and value heads are copied where tensor is above {shape.kv_heads}"
    rows = max((vocabulary_rows(shape, one.layout) for one in listed), default=shape.vocabulary)
    if rows > shape.vocabulary:
        yield f"the vocabulary of {shape.vocabulary} words is padded, to {rows} rows at most"
    if shape.experts is not None:
        yield "tokens are routed evenly to the experts"
    if request.hugging_face is not None and request.hugging_face.get("num_nextn_predict_layers"):
        yield "the layers that predict further tokens are left out"
    if request.hugging_face is not None:
        yield from remarks(request.hugging_face)
    yield "neither fragmentation of the allocator nor buffers of the communication library are counted"
