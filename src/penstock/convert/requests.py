"""Requests in: a profile, a topology and the options of training become one frozen ``Problem``."""

from __future__ import annotations

from collections.abc import Sequence, Set
from difflib import get_close_matches
from math import log
from typing import get_args

import numpy as np

from penstock.convert.layer_roles import transformer_of
from penstock.convert.requested_degrees import choices_of, copied_bytes, variants_of
from penstock.convert.trainers import recomputable, within_of
from penstock.schemas import topology as wire
from penstock.schemas.amounts import exact
from penstock.schemas.errors import Fault, InvalidDocument, meant
from penstock.schemas.profile import Measurement, ModelProfile, PipelineProfile
from penstock.schemas.quantities import MAX_WIRE_INTEGER
from penstock.schemas.request import MemoryModel, PlanRequest
from penstock.schemas.topology import ClusterTopology, Link, Node
from penstock.shapes.flops import flops_per_sample
from penstock.solvers.degrees.axes import STATES
from penstock.solvers.model.degrees import Module, ModuleCosts
from penstock.solvers.model.network import Cable, Inside, Network
from penstock.solvers.model.problem import (
    CodecSpeed,
    Device,
    Measured,
    MeasuredCollective,
    MemoryRules,
    NetworkRules,
    Pin,
    PipelineRun,
    Problem,
    RankRun,
    frozen,
    prefix,
)


def to_problem(request: PlanRequest, *, any_modules: bool = False) -> Problem:
    """Freeze a request whose profile and topology stand inline. Raises InvalidDocument where they do not fit.

    ``any_modules`` is for judging plans of several targets, whatever modules these recompute; such a problem cannot be
    planned.
    """
    profile, topology = inline_documents(request)
    topology = topology.expanded()
    alone, divided = (_recomputable(request, any_modules, is_divided=each) for each in (False, True))
    sources = _kind_sources(profile, topology)
    _refuse_overflow(profile, {kind for kind, _speed in sources.values()}, request.global_batch_size)
    devices = devices_of(topology)
    network = network_of(topology)
    return Problem(
        layer_names=tuple(layer.name for layer in profile.layers),
        parameter_bytes=prefix(layer.parameter_bytes + (layer.copied_bytes or 0) for layer in profile.layers),
        trainable_bytes=prefix(layer.parameter_bytes if layer.trainable else 0 for layer in profile.layers),
        update_ns=prefix(layer.update_ns for layer in profile.layers),
        forward_bytes=frozen(sum(t.bytes_per_sample for t in cut) for cut in profile.boundaries),
        backward_bytes=frozen(sum(t.gradient_bytes_per_sample for t in cut) for cut in profile.boundaries),
        boundary_tensors=tuple(
            tuple((t.name, t.bytes_per_sample, t.gradient_bytes_per_sample) for t in cut) for cut in profile.boundaries
        ),
        cuttable=np.array([layer.cuttable for layer in profile.layers[:-1]], dtype=bool),
        shared_parameters=tuple((s.name, s.layers, s.bytes) for s in profile.shared_parameters),
        measured=_measured(profile, alone),
        linear=profile.scaling == "linear",
        kind_source=sources,
        devices=devices,
        network=network,
        global_batch_size=request.global_batch_size,
        micro_batch_sizes=tuple(sorted(set(request.micro_batch_sizes))),
        min_slice=request.min_slice,
        memory=_memory_rules(request.memory, profile),
        rules=NetworkRules(
            shared=request.network.sharing == "shared",
            channel=request.network.channel,
            transfer=request.network.transfer,
            all_reduce=request.network.all_reduce,
            bucket_bytes=request.network.bucket_bytes,
            overlap_all_reduce=request.network.overlap_all_reduce,
        ),
        recompute=request.recompute,
        codec=request.codec == "auto",
        codec_speeds=_codec_speeds(profile, request.codec == "auto"),
        encodable=_encodable(profile),
        expected_error=profile.source.expected_error,
        pipeline_run=None if request.pipeline_profile is None else _pipeline_run(request.pipeline_profile),
        update_rules=frozenset(request.update_rules),
        pins=_pins(request, devices),
        seed=request.seed,
        within=None if request.target is None else within_of(request.target, profile, transformer_of(request)),
        collectives=tuple(map(_collective, topology.collectives or ())),
        variants=variants_of(profile, divided),
        choices=choices_of(request, profile, topology),
        update_workspace_bytes=_update_workspace(profile),
        update_in_turn=bool(profile.update_in_turn),
        copied_bytes=copied_bytes(profile.layers),
        peak_ns=_peak_ns(profile, devices),
    )


def _recomputable(request: PlanRequest, any_modules: bool, *, is_divided: bool) -> Set[Module]:
    """Return the modules that plans of the problem may recompute, of whole layers or of divided ones."""
    return frozenset(get_args(Module)) if any_modules else recomputable(request.target, is_divided=is_divided)


def _collective(each: wire.MeasuredCollective) -> MeasuredCollective:
    return MeasuredCollective(each.operation, each.devices_per_node, each.nodes, each.size_bytes, each.time_ns)


def _peak_ns(profile: ModelProfile, devices: tuple[Device, ...]) -> dict[str, float]:
    """Return the time that a sample's FLOPs take on a GPU of each kind at its peak, where both are known."""
    if profile.shape is None or profile.parameter_dtype != "bf16":
        return {}
    from penstock.facts.device_table import DEVICES

    flops = flops_per_sample(profile.shape)
    kinds = {device.kind for device in devices} & DEVICES.keys()
    return {kind: 1e9 * flops / DEVICES[kind].peak_flops_per_s["bf16"] for kind in sorted(kinds)}


def _update_workspace(profile: ModelProfile) -> np.ndarray | None:
    sizes = [layer.update_workspace_bytes or 0 for layer in profile.layers]
    return frozen(sizes) if any(sizes) else None


def _pins(request: PlanRequest, devices: tuple[Device, ...]) -> tuple[Pin, ...]:
    number_of = {device.name: number for number, device in enumerate(devices)}
    faults = [
        Fault(f"/pins/{p}/devices/{d}", f"{name!r} is not a device of the topology")
        for p, pin in enumerate(request.pins)
        for d, name in enumerate(pin.devices)
        if name not in number_of
    ]
    if faults:
        first = request.pins[int(faults[0].pointer.split("/")[2])].devices[0]
        raise InvalidDocument(
            "a pin names a device that the topology lacks",
            faults=tuple(faults),
            remedy=meant(first, number_of, f"devices are named like {devices[0].name!r}"),
        )
    return tuple(Pin(*pin.layers, frozenset(number_of[name] for name in pin.devices)) for pin in request.pins)


def inline_documents(request: PlanRequest) -> tuple[ModelProfile, ClusterTopology]:
    """Return the request's profile and topology. Raises InvalidDocument where it names them by hash only."""
    if isinstance(request.profile, str) or isinstance(request.topology, str):
        missing = [f for f in ("profile", "topology") if isinstance(getattr(request, f), str)]
        raise InvalidDocument(
            f"the request names its {' and '.join(missing)} by hash only",
            faults=tuple(Fault(f"/{f}", f"{getattr(request, f)} is not known here") for f in missing),
            remedy="give the document itself, or POST it to the service first",
        )
    return request.profile, request.topology


def _measured(profile: ModelProfile, modules: Set[Module]) -> dict[str, tuple[Measured, ...]]:
    """Return the measurements by kind; ``modules`` are the modules that plans may recompute by themselves."""
    by_kind: dict[str, list[Measured]] = {kind: [] for kind in profile.device_kinds}
    for m, alone in zip(profile.measurements, _modules_alone(profile, modules), strict=True):
        by_kind[m.device_kind].append(_one_measurement(m, alone))
    return {kind: tuple(sorted(points, key=lambda each: each.rows)) for kind, points in by_kind.items()}


def _modules_alone(profile: ModelProfile, modules: Set[Module]) -> Sequence[ModuleCosts]:
    """Return, for each measurement, the times (L,) of each module and the bytes that it frees."""
    if not modules or profile.shape is None:
        return [{}] * len(profile.measurements)
    from penstock.shapes.profiles import modules_alone

    costs_by_module = []
    for layers in modules_alone(profile):
        each = [{cost.module: (cost.forward_ns, cost.freed_bytes) for cost in costs} for costs in layers]
        named = sorted(set().union(*each) & modules)
        columns = {name: [costs.get(name, (0, 0)) for costs in each] for name in named}
        arrays = {name: (frozen(t for t, _ in pairs), frozen(b for _, b in pairs)) for name, pairs in columns.items()}
        costs_by_module.append(arrays)
    return costs_by_module


def _one_measurement(m: Measurement, modules: ModuleCosts) -> Measured:
    return Measured(
        rows=m.micro_batch_size,
        forward_ns=frozen(layer.forward_ns for layer in m.layers),
        backward_ns=frozen(layer.backward_ns for layer in m.layers),
        weight_ns=frozen(layer.weight_ns for layer in m.layers),
        stash_bytes=frozen(layer.stash_bytes for layer in m.layers),
        workspace_bytes=frozen(layer.workspace_bytes for layer in m.layers),
        modules=modules,
    )


def _pipeline_run(profile: PipelineProfile) -> PipelineRun:
    ranks = tuple(
        RankRun(
            compute_ns=rank.compute_ns,
            transfer_ns=rank.send_ns + rank.receive_ns,
            utilisation_ppm=tuple(round(share * 1_000_000) for share in rank.utilisation) or (1_000_000,),
            model_bytes=rank.model_bytes,
            optimizer_bytes=rank.optimizer_bytes,
            activation_bytes=rank.activation_bytes,
        )
        for rank in profile.ranks
    )
    return PipelineRun(profile.num_micro_batches, profile.num_pipelines, ranks)


def _refuse_overflow(profile: ModelProfile, kinds: Set[str], global_batch_size: int) -> None:
    """Raise InvalidDocument where times and sizes of a whole step would not stay exact: below 2^53, as on the wire.

    Only the kinds of the topology are checked.
    """
    for index, m in enumerate(profile.measurements):
        if m.device_kind not in kinds:
            continue
        steps = -(-global_batch_size // m.micro_batch_size)
        totals = {
            "time": steps * sum(layer.forward_ns + layer.backward_ns for layer in m.layers),
            "stash": steps * sum(layer.stash_bytes for layer in m.layers),
        }
        for what, total in totals.items():
            if total > MAX_WIRE_INTEGER:
                raise InvalidDocument(
                    f"the {what} of one global batch of {global_batch_size} samples adds up to {total}, "
                    "more than 2^53 - 1, the largest integer that is counted",
                    faults=(Fault(f"/profile/measurements/{index}", f"{what} overflows"),),
                    remedy="check the units (nanoseconds, bytes) and the global batch size",
                )
    parameters = sum(layer.parameter_bytes for layer in profile.layers)
    if parameters * 8 > MAX_WIRE_INTEGER:
        raise InvalidDocument(
            f"the parameters add up to {exact(parameters)}, more than can be counted with their optimizer states",
            faults=(Fault("/profile/layers", "parameter_bytes overflow"),),
            remedy="check the unit of parameter_bytes: bytes",
        )


def _kind_sources(profile: ModelProfile, topology: ClusterTopology) -> dict[str, tuple[str, float]]:
    """Return the source of each device kind's times: (kind in the profile, how many times faster)."""
    profiled = profile.device_kinds
    sources: dict[str, tuple[str, float]] = {}
    faults: dict[str, Fault] = {}
    for n, node in enumerate(topology.nodes):
        for d, device in enumerate(node.devices):
            kind = device.kind
            if (source := topology.costed_from(kind, profiled)) is not None:
                sources[kind] = source
            elif kind not in faults:
                where = f"/topology/nodes/{n}/devices/{d}/kind"
                faults[kind] = Fault(where, f"{kind!r} is not in the profile", "kind")
    if faults:
        unknown = next(iter(faults))
        costs = "computed" if profile.source.method == "analytic" else profile.source.method
        raise InvalidDocument(
            f"the profile {profile.name!r} has no costs of {unknown!r}, only {costs} costs of "
            f"{', '.join(map(repr, profiled))}",
            faults=tuple(faults.values()),
            remedy=f"a topology with {' or '.join(map(repr, profiled))} devices (`penstock probe` writes one of this "
            "machine), a profile of that kind (`penstock profile`), or its costs from a known one: "
            f"topology.kinds: [{{name: {unknown}, {_nearest_kind(unknown, profiled)}}}]",
        )
    return sources


def _nearest_kind(kind: str, kinds: Sequence[str]) -> str:
    """Return the known kind that an unknown one may be scaled from, by its peak or its name, and its speed."""
    from penstock.facts.device_table import DEVICES

    peaks = {each: DEVICES[each].peak_flops_per_s["bf16"] for each in (kind, *kinds) if each in DEVICES}
    if (peak := peaks.pop(kind, None)) is not None and peaks:
        like = min(peaks, key=lambda each: abs(log(peaks[each] / peak)))
        return f"scale_from: {like}, speed: {peak / peaks[like]:.3g}"
    near = get_close_matches(kind.upper(), kinds, n=1, cutoff=0.4)
    return f"scale_from: {near[0]}, speed: 1.0" if near else f"scale_from: {kinds[-1]}, speed: ..."


def _memory_rules(memory: MemoryModel, profile: ModelProfile) -> MemoryRules:
    """Build the rules of optimizer states and gradients, as multiples of the parameters' bytes (ALGORITHMS 1.7).

    FSDP2 shards the fp32 parameters that are among the states. Megatron's FSDP shards 16-bit parameters besides them.
    """
    half_width = profile.parameter_dtype != "fp32"
    in_fp32 = memory.precision == "mixed" and half_width
    return MemoryRules(
        gradient_factor=2 if memory.gradient == "fp32" and half_width else 1,
        states=STATES[memory.optimizer],
        shard_states=memory.optimizer_sharding == "over_replicas",
        headroom_bytes=memory.headroom_bytes,
        count_buffers=memory.buffers == "exact",
        shard_factor=0 if in_fp32 and profile.framework != "megatron" else 1,
        state_width=2 if in_fp32 else 1,
        master_factor=2 if in_fp32 else 0,
    )


def _codec_speeds(profile: ModelProfile, asked_for: bool) -> dict[str, CodecSpeed]:
    if asked_for and not profile.codec_speeds:
        raise InvalidDocument(
            f"codec: auto needs the devices' conversion speed, which the profile {profile.name!r} does not say",
            faults=(Fault("/codec", "the profile has no codec_speeds"),),
            remedy="measure the model with `penstock profile`, or leave codec out",
        )
    return {
        speed.device_kind: CodecSpeed(speed.encode_bytes_per_s, speed.decode_bytes_per_s)
        for speed in profile.codec_speeds or ()
    }


def _encodable(profile: ModelProfile) -> tuple[tuple[int, int], ...]:
    """Return bytes per sample and number of each cut's fp32 tensors whose gradient has the same size."""
    if profile.parameter_dtype != "fp32":
        return ((0, 0),) * len(profile.boundaries)
    sizes = [
        [t.bytes_per_sample for t in cut if t.bytes_per_sample == t.gradient_bytes_per_sample]
        for cut in profile.boundaries
    ]
    return tuple((sum(one), len(one)) for one in sizes)


def devices_of(topology: ClusterTopology) -> tuple[Device, ...]:
    """Return the devices of an expanded topology, numbered node by node."""
    return tuple(_device(n, device) for n, node in enumerate(topology.nodes) for device in node.devices)


def _device(node: int, device: wire.Device) -> Device:
    communicators = device.communicators
    each = (0, 0) if communicators is None else (communicators.edge_bytes, communicators.group_bytes)
    return Device(device.id, node, device.kind, device.memory_bytes, device.context_bytes, device.price, *each)


def network_of(topology: ClusterTopology) -> Network:
    """Build the network of a topology. Raises InvalidDocument where it is not connected."""
    ids = tuple(device.id for node in topology.nodes for device in node.devices)
    node_of = tuple(n for n, node in enumerate(topology.nodes) for _ in node.devices)
    bandwidth = latency = None
    if topology.matrix is not None:
        order = [topology.matrix.devices.index(name) for name in ids]
        bandwidth = np.array(topology.matrix.bandwidth_bytes_per_s, dtype=np.int64)[np.ix_(order, order)]
        np.fill_diagonal(bandwidth, 0)
        if topology.matrix.latency_ns is not None:
            latency = np.array(topology.matrix.latency_ns, dtype=np.int64)[np.ix_(order, order)]
    widest: dict[str, Link] = {}
    for link in topology.links:
        for end in (link.a, link.b):
            if end not in widest or link.bandwidth_bytes_per_s > widest[end].bandwidth_bytes_per_s:
                widest[end] = link
    network = Network(
        device_names=ids,
        node_names=tuple(node.name for node in topology.nodes),
        node_of=node_of,
        insides=tuple(_inside(node, widest.get(node.name)) for node in topology.nodes),
        cables=tuple(
            Cable(x.a, x.b, x.bandwidth_bytes_per_s, x.latency_ns, x.duplex == "full", x.lanes or 1)
            for x in topology.links
        ),
        matrix_bytes_per_s=bandwidth,
        matrix_latency_ns=latency,
    )
    _refuse_disconnected(network)
    return network


def _inside(node: Node, widest: Link | None) -> Inside | None:
    """Return a node's fabric, else a channel of its widest link, over which its devices reach each other."""
    fabric = node.fabric
    if fabric is not None:
        return Inside(fabric.form, fabric.bandwidth_bytes_per_s, fabric.latency_ns, fabric.duplex == "full")
    if widest is None:
        return None
    return Inside(
        "bus", widest.bandwidth_bytes_per_s // (widest.lanes or 1), widest.latency_ns, widest.duplex == "full"
    )


def _are_joined_by_leaders(network: Network) -> bool:
    """Return whether the first device is joined to every node's first one, and that one to its node's others.

    If so, all devices are connected. If not, they may be connected in another way.
    """
    if network.matrix_bytes_per_s is not None:
        return bool(((network.matrix_bytes_per_s[0, 1:] > 0) & (network.matrix_bytes_per_s[1:, 0] > 0)).all())
    first_of: dict[int, int] = {}
    leaders = [first_of.setdefault(node, device) for device, node in enumerate(network.node_of)]
    pairs = ((0 if leader == device else leader, device) for device, leader in enumerate(leaders))
    return all(device == other or network.route(other, device) is not None for other, device in pairs)


def _refuse_disconnected(network: Network) -> None:
    if _are_joined_by_leaders(network):
        return
    import networkx as nx  # takes as long to load as a small request to be read

    graph = nx.Graph()
    graph.add_nodes_from(range(len(network.device_names)))
    if network.matrix_bytes_per_s is not None:
        joined = (network.matrix_bytes_per_s > 0) & (network.matrix_bytes_per_s.T > 0)
        graph.add_edges_from(zip(*np.nonzero(joined), strict=True))
    else:
        first_of: dict[int, int] = {}
        for device, node in enumerate(network.node_of):
            leader = first_of.setdefault(node, device)
            if leader != device and network.route(leader, device) is not None:
                graph.add_edge(leader, device)
        anchor = 0
        for device in graph:
            if device != anchor and network.route(anchor, device) is not None:
                graph.add_edge(anchor, device)
    parts = [sorted(part) for part in nx.connected_components(graph)]
    if len(parts) > 1:
        a, b = (network.device_names[min(part)] for part in parts[:2])
        raise InvalidDocument(
            f"the topology has {len(parts)} unconnected parts: nothing connects {a!r} and {b!r}",
            faults=(Fault("/topology", f"no path between {a!r} and {b!r}", "disconnected"),),
            remedy="add the link (or the node's fabric) that joins them, or plan for one part",
        )
