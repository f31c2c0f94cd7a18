"""A comparison of a run's first steps with the same job trained by one process (``reference``), for any update rule.

The reference draws the same random states and takes the same micro-batches in ascending order. The comparison covers
the mean losses of the first global batches and the gradients of every stage's first updates, which depend on all
weights and versions before them. A layer that draws random numbers, and whose replicas split each micro-batch, runs
slice by slice, as each replica draws for its rows. Every other layer runs on whole micro-batches, so a layer that mixes
samples (batch normalisation) is detected.

The reference runs on rank 0's device, with the same kernels. Where the whole model does not fit there beside the rank's
stage, it runs on the CPU, whose kernels add in other orders. The tolerance is wider then, and layers that draw random
numbers cannot be compared, because a CPU draws other numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.executor.program.interpreter import Interpreter
from penstock.executor.run.chain import Chain
from penstock.executor.run.plain_training import Recipe, ReferenceTrainer, Slices
from penstock.executor.runtime.cpu import CPU
from penstock.executor.runtime.interface import Runtime
from penstock.executor.stage.held_stage import HeldStage
from penstock.executor.transport import wait_for_all
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.program import Program, RankStage

if TYPE_CHECKING:
    from penstock.executor.divided.division import Piece
    from penstock.executor.divided.inventory import Inventory
    from penstock.executor.stage.sharded_parameters import RowPiece

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
"""Largest difference as a fraction of the largest gradient; other data types: 64 times their machine epsilon."""

ON_GPUS = 10
"""Factor of the tolerance on GPUs, whose kernels add in another order for another number of rows."""

ACROSS = 100
"""Factor of the tolerance where GPUs are compared with a CPU."""

AFTER_AN_UPDATE = 10
"""Factor of the tolerance from the second update on where ranks share layers, which add in other orders.

AdamW divides gradients by their size, so a weight moves by the same amount if its gradient is only rounding.
"""

_COPIES = 9
"""Memory of the reference in multiples of the model's parameters.

Its model, the newest weights, two versions, two copies of gradients, two of Adam's states, and one for the activations
of a micro-batch.
"""

CHECKED_STEPS = 3
"""Number of steps, and of updates of each stage, that are compared."""

_Key = tuple[int, int, str]
"""A gradient: (number of the update, pipeline, full name of the parameter)."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The difference between a run and one process, relative to the largest gradient and to the loss."""

    difference: float
    tolerance: float
    loss_difference: float


class Check:
    """A recorder of a rank's gradients of the first updates, which compares them when the run is over.

    ``inventory``: the collectives of these steps; None where they are not predicted.
    """

    def __init__(self, interpreter: Interpreter, store: Any, inventory: Inventory | None = None) -> None:
        self._interpreter = interpreter
        self.inventory = inventory
        self._store = store
        self._kept: dict[_Key, Tensor] = {}
        self._pieces: dict[str, Piece | RowPiece] = {}
        self._seen: Counter[int] = Counter()
        # Steps in fp16 may be skipped until the loss scale fits: then only the first loss can be compared.
        self.steps = 1 if interpreter.training.precision == "fp16" else CHECKED_STEPS

    def keep(self, stage: HeldStage) -> None:
        """Copy a stage's gradients just before the optimizer uses them."""
        number = self._seen[stage.entry.stage]
        if number < self.steps and self._interpreter.training.precision != "fp16":
            self._seen[stage.entry.stage] += 1
            self._pieces |= stage.parts.pieces
            for name, gradient in stage.named_gradients():
                self._kept[number, self._interpreter.source.lane, name] = gradient.detach().to("cpu", copy=True)

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Compare the collectives of a checked step, which runs within this context, with the prediction."""
        if self.inventory is None or step >= self.steps:
            yield
            return
        with self.inventory:
            yield
        self.inventory.end_step(step)

    def compare(self, losses: Sequence[float]) -> CheckReport:
        """Compare with the reference; ``losses`` are the losses of the steps from 0 on. Collective.

        Rank 0 computes the reference, and the others wait without a limit. It is sent parameter by parameter.
        """
        interpreter, chain = self._interpreter, self._interpreter.chain
        program = interpreter.programs[0]
        steps = min(self.steps, len(losses))
        if program.update_rule == "weight_stashing":  # versions come from this program, which may have fewer batches
            steps = min(steps, program.batches)
        fits = _fits(interpreter)
        reference = _Reference(interpreter, _gathered(program), steps, interpreter.runtime if fits else CPU)
        if dist.get_rank() == 0:
            reference.train()
        wait_for_all(self._store, "reference", program.world_size)
        first, later, largest = 0.0, 0.0, 0.0
        for key, gradient in reference.broadcast(chain):
            largest = max(largest, _peak(gradient))
            if key in self._kept:
                piece = self._pieces.get(key[-1])
                expected = gradient if piece is None else piece.of(gradient)
                difference = _peak(self._kept[key] - expected)
                first, later = (max(first, difference), later) if key[0] == 0 else (first, max(later, difference))
        wanted = torch.tensor(reference.losses or [0.0] * steps, dtype=torch.float64)
        dist.broadcast(wanted, src=0)
        apart = (torch.tensor(losses[:steps], dtype=torch.float64) - wanted).abs()
        relative = apart / wanted.abs().clamp(min=torch.finfo(torch.float64).tiny)
        first, later, tolerance = _largest(first), _largest(later), _tolerance(interpreter, fits)
        difference, allowed = worse(first, later, tolerance, shares=program.mesh is not None)
        return CheckReport(difference / largest if largest > 0 else difference, allowed, float(relative.max()))


@dataclass(frozen=True, slots=True)
class _Whole:
    """The parts of all ranks' programs that the reference needs."""

    recipe: Recipe
    versions: dict[tuple[int, int], int]
    slices: Slices


class _Reference:
    """The plain trainer's first losses and gradients, which rank 0 computes and sends to all ranks."""

    def __init__(self, interpreter: Interpreter, whole: _Whole, steps: int, runtime: Runtime) -> None:
        self.interpreter = interpreter
        self.runtime = runtime
        self.whole = whole
        self.steps = steps
        self.losses: list[float] = []
        self.gradients: dict[_Key, Tensor] = {}

    def train(self) -> None:
        """Train the compared steps."""
        whole, interpreter = self.whole, self.interpreter
        counted = whole.recipe.update_rule == "weight_stashing"
        trainer = ReferenceTrainer(
            interpreter.chain,
            whole.recipe,
            seed=interpreter.seed,
            expected_count=interpreter.expected_count,
            versions=(lambda stage, m: whole.versions[stage, m]) if counted else None,
            slices=whole.slices,
            on_update=self._keep,
            training=interpreter.training,
            runtime=self.runtime,
        )
        self.losses = [trainer.train(step) for step in range(self.steps)]
        drawing = sorted(set().union(*(model.drawing for model in trainer.models)))
        if drawing and self.runtime.device.type != interpreter.runtime.device.type:
            raise UnsupportedRequest(
                f"the whole model does not fit on rank 0's GPU besides its stage, and layer {drawing[0]!r} draws other "
                "random numbers on the CPU",
                remedy="check with a smaller model, or without dropout",
            )

    def _keep(self, stage: int, number: int, gradients: dict[str, Tensor]) -> None:
        lane = stage // len(self.whole.recipe.stages)
        if number < self.steps:
            self.gradients |= {(number, lane, name): gradient for name, gradient in gradients.items()}

    def broadcast(self, chain: Chain) -> Iterator[tuple[_Key, Tensor]]:
        """Yield the gradients on every rank, one after the other; each is freed afterwards.

        A stage whose update takes several global batches has fewer updates in the same number of steps.
        """
        modules = chain.build_layers(range(len(chain.specs)), device="meta")
        parameters = dict(chain.named_parameters(modules))
        keys: list[Any] = [sorted(self.gradients)]
        dist.broadcast_object_list(keys, src=0)
        for key in keys[0]:
            gradient = self.gradients.pop(key, None)
            if gradient is None:
                gradient = torch.empty_like(parameters[key[-1]], device="cpu")
            gradient = gradient.cpu().contiguous()
            dist.broadcast(gradient, src=0)
            yield key, gradient


def counted_versions(programs: Sequence[Program]) -> dict[tuple[int, int], int]:
    """Return the version of a stage's weights that each micro-batch uses, by (stage, micro-batch)."""
    versions: dict[tuple[int, int], int] = {}
    for program in programs:
        updates: Counter[int] = Counter()
        delay: Counter[int] = Counter()
        for one in program.instructions():
            if one.kind == "STEP":
                updates[one.stage] += 1
            elif one.kind == "VERSION":
                delay[one.stage] = one.micro_batch
            elif one.kind == "F":
                versions[one.stage, one.micro_batch] = max(0, updates[one.stage] - delay[one.stage])
    return versions


def _gathered(program: Program) -> _Whole:
    """Gather stages, versions and slices from the programs of all ranks; collective."""
    versions = counted_versions([program]) if program.update_rule == "weight_stashing" else {}
    everyone: list[Any] = [None] * program.world_size
    dist.all_gather_object(everyone, (program.stages, versions))
    entries = {one.stage: one for stages, _ in everyone for one in stages}
    line = [one for _, one in sorted(entries.items()) if one.pipeline == 0]
    recipe = Recipe(
        program.update_rule,
        tuple((one.first, one.last) for one in line),
        program.row_classes,
        tuple(one.update_every for one in line) if versions else None,
        pipelines=program.pipelines if program.update_rule == "elastic_averaging" else 1,
        staleness=program.staleness,
    )
    merged = {key: version for _, local in everyone for key, version in local.items()}
    meshes = 1 if program.mesh is None else program.mesh.meshes
    return _Whole(recipe, merged, _slices([one for stages, _ in everyone for one in stages], meshes))


def _slices(stages: Sequence[RankStage], meshes: int) -> Slices:
    """Return the rows of a micro-batch for which each rank draws; the ranks of a mesh have the same rows."""
    slices: Slices = {}
    shared = [one for one in stages if meshes > 1 or (len(one.ranks) > 1 and one.dispatch == "rows")]
    distinct = {(one.stage, one.rows): one for one in shared}
    for one in sorted(distinct.values(), key=lambda entry: (entry.stage, entry.rows)):
        for i in range(one.first, one.last + 1):
            previous = slices.get(i, tuple(() for _ in one.rows))
            slices[i] = tuple((*before, rows) for before, rows in zip(previous, one.rows, strict=True))
    return slices


def _fits(interpreter: Interpreter) -> bool:
    """Return whether the reference fits on rank 0's device; collective. On a CPU it is assumed to fit."""
    runtime, chain = interpreter.runtime, interpreter.chain
    modules = chain.build_layers(range(len(chain.specs)), device="meta")
    needed = _COPIES * sum(parameter.nbytes for _, parameter in chain.named_parameters(modules))
    fits = [runtime.gpu is None or needed <= runtime.memory.free_bytes()]
    dist.broadcast_object_list(fits, src=0)
    return fits[0]


def _tolerance(interpreter: Interpreter, fits: bool) -> float:
    """Return the tolerance of the least precise numbers of the computation."""
    chain = interpreter.chain
    layers = (chain.build_layer(i, device="meta") for i in range(len(chain.specs)))
    dtypes = {parameter.dtype for layer in layers for parameter in layer.parameters() if parameter.requires_grad}
    if interpreter.training.dtype is not None:
        dtypes.add(interpreter.training.dtype)
    wider = 1 if interpreter.runtime.gpu is None else ON_GPUS if fits else ACROSS
    if interpreter.training.precision == "tf32":
        return _TF32
    return wider * max((TOLERANCE.get(dtype, 64 * torch.finfo(dtype).eps) for dtype in dtypes), default=0.0)


def worse(first: float, later: float, tolerance: float, *, shares: bool) -> tuple[float, float]:
    """Return the difference, of first or later updates, that is closer to its tolerance, with that tolerance.

    ``shares``: ranks share layers.
    """
    wider = AFTER_AN_UPDATE if shares else 1
    return (first, tolerance) if first * wider >= later else (later, wider * tolerance)


_TF32 = 64 * 2.0**-11
"""Tolerance in TF32, as for other types: 64 times its machine epsilon, 2^-11."""


def _peak(tensor: Tensor) -> float:
    """Return the largest absolute value; infinity if an element is NaN."""
    peak = float(tensor.detach().abs().max()) if tensor.numel() else 0.0
    return peak if peak == peak else float("inf")


def _largest(value: float) -> float:
    values = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values.item()
