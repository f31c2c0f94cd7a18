"""``Problem``: one request as frozen arrays, validated once. No later code validates the input again."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, wraps
from itertools import combinations
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from penstock.solvers.model.degrees import (
    Choice,
    Degrees,
    Module,
    Modules,
    Operation,
    Variant,
    modules_of,
    undominated,
    without_parts,
)
from penstock.solvers.model.network import Network
from penstock.solvers.model.trainer_limits import Within
from penstock.solvers.model.update_rules import UpdateRule


def frozen(values: Iterable[int]) -> np.ndarray:
    """Return the values as an array (n,) int64 that cannot be written to."""
    array = np.fromiter(values, dtype=np.int64)
    array.setflags(write=False)
    return array


def prefix(values: Iterable[int]) -> np.ndarray:
    """Return the prefix sums of n values, (n + 1,) int64, that cannot be written to."""
    return frozen(prefix_sums(frozen(values)))


def prefix_sums(values: ArrayLike) -> np.ndarray:
    """Return exclusive prefix sums along the last axis: (…, n) to (…, n + 1) int64."""
    each = np.asarray(values, dtype=np.int64)
    return np.concatenate((np.zeros((*each.shape[:-1], 1), dtype=np.int64), np.cumsum(each, axis=-1)), axis=-1)


@dataclass(frozen=True, slots=True)
class Device:
    """One device; ``node`` is its host's number.

    ``edge_bytes`` and ``group_bytes``: the bytes of each of its communicators, for a directed edge and for a group.
    """

    name: str
    node: int
    kind: str
    memory_bytes: int
    context_bytes: int
    price: float | None
    edge_bytes: int = 0
    group_bytes: int = 0


class Again(NamedTuple):
    """The cost of recomputing a set of modules in every layer.

    Prefix sums (L + 1,) int64 of its time and of the stash that it frees; and (L,) the freed bytes that are there again
    while a layer runs backward.
    """

    recompute_ns: np.ndarray
    freed_bytes: np.ndarray
    rebuilt_bytes: np.ndarray


@dataclass(frozen=True, eq=False)
class Costs:
    """Costs of a slice of ``rows`` samples on one kind of device.

    All arrays are prefix sums of shape (L + 1,), int64: layers [i, j) cost ``a[j] - a[i]``; ``workspace_bytes`` is per
    layer, shape (L,). ``modules``: for each module that can be recomputed by itself, arrays (L,) of its time and of the
    stash that it frees.
    """

    forward_ns: np.ndarray
    backward_ns: np.ndarray
    weight_ns: np.ndarray
    stash_bytes: np.ndarray
    workspace_bytes: np.ndarray
    modules: dict[Module, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    _again: dict[Modules, Again] = field(default_factory=dict, repr=False)

    @property
    def passes_ns(self) -> np.ndarray:
        """Return prefix sums (L + 1,) of a forward and a backward."""
        return np.asarray(self.forward_ns + self.backward_ns)

    def again(self, modules: Modules) -> Again:
        """Return the cost of recomputing these modules, computed once. No layer frees more than its stash."""
        if modules not in self._again:
            time_ns, freed = (np.sum([self.modules[each][which] for each in modules], axis=0) for which in (0, 1))
            freed = np.minimum(freed, np.diff(self.stash_bytes))
            self._again[modules] = Again(prefix(time_ns), prefix(freed), freed)
        return self._again[modules]


@dataclass(frozen=True, eq=False)
class Measured:
    """One measurement of all layers: arrays of shape (L,), int64, for ``rows`` samples; ``modules`` as in ``Costs``."""

    rows: int
    forward_ns: np.ndarray
    backward_ns: np.ndarray
    weight_ns: np.ndarray
    stash_bytes: np.ndarray
    workspace_bytes: np.ndarray
    modules: dict[Module, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MemoryRules:
    """Bytes in addition to activations: gradients and optimizer states as multiples of the parameters' bytes.

    ``states``: the number of states of a parameter, each ``state_width`` times as wide. ``master_factor``: kept with
    them under any optimizer, such as an fp32 copy. ``shard_factor``: the bytes of sharded parameters in all parts
    together besides these; it may be the fp32 copies that are sharded.
    """

    gradient_factor: int
    states: int
    shard_states: bool
    headroom_bytes: int
    count_buffers: bool
    shard_factor: int = 1
    state_width: int = 1
    master_factor: int = 0

    @property
    def state_factor(self) -> int:
        """Return the bytes kept of a parameter from step to step besides itself, per byte of it."""
        return self.master_factor + self.state_width * self.states

    @property
    def exchange(self) -> Fraction:
        """Return the bytes of an all-reduce that is as long as the replicas' exchange, per byte of parameters."""
        return Fraction(self._halves, 2)

    def exchanged_bytes(self, size_bytes: int) -> int:
        """Return the bytes of an all-reduce that takes as long as replicas exchange ``size_bytes`` of parameters."""
        return -(-size_bytes * self._halves // 2)

    @property
    def _halves(self) -> int:
        """Return twice ``exchange``.

        Replicas all-reduce gradients; where optimizer states are sharded, gradients are reduce-scattered and the
        updated parameters gathered, each of which is half of an all-reduce.
        """
        return self.gradient_factor + (1 if self.shard_states else self.gradient_factor)


@dataclass(frozen=True, slots=True)
class NetworkRules:
    """Rules for the costs of transfers and all-reduces (ALGORITHMS 1.5, 1.6)."""

    shared: bool
    channel: Literal["half", "full", "none"]
    transfer: Literal["nic", "spp", "dapple", "madpipe"]
    all_reduce: Literal["flat", "hierarchical", "dapple"]
    bucket_bytes: int
    overlap_all_reduce: bool


class MeasuredCollective(NamedTuple):
    """The measured time of a collective of ``size_bytes``, ``devices_per_node`` devices in each of ``nodes`` nodes."""

    operation: Operation
    devices_per_node: int
    nodes: int
    size_bytes: int
    time_ns: int


@dataclass(frozen=True, slots=True)
class CodecSpeed:
    """Bytes of fp32 per second that a device kind encodes and decodes."""

    encode_bytes_per_s: int
    decode_bytes_per_s: int


@dataclass(frozen=True, slots=True)
class Pin:
    """Layers ``first`` to ``last`` (both included) may be held by ``devices`` only."""

    first: int
    last: int
    devices: frozenset[int]


class Copies(NamedTuple):
    """Parameters that several GPUs of a cell hold alike, each of which sums and updates a part for the others.

    ``owned_bytes``: prefix sums (L + 1,) of the trainable bytes that are one GPU's part. ``reduce_ns``: prefix sums of
    the time in which a cell sums the gradients of each layer in parts, and gathers its parameters. ``holders``: the
    number of GPUs that hold each parameter outside experts.
    """

    owned_bytes: np.ndarray
    reduce_ns: np.ndarray
    holders: int


@dataclass(frozen=True, slots=True)
class RankRun:
    """One rank of a measured pipeline (AvgPipe, section 5.2.1): times per batch, the curve φ in millionths.

    ``model_bytes``: of one pipeline's parameters and gradients; ``activation_bytes``: of one in-flight micro-batch.
    """

    compute_ns: int
    transfer_ns: int
    utilisation_ppm: tuple[int, ...]
    model_bytes: int
    optimizer_bytes: int
    activation_bytes: int


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """A measured run of n parallel pipelines of m micro-batches per batch, rank by rank."""

    num_micro_batches: int
    num_pipelines: int
    ranks: tuple[RankRun, ...]


@dataclass(frozen=True, eq=False)
class Problem:
    """A request, frozen. L layers, V devices; times in ns, sizes in bytes.

    ``parameter_bytes``, ``trainable_bytes``, ``update_ns`` are prefix sums (L + 1,), and ``copied_bytes``: the part of
    the first that are copies of parameters, which every device makes for itself (None: nothing). ``forward_bytes`` and
    ``backward_bytes`` (L - 1,) are the bytes that one sample sends over the cut after each layer; ``cuttable`` (L -
    1,). ``codec``: whether plans may encode tensors; ``codec_speeds`` by device kind. ``encodable``: for each cut, the
    bytes and the number of one sample's tensors that the codec can encode. ``within``: the trainer that has to be able
    to express the plan. ``variants``: the model at the profile's degrees besides 1. ``choices``: the degrees and
    sharding that the request allows; empty if the request leaves them out. ``values``: the problem's values of the axes
    (``degrees.axes``). ``collectives``: the measured collectives, between GPUs; others take the time that
    ``costs.collectives`` computes.

    At a ``choice`` of degrees (``degrees.contract``) the devices are cells of the GPUs of ``real``, numbered as in
    ``cells``. Sizes are one GPU's, and bandwidths one channel's between cells; a row is a sample for each mesh of a
    cell. If all GPUs share out one stage (``Choice.in_one_stage``), they are one cell. ``copies``: the parameters that
    GPUs of a cell hold alike (None: nothing). ``step_collectives_ns``: prefix sums of the part of ``update_ns`` in
    which a cell sums gradients among its GPUs (None: nothing).

    ``update_workspace_bytes``: (L,) the bytes that an optimizer step needs of each layer only while it runs (None:
    nothing). ``update_in_turn``: several layers need the most of one, not the sum. ``results``: values computed from
    the problem (``per_problem``), for as long as it is kept.
    """

    layer_names: tuple[str, ...]
    parameter_bytes: np.ndarray
    trainable_bytes: np.ndarray
    update_ns: np.ndarray
    forward_bytes: np.ndarray
    backward_bytes: np.ndarray
    boundary_tensors: tuple[tuple[tuple[str, int, int], ...], ...]
    cuttable: np.ndarray
    shared_parameters: tuple[tuple[str, tuple[int, ...], int], ...]
    measured: dict[str, tuple[Measured, ...]]
    linear: bool
    kind_source: dict[str, tuple[str, float]]
    devices: tuple[Device, ...]
    network: Network
    global_batch_size: int
    micro_batch_sizes: tuple[int, ...]
    min_slice: int
    memory: MemoryRules
    rules: NetworkRules
    recompute: Literal["never", "auto", "always"]
    expected_error: float
    update_rules: frozenset[UpdateRule] = frozenset({"synchronous"})
    pins: tuple[Pin, ...] = ()
    seed: int = 0
    pipeline_run: PipelineRun | None = None
    codec: bool = False
    codec_speeds: dict[str, CodecSpeed] = field(default_factory=dict)
    encodable: tuple[tuple[int, int], ...] = ()
    within: Within | None = None
    collectives: tuple[MeasuredCollective, ...] = ()
    variants: tuple[Variant, ...] = ()
    choices: tuple[Choice, ...] = ()
    choice: Choice | None = None
    values: tuple[tuple[str, str], ...] = ()
    real: Problem | None = None
    cells: tuple[tuple[int, ...], ...] = ()
    copies: Copies | None = None
    step_collectives_ns: np.ndarray | None = None
    update_workspace_bytes: np.ndarray | None = None
    update_in_turn: bool = False
    copied_bytes: np.ndarray | None = None
    peak_ns: dict[str, float] = field(default_factory=dict)
    _costs: dict[tuple[str, int], Costs] = field(default_factory=dict, repr=False)
    results: dict[object, Any] = field(default_factory=dict, init=False, repr=False)

    def __getstate__(self) -> dict[str, object]:
        """Return the fields without the values computed from them (``per_problem``)."""
        return self.__dict__ | {"results": {}}

    @property
    def num_layers(self) -> int:
        """Return L, the number of layers."""
        return len(self.layer_names)

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks of layers that stages can be made of: the places to cut, and one."""
        return int(self.cuttable.sum()) + 1

    @property
    def sample_ns(self) -> np.ndarray:
        """Return prefix sums (L + 1,) of a sample's passes on the first kind of devices, to compare work."""
        return self.costs(self.devices[0].kind, 1).passes_ns

    @property
    def step_sums_ns(self) -> np.ndarray:
        """Return ``step_collectives_ns``, or zeros without them."""
        return 0 * self.update_ns if self.step_collectives_ns is None else self.step_collectives_ns

    @property
    def num_devices(self) -> int:
        """Return V, the number of devices."""
        return len(self.devices)

    def counted(self, number: int) -> str:
        """Return a number of devices in words: of cells where degrees were chosen, which planners take for devices."""
        return f"{number:,} {self.units(number)}"

    def units(self, number: int) -> str:
        """Return the noun for a number of devices: GPU groups where degrees were chosen."""
        return ("device" if self.choice is None else "GPU group") + ("" if number == 1 else "s")

    @property
    def owned_bytes(self) -> np.ndarray:
        """Return prefix sums (L + 1,) of the bytes that a GPU sums with other devices; it may keep their optimizer
        states.

        They are the trainable bytes, less the bytes that other GPUs of its cell sum and update for it.
        """
        return self.trainable_bytes if self.copies is None else self.copies.owned_bytes

    @property
    def degrees(self) -> Degrees:
        """Return the degrees of the choice; 1 each without one."""
        return Degrees() if self.choice is None else self.choice.degrees

    @property
    def samples_per_row(self) -> int:
        """Return the samples of a row: one for each mesh of a cell."""
        return 1 if self.real is None else len(self.cells[0]) // self.degrees.mesh

    @property
    def batch_samples(self) -> int:
        """Return the samples of a global batch, as requests and plans count them."""
        return self.global_batch_size * self.samples_per_row

    def peak_share(self, gpus: Sequence[Device], time_ns: int) -> float | None:
        """Return the part of the GPUs' peak that a global batch in ``time_ns`` uses (MFU); None where it is unknown."""
        if not all(gpu.kind in self.peak_ns for gpu in gpus):
            return None
        return self.batch_samples / time_ns / sum(1 / self.peak_ns[gpu.kind] for gpu in gpus)

    def costs(self, kind: str, rows: int) -> Costs:
        """Return the prefix sums for ``rows`` samples on a device kind, computed once; 0 rows cost nothing."""
        key = (kind, rows)
        if key not in self._costs:
            self._costs[key] = self._scaled(kind, rows)
        return self._costs[key]

    @cached_property
    def modules(self) -> Modules:
        """Return the modules that every measurement has separate costs for; empty at degrees of 1."""
        return modules_of(point.modules for points in self.measured.values() for point in points)

    @cached_property
    def module_sets(self) -> tuple[Modules, ...]:
        """Return the sets of modules that stages may recompute; empty unless recompute is auto.

        A set is left out if another frees at least as much in no more time, in every layer as measured; between
        measured sizes that holds but for rounding.
        """
        sizes = range(1, len(self.modules) + 1) if self.recompute == "auto" else ()
        sets = [each for size in sizes for each in combinations(self.modules, size) if each == without_parts(each)]
        points = [point for measurements in self.measured.values() for point in measurements]
        return undominated(sets, [(point.modules, point.stash_bytes) for point in points]) if sets else ()

    def gpus(self, device: int) -> tuple[Device, ...]:
        """Return the GPUs of a device: itself, or the GPUs of its cell."""
        return (self.devices[device],) if self.real is None else tuple(self.real.devices[g] for g in self.cells[device])

    def names(self, device: int) -> tuple[str, ...]:
        """Return the names of the GPUs of a device."""
        return tuple(gpu.name for gpu in self.gpus(device))

    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """Return the devices of each node."""
        groups: list[list[int]] = [[] for _ in self.network.node_names]
        for index, device in enumerate(self.devices):
            groups[device.node].append(index)
        return tuple(tuple(group) for group in groups)

    def capacity_bytes(self, device: int) -> int:
        """Return the usable bytes of a device: its memory less the headroom."""
        return self.devices[device].memory_bytes - self.memory.headroom_bytes

    def _scaled(self, kind: str, rows: int) -> Costs:
        source, speed = self.kind_source[kind]
        points = self.measured[source]
        sizes = [point.rows for point in points]

        def at_rows(points_of_sizes: list[np.ndarray], *, time: bool) -> np.ndarray:
            exact = _at_rows(sizes, points_of_sizes, rows, self.linear)
            return np.ceil(exact / speed).astype(np.int64) if time and speed != 1.0 else exact

        def sums(name: str) -> np.ndarray:
            exact = at_rows([getattr(point, name) for point in points], time=name.endswith("_ns"))
            values = exact if name == "workspace_bytes" else np.concatenate(([0], np.cumsum(exact)))
            values.setflags(write=False)
            return values

        modules = {
            module: (
                at_rows([point.modules[module][0] for point in points], time=True),
                -at_rows([-point.modules[module][1] for point in points], time=False),  # rounded down
            )
            for module in self.modules
        }
        return Costs(
            sums("forward_ns"),
            sums("backward_ns"),
            sums("weight_ns"),
            sums("stash_bytes"),
            sums("workspace_bytes"),
            modules,
        )


Values = ParamSpec("Values")
R = TypeVar("R")


def per_problem(function: Callable[Concatenate[Problem, Values], R]) -> Callable[Concatenate[Problem, Values], R]:
    """Keep the results of a function of a problem and hashable values, for as long as the problem itself is kept.

    A search over choices calls planners and bounds again and again for the same problems.
    """

    @wraps(function)
    def of(problem: Problem, /, *args: Values.args, **kwargs: Values.kwargs) -> R:
        key = function, args, tuple(kwargs.items())
        if key not in problem.results:
            problem.results[key] = function(problem, *args, **kwargs)
        return problem.results[key]  # type: ignore[no-any-return]

    return of


def _at_rows(sizes: list[int], points: list[np.ndarray], rows: int, linear: bool) -> np.ndarray:
    """Return each layer's value at ``rows`` samples, rounded up; (L,) int64. ``points``: values at measured ``sizes``.

    Linear scaling is proportional from the nearest measurement at or above ``rows`` (else the largest);
    measured scaling interpolates between neighbours, is clamped below the smallest and proportional above.
    """
    if rows == 0:
        return np.zeros_like(points[0])
    at = bisect_left(sizes, rows)
    if at < len(sizes) and sizes[at] == rows:
        return np.asarray(points[at])
    if linear or at == len(sizes):
        base = min(at, len(sizes) - 1)
        return _ceil_ratio(points[base], rows, sizes[base])
    if at == 0:
        return np.asarray(points[0])
    step = points[at] - points[at - 1]
    return np.asarray(points[at - 1] + _ceil_ratio(step, rows - sizes[at - 1], sizes[at] - sizes[at - 1]))


def _ceil_ratio(values: np.ndarray, numerator: int, denominator: int) -> np.ndarray:
    """Return ``ceil(values * numerator / denominator)`` without overflow: whole part and remainder are separate."""
    whole, rest = np.divmod(values, denominator)
    return np.asarray(whole * numerator - (-rest * numerator) // denominator)
