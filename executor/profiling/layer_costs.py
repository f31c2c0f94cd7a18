"""What each layer of a share costs other than its time: stash, workspace, weight half of its backward, update."""

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

    ``stash``: of every micro-batch; ``copied``: copies of weights in 16 bits, which autocast keeps for all of them.
    """

    stash: list[int]
    copied: list[int]


def kept_bytes(share: Share) -> Kept:
    """What the layers of a share keep. Of two forwards the second finds the copies that the first one has kept.

    Copies that it makes again are of its own, and a part of its stash.
    """
    storages = SavedStorages()
    for module in share.modules:
        storages.leave_out([*module.parameters(), *module.buffers()])
    made: list[int] = []
    if share.training.lowered:
        forget_casts()
    parameters = [each for module in share.modules for each in module.parameters()]
    first, second = (Copying(parameters, share.training.dtype) for _ in range(2))
    with first:
        share.forward(lambda index, results: made.append(first.copied_bytes))
    storages.leave_out(first.copies)
    kept: list[int] = []
    copied: list[int] = []
    with second, storages.counting() as total:

        def after(index: int, results: list[Tensor]) -> None:
            kept.append(total())
            copied.append(made[index] - second.copied_bytes)

        share.forward(after)
    return Kept(*([b - a for a, b in pairwise([0, *totals])] for totals in (kept, copied)))


def workspace_bytes(share: Share, stash: Sequence[int]) -> list[int]:
    """Bytes that each layer needs only while it runs: the most that it allocated, less what stays.

    After a forward stash and results stay; a backward gives back what it uses up, and leaves its inputs' gradients.
    """
    left = []
    with MemoryWatch(share.runtime) as watch:
        for i, (given, kept) in enumerate(zip(_inputs(share), stash, strict=True)):
            with watch.stretch(f"F{i}"):
                results = _run(share, i, dict(given))
            roots = [one for one in results if one.requires_grad]
            gradients = [torch.ones_like(root) for root in roots]
            with watch.stretch(f"B{i}"):
                if roots:
                    torch.autograd.backward(roots, gradients)
            arrived = [tensor.grad for tensor in given.values() if tensor.grad is not None]
            left.append((max(kept, held_bytes(results)), held_bytes(arrived)))
    return [
        max(0, watch.growth(f"F{i}").peak_bytes - forward, watch.growth(f"B{i}").peak_bytes - backward)
        for i, (forward, backward) in enumerate(left)
    ]


def weight_shares(share: Share, watch: Stopwatch) -> list[float]:
    """Which part of each layer's backward makes weight gradients: W / (I + W) of the two halves, medians.

    A layer whose backward cannot be halved, or that has no weights, gets 0.
    """
    halves = [SplitBackward([module]) for module in share.modules]
    shares: list[list[float]] = [[] for _ in share.modules]
    for _ in range(_SPLIT_ROUNDS):
        for i, given in enumerate(_inputs(share)):
            with halves[i].record() as recorded:
                results = _run(share, i, dict(given))
            roots = [one for one in results if one.requires_grad]
            if halves[i].units and roots:
                shares[i].append(_weight_share(recorded, roots, list(given.values()), watch))
    return [statistics.median(found) if found else 0.0 for found in shares]


def update_times_ns(share: Share, job: Job, watch: Stopwatch) -> list[int]:
    """One optimizer step over each layer's trainable parameters: the median of some; a tied one steps in its first."""
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
    """One step, and the copies of matrices that the next forward needs in ``dtype``."""
    optimizer.step()
    forget_casts()
    if dtype is not None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.dim() > 1:
                    parameter.detach().to(dtype)


class UpdateWorkspace(NamedTuple):
    """Bytes that a step of each layer needs only while it runs; whether of several layers the most, not the sum.

    ``in_turn`` is None where a share cannot tell, as most and sum are the same.
    """

    layers_bytes: list[int]
    in_turn: bool | None


def update_workspace(share: Share, job: Job) -> UpdateWorkspace:
    """What an optimizer step, not the first, allocates beyond what it leaves, over each layer and over the share."""
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
    """The workspace of all layers from that of their shares; in turn where one share saw that and none the contrary."""
    pairs = list(zip(shares, parts, strict=True))
    sizes = {first + k: size for (first, _last), part in pairs for k, size in enumerate(part.layers_bytes)}
    seen = {part.in_turn for part in parts}
    return UpdateWorkspace([sizes[layer] for layer in sorted(sizes)], True in seen and False not in seen)


def _stepped(share: Share) -> list[list[nn.Parameter]]:
    """The trainable parameters of each layer; a tied one in its first."""
    found, seen = [], set[int]()
    for module in share.modules:
        found.append([one for one in module.parameters() if one.requires_grad and id(one) not in seen])
        seen.update(map(id, found[-1]))
    return found


def _inputs(share: Share) -> list[dict[str, Tensor]]:
    """For each layer what it reads, as leaves; found by one run of the share."""
    env = {name: leaf(tensor) for name, tensor in share.env.items()}
    found = []
    for i in range(len(share.modules)):
        reads = share.chain.specs[share.first + i].reads
        wanted = {*reads, *share.chain.outputs} if share.ends_chain and i == len(share.modules) - 1 else set(reads)
        found.append({name: leaf(tensor) for name, tensor in env.items() if name in wanted})
        with torch.no_grad():
            _run(share, i, env)
    return found


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
