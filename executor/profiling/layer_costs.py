"""Each layer's costs besides its time: stash, workspace, weight half of its backward, and update."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.executor.profiling.memory_use import MemoryWatch, held_bytes
from penstock.executor.profiling.meta_cost import SavedStorages
from penstock.executor.profiling.numberless import Copying
from penstock.executor.profiling.share import Share, leaf
from penstock.executor.profiling.stopwatch import Stopwatch, times_ns
from penstock.executor.run.job import Job
from penstock.executor.stage.precision import forget_casts
from penstock.executor.stage.split_backward import Recorded, SplitBackward

_SPLIT_ROUNDS = 5
_UPDATE_ROUNDS = 5


class Kept(NamedTuple):
    """Bytes that each layer's forward keeps alive for its backward, each storage once.

    ``stash``: bytes of every micro-batch. ``copied``: copies of weights in 16 bits, which autocast keeps for all
    micro-batches together.
    """

    stash: list[int]
    copied: list[int]


def kept_bytes(share: Share) -> Kept:
    """Measure the bytes that a share's layers keep. Two forwards run; the second finds the first one's copies.

    Copies that the second forward makes again are not kept, and belong to its stash.
    """
    storages = SavedStorages()
    for module in share.modules:
        storages.leave_out([*module.parameters(), *module.buffers()])
    copied_so_far: list[int] = []
    if share.training.lowered:
        forget_casts()
    parameters = [each for module in share.modules for each in module.parameters()]
    first, second = (Copying(parameters, share.training.dtype) for _ in range(2))
    with first:
        share.forward(lambda index, results: copied_so_far.append(first.copied_bytes))
    storages.leave_out(first.copies)
    kept: list[int] = []
    copied: list[int] = []
    with second, storages.counting() as total:

        def after(index: int, results: list[Tensor]) -> None:
            kept.append(total())
            copied.append(copied_so_far[index] - second.copied_bytes)

        share.forward(after)
    return Kept(*([b - a for a, b in pairwise([0, *totals])] for totals in (kept, copied)))


def workspace_bytes(share: Share, stash: Sequence[int]) -> list[int]:
    """Measure the bytes that each layer needs only while it runs: the most that it allocated, less what stays.

    After a forward stash and results stay. A backward frees the stash, and leaves its inputs' gradients.
    """
    left = []
    with MemoryWatch(share.runtime) as watch:
        for i, (inputs, kept) in enumerate(zip(_inputs(share), stash, strict=True)):
            with watch.stretch(f"F{i}"):
                results = _run(share, i, dict(inputs))
            roots = [one for one in results if one.requires_grad]
            gradients = [torch.ones_like(root) for root in roots]
            with watch.stretch(f"B{i}"):
                if roots:
                    torch.autograd.backward(roots, gradients)
            arrived = [tensor.grad for tensor in inputs.values() if tensor.grad is not None]
            left.append((max(kept, held_bytes(results)), held_bytes(arrived)))
    return [
        max(0, watch.growth(f"F{i}").peak_bytes - forward, watch.growth(f"B{i}").peak_bytes - backward)
        for i, (forward, backward) in enumerate(left)
    ]


def weight_shares(share: Share, watch: Stopwatch) -> list[float]:
    """Measure the part of each layer's backward that makes weight gradients: medians of W / (I + W).

    A layer whose backward cannot be split, or that has no weights, gets 0.
    """
    halves = [SplitBackward([module]) for module in share.modules]
    shares: list[list[float]] = [[] for _ in share.modules]
    for _ in range(_SPLIT_ROUNDS):
        for i, inputs in enumerate(_inputs(share)):
            with halves[i].record() as recorded:
                results = _run(share, i, dict(inputs))
            roots = [one for one in results if one.requires_grad]
            if halves[i].units and roots:
                shares[i].append(_weight_share(recorded, roots, list(inputs.values()), watch))
    return [statistics.median(each) if each else 0.0 for each in shares]


def update_times_ns(share: Share, job: Job, watch: Stopwatch) -> list[int]:
    """Measure an optimizer step of each layer: medians, in ns. A tied parameter counts in its first layer."""
    times = []
    for parameters in _stepped(share):
        if not parameters:
            times.append(0)
            continue
        optimizer = job.optimizer(parameters)
        share.runtime.prepare(optimizer)
        update = partial(_update, optimizer, share.training.dtype)
        update()
        times.append(max(1, round(statistics.median(times_ns(watch, update, _UPDATE_ROUNDS)))))
    return times


def _update(optimizer: Optimizer, dtype: torch.dtype | None) -> None:
    """Step the optimizer, and make the copies of matrices that the next forward needs in ``dtype``."""
    optimizer.step()
    forget_casts()
    if dtype is not None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.dim() > 1:
                    parameter.detach().to(dtype)


class UpdateWorkspace(NamedTuple):
    """Bytes that a step of each layer needs only while it runs. Several layers need their maximum, or their sum.

    ``in_turn``: they need the maximum; None where a share cannot show it, because maximum and sum are equal.
    """

    layers_bytes: list[int]
    in_turn: bool | None


def update_workspace(share: Share, job: Job) -> UpdateWorkspace:
    """Measure the workspace of an optimizer step after the first, its peak less the rest, per layer and for all."""
    stepped = _stepped(share)
    everything = [one for parameters in stepped for one in parameters]
    with MemoryWatch(share.runtime) as watch:
        for number, parameters in enumerate([*stepped, everything]):
            if not parameters:
                continue
            optimizer = job.optimizer(parameters)
            share.runtime.prepare(optimizer)
            optimizer.step()
            with watch.stretch(f"U{number}"):
                optimizer.step()

    def needed(number: int, parameters: list[nn.Parameter]) -> int:
        growth = watch.growth(f"U{number}") if parameters else None
        return 0 if growth is None else max(0, growth.peak_bytes - max(0, growth.left_bytes))

    each = [needed(number, parameters) for number, parameters in enumerate(stepped)]
    most, total = max(each), sum(each)
    in_turn = None if most == total else 2 * needed(len(stepped), everything) < most + total
    return UpdateWorkspace(each, in_turn)


def joined(shares: Sequence[tuple[int, int]], parts: Sequence[UpdateWorkspace]) -> UpdateWorkspace:
    """Join the workspaces of all shares' layers; in turn if one share shows that and none shows the contrary."""
    pairs = list(zip(shares, parts, strict=True))
    sizes = {first + k: size for (first, _last), part in pairs for k, size in enumerate(part.layers_bytes)}
    seen = {part.in_turn for part in parts}
    return UpdateWorkspace([sizes[layer] for layer in sorted(sizes)], True in seen and False not in seen)


def _stepped(share: Share) -> list[list[nn.Parameter]]:
    """Return the trainable parameters of each layer; a tied parameter in its first layer."""
    trainable, seen = [], set[int]()
    for module in share.modules:
        trainable.append([one for one in module.parameters() if one.requires_grad and id(one) not in seen])
        seen.update(map(id, trainable[-1]))
    return trainable


def _inputs(share: Share) -> list[dict[str, Tensor]]:
    """Return the tensors that each layer reads, as leaves, by running the share once."""
    env = {name: leaf(tensor) for name, tensor in share.env.items()}
    inputs = []
    for i in range(len(share.modules)):
        reads = share.chain.specs[share.first + i].reads
        wanted = {*reads, *share.chain.outputs} if share.ends_chain and i == len(share.modules) - 1 else set(reads)
        inputs.append({name: leaf(tensor) for name, tensor in env.items() if name in wanted})
        with torch.no_grad():
            _run(share, i, env)
    return inputs


def _run(share: Share, i: int, env: dict[str, Tensor]) -> tuple[Tensor, ...]:
    with share.training.autocast(share.runtime.device) or nullcontext():
        return share.run_layer(i, env)


def _weight_share(recorded: Recorded, roots: list[Tensor], inputs: list[Tensor], watch: Stopwatch) -> float:
    gradients = [torch.ones_like(root) for root in roots]
    try:
        (of_input,) = times_ns(watch, lambda: recorded.backward_input(roots, gradients, inputs), 1)
        (of_weight,) = times_ns(watch, recorded.backward_weight, 1)
    except RuntimeError:
        return 0.0
    return of_weight / max(1, of_input + of_weight)
