"""Compares a run's first step with the same job trained unsplit by one process.

The reference draws the same random states and takes the same micro-batches in ascending order. A layer that draws
random numbers and whose replicas share micro-batches by rows is run slice by slice, as each replica draws for its own
rows; every other layer sees whole micro-batches, so a layer that mixes samples (batch normalisation) shows up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.executor.chain import Chain
from penstock.executor.held_stage import HeldStage
from penstock.executor.interpreter import Interpreter, first_row
from penstock.executor.stage_module import back_loss, layer_seed, step_seed
from penstock.executor.transport import wait_for_all
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.program import Program

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
"""Largest difference in parts of the largest gradient; other data types: 64 times their machine epsilon."""


Slices = dict[int, tuple[tuple[tuple[int, int], ...], ...]]
"""For layers whose replicas share by rows: per row class the [low, high) of each replica."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """How far a run is from one process, in parts of the largest gradient and of the loss."""

    difference: float
    tolerance: float
    loss_difference: float


@dataclass(frozen=True, slots=True)
class Reference:
    """What one process computes in a step: the mean loss, and gradients by full name."""

    loss: float
    gradients: dict[str, Tensor]


def reference_step(
    chain: Chain, program: Program, *, seed: int, step: int, expected_count: float, slices: Slices | None = None
) -> Reference:
    """Train one step unsplit from the initial parameters; ``program`` says what the micro-batches are."""
    modules = [chain.build_layer(i, seed).train() for i in range(len(chain.specs))]
    total, count, key = 0.0, 0, step_seed(seed, step)
    for micro_batch in range(program.num_micro_batches):
        start, cls = first_row(program, micro_batch), program.row_class(micro_batch)
        rows = range(start, start + program.row_classes[cls][0])
        env, targets = chain.job.batch(step, rows)
        env = dict(env)
        for i, module in enumerate(modules):
            spec = chain.specs[i]
            parts = (slices[i][cls] if slices and i in slices else None) or ((0, len(rows)),)
            seeds = [layer_seed(seed, micro_batch, spec.name, low) + key for low, _ in parts]
            results = _run(chain, i, module, [env[name] for name in spec.reads], parts, seeds)
            env.update(zip(spec.writes, results, strict=True))
        loss, terms = chain.job.loss({name: env[name] for name in chain.outputs}, targets)
        back_loss(loss, expected_count)
        total += float(loss.detach().double())
        count += terms
    if count <= 0:
        raise InvalidDocument(f"the loss of step {step} has {count} terms; its mean is undefined")
    return Reference(total / count, _gradients(chain, modules, expected_count / count))


def _run(
    chain: Chain,
    index: int,
    module: nn.Module,
    arguments: Sequence[Tensor],
    parts: Sequence[tuple[int, int]],
    seeds: Sequence[int],
) -> Sequence[Tensor]:
    """A layer over a whole micro-batch; by slices if it turns out to draw random numbers and has several."""
    generator = torch.default_generator
    generator.manual_seed(seeds[0])
    before = generator.get_state()
    results = chain.call(index, module, arguments)
    if len(parts) == 1 or torch.equal(before, generator.get_state()):
        return results
    pieces = []
    for (low, high), seed in zip(parts, seeds, strict=True):
        generator.manual_seed(seed)
        pieces.append(chain.call(index, module, [tensor[low:high] for tensor in arguments]))
    return [torch.cat(column) for column in zip(*pieces, strict=True)]


def _gradients(chain: Chain, modules: Sequence[nn.Module], correction: float) -> dict[str, Tensor]:
    gradients: dict[str, Tensor] = {}
    for spec, module in zip(chain.specs, modules, strict=True):
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
                gradients[f"{spec.name}.{name}"] = gradient if correction == 1.0 else gradient.mul_(correction)
    return gradients


class Check:
    """Keeps a rank's gradients of the first step, and compares them when the run is over."""

    def __init__(self, interpreter: Interpreter, store: Any) -> None:
        self._interpreter = interpreter
        self._store = store
        self._kept: dict[str, Tensor] = {}

    def keep(self, stage: HeldStage) -> None:
        """Copy a stage's gradients, just before the optimizer uses them."""
        for name, parameter in stage.module.named_parameters():
            if parameter.requires_grad:
                gradient = parameter.grad
                self._kept[name] = torch.zeros_like(parameter) if gradient is None else gradient.detach().clone()

    def compare(self, step: int, loss: float) -> CheckReport:
        """Compare with the reference of ``step``, whose mean loss was ``loss``; collective, the same on every rank.

        Rank 0 computes the reference, the others wait as long as it takes; it is sent parameter by parameter.
        """
        interpreter, chain = self._interpreter, self._interpreter.chain
        slices = _gather_slices(interpreter.program)
        reference = None
        if dist.get_rank() == 0:
            reference = reference_step(
                chain,
                interpreter.program,
                seed=interpreter.seed,
                step=step,
                expected_count=interpreter.expected_count,
                slices=slices,
            )
        wait_for_all(self._store, "reference", interpreter.program.world_size)
        difference, largest = 0.0, 0.0
        for name, gradient in _broadcast(chain, reference):
            largest = max(largest, _peak(gradient))
            if name in self._kept:
                difference = max(difference, _peak(self._kept[name] - gradient))
        numbers = torch.tensor([reference.loss if reference else 0.0], dtype=torch.float64)
        dist.broadcast(numbers, src=0)
        difference = _largest(difference)
        return CheckReport(
            difference / largest if largest > 0 else difference,
            _tolerance(chain),
            abs(loss - numbers.item()) / max(abs(numbers.item()), torch.finfo(torch.float64).tiny),
        )


def _gather_slices(program: Program) -> Slices:
    mine = [
        (one.first, one.last, one.replica, one.rows)
        for one in program.stages
        if len(one.ranks) > 1 and one.dispatch == "rows"
    ]
    everyone: list[Any] = [None] * program.world_size
    dist.all_gather_object(everyone, mine)
    slices: Slices = {}
    for first, last, _, rows in sorted(
        (entry for entries in everyone for entry in entries), key=lambda e: (e[0], e[2])
    ):
        for i in range(first, last + 1):
            held = slices.get(i, tuple(() for _ in rows))
            slices[i] = tuple((*before, own) for before, own in zip(held, rows, strict=True))
    return slices


def _broadcast(chain: Chain, reference: Reference | None) -> Iterator[tuple[str, Tensor]]:
    """The reference's gradients on every rank, one after the other."""
    for i, spec in enumerate(chain.specs):
        for name, parameter in chain.build_layer(i, device="meta").named_parameters():
            if parameter.requires_grad:
                full = f"{spec.name}.{name}"
                gradient = reference.gradients.pop(full) if reference else torch.empty_like(parameter, device="cpu")
                gradient = gradient.contiguous()
                dist.broadcast(gradient, src=0)
                yield full, gradient


def _tolerance(chain: Chain) -> float:
    """That of the least precise parameters."""
    layers = (chain.build_layer(i, device="meta") for i in range(len(chain.specs)))
    dtypes = {parameter.dtype for layer in layers for parameter in layer.parameters() if parameter.requires_grad}
    return max((TOLERANCE.get(dtype, 64 * torch.finfo(dtype).eps) for dtype in dtypes), default=0.0)


def _peak(tensor: Tensor) -> float:
    """The largest absolute value; infinity when there is one that is not a number."""
    peak = float(tensor.detach().abs().max()) if tensor.numel() else 0.0
    return peak if peak == peak else float("inf")


def _largest(value: float) -> float:
    values = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values.item()
