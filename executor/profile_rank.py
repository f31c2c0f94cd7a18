"""One process of a measured profile: runs its share of the layers over and over, as a rank of a pipeline would.

Started by `penstock.executor.profiler` as ``python -m penstock.executor.profile_rank``; it reads lines of JSON on
standard input and answers on standard output. A pass is a forward of all its layers and one backward through them:
gradients accumulate in place, the first layer's inputs are leaves, and hooks on the tensors between the layers tell
when the backward of one layer ends and that of the next begins.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import select
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.executor.chain import Chain, derived_seed
from penstock.executor.job import Job, load_job
from penstock.executor.meta_cost import SavedStorages
from penstock.schemas.errors import ModelMismatch, PenstockError

MIN_PASSES = 8
WARM_UP_PASSES = 2
ENOUGH_STANDARD_ERROR = 0.01


class Mark(NamedTuple):
    """A moment: processor time of this thread on a CPU, an event on an accelerator."""

    busy_ns: int
    event: Any = None


class _Clock:
    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def mark(self) -> Mark:
        if not self._cuda:
            return Mark(time.thread_time_ns())
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record()
        return Mark(0, event)

    def between_ns(self, start: Mark, end: Mark) -> int:
        if not self._cuda:
            return end.busy_ns - start.busy_ns
        return round(float(start.event.elapsed_time(end.event)) * 1e6)

    def settle(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


@dataclass(slots=True)
class _Share:
    """The layers ``first`` to ``last`` and what they run on."""

    chain: Chain
    first: int
    last: int
    modules: list[nn.Module]
    env: dict[str, Tensor]
    targets: Any
    size: int

    @property
    def ends_chain(self) -> bool:
        return self.last == len(self.chain.specs) - 1

    def forward(self, after: Callable[[int, list[Tensor]], None]) -> tuple[list[Tensor], list[Tensor]]:
        """Run the layers; ``after`` is told each layer's results. The tensors to go back from, and the leaves."""
        env = {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in self.env.items()}
        leaves = [tensor for tensor in env.values() if tensor.requires_grad]
        for i, module in enumerate(self.modules):
            spec = self.chain.specs[self.first + i]
            try:
                results = self.chain.call(self.first + i, module, [env[name] for name in spec.reads])
            except ModelMismatch:
                raise
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                raise ModelMismatch(f"layer {spec.name!r} does not run at {self.size} samples: {why}") from error
            env.update(zip(spec.writes, results, strict=True))
            if self.ends_chain and i == len(self.modules) - 1:
                total, _ = self.chain.job.loss({name: env[name] for name in self.chain.outputs}, self.targets)
                results = (total,)
                env = {"": total}
            after(i, [tensor for tensor in results if tensor.requires_grad])
        crossing = ("",) if self.ends_chain else self.chain.cuts[self.last]
        return [env[name] for name in crossing if env[name].requires_grad], leaves


class _Pass(NamedTuple):
    forward_ns: list[int]
    backward_ns: list[int]


def measure_passes(share: _Share, clock: _Clock, wanted: Callable[[list[_Pass]], bool]) -> list[_Pass]:
    """Passes over the share until ``wanted`` says that they suffice."""
    roots, _ = share.forward(lambda index, results: None)
    gradients = [torch.ones_like(root) for root in roots]
    passes: list[_Pass] = []
    while wanted(passes):
        passes.append(_one_pass(share, clock, gradients))
    return passes


def _one_pass(share: _Share, clock: _Clock, gradients: list[Tensor]) -> _Pass:
    forward_marks = [clock.mark()]
    arrived: list[Mark | None] = [None] * len(share.modules)

    def after(index: int, results: list[Tensor]) -> None:
        def note(gradient: Tensor) -> None:
            arrived[index] = clock.mark()

        for tensor in results:
            tensor.register_hook(note)
        forward_marks.append(clock.mark())

    roots, leaves = share.forward(after)
    begin = clock.mark()
    if roots:
        torch.autograd.backward(roots, gradients)
    end = clock.mark()
    del leaves
    clock.settle()
    backward_ns = []
    stop = end
    for i, mark in enumerate(arrived):
        start = begin if i == len(arrived) - 1 else mark
        backward_ns.append(0 if start is None or not roots else max(0, clock.between_ns(start, stop)))
        stop = start or stop
    forward_ns = [clock.between_ns(a, b) for a, b in pairwise(forward_marks)]
    return _Pass(forward_ns, backward_ns)


def stash_bytes(share: _Share) -> list[int]:
    """Bytes that each layer's forward newly keeps alive for its backward, each storage once."""
    storages = SavedStorages()
    for module in share.modules:
        storages.leave_out([*module.parameters(), *module.buffers()])
    totals = []
    with storages.counting() as kept:
        share.forward(lambda index, results: totals.append(kept()))
    return [b - a for a, b in pairwise([0, *totals])]


def update_times_ns(share: _Share, job: Job, clock: _Clock) -> list[int]:
    """One optimizer step over each layer's parameters: the median of five."""
    times = []
    for module in share.modules:
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if not parameters:
            times.append(0)
            continue
        optimizer = job.optimizer(parameters)
        optimizer.step()
        taken = []
        for _ in range(5):
            start = clock.mark()
            optimizer.step()
            end = clock.mark()
            clock.settle()
            taken.append(clock.between_ns(start, end))
        times.append(max(1, round(statistics.median(taken))))
    return times


def make_share(job: Job, first: int, last: int, size: int, device: torch.device) -> _Share:
    """The layers on the device, with gradients to accumulate into, and tensors of the right shapes to run on."""
    chain = Chain(job)
    modules = [chain.build_layer(i, device=device) for i in range(first, last + 1)]
    for module in modules:
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
    inputs, targets = job.batch(0, range(size))
    env = {name: tensor.to(device) for name, tensor in inputs.items()}
    if first:
        generator = torch.Generator().manual_seed(derived_seed(job.seed, "profile", first))
        for name, shape in chain.infer_shapes(range(size))[first - 1].items():
            whole = (size, *shape.sample_shape)
            drawn = torch.randn(whole, generator=generator) if shape.dtype.is_floating_point else torch.zeros(whole)
            env[name] = drawn.to(device=device, dtype=shape.dtype).requires_grad_(shape.needs_grad)
    moved = torch.utils._pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, targets)
    return _Share(chain, first, last, modules, env, moved, size)


def _stable(passes: list[_Pass]) -> bool:
    if len(passes) < MIN_PASSES:
        return False
    totals = [sum(one.forward_ns) + sum(one.backward_ns) for one in passes]
    mean = statistics.fmean(totals)
    return mean == 0 or statistics.stdev(totals) / mean / len(totals) ** 0.5 < ENOUGH_STANDARD_ERROR


def _serve(orders: IO[bytes], answer: Callable[[dict[str, Any]], None]) -> None:
    told = json.loads(orders.readline())
    job: Job = (
        load_job(told["reference"], told["directory"])
        if told["reference"]
        else pickle.loads(base64.b64decode(told["pickled"]))
    )
    device = torch.device(told["device"])
    clock = _Clock(device)
    for size in told["sizes"]:
        share = make_share(job, told["first"], told["last"], size, device)
        stash = stash_bytes(share)
        warm = measure_passes(share, clock, lambda passes: len(passes) < WARM_UP_PASSES)
        answer({"ready": size, "warm_up_passes": len(warm)})
        orders.readline()
        start_wall, start_busy = time.perf_counter_ns(), time.thread_time_ns()
        limit_ns = start_wall + round(told["seconds"] * 1e9)
        passes = measure_passes(
            share,
            clock,
            lambda passes, limit_ns=limit_ns: (  # type: ignore[misc]
                len(passes) < 2 or not (_stable(passes) or time.perf_counter_ns() > limit_ns)
            ),
        )
        wall, busy = time.perf_counter_ns() - start_wall, time.thread_time_ns() - start_busy
        answer(
            {
                "size": size,
                "forward_ns": _medians([one.forward_ns for one in passes]),
                "backward_ns": _medians([one.backward_ns for one in passes]),
                "stash_bytes": stash,
                "update_ns": update_times_ns(share, job, clock),
                "wall_ns": wall,
                "busy_ns": busy,
                "passes": len(passes),
            }
        )
        measure_passes(share, clock, lambda passes: not select.select([orders], [], [], 0)[0])
        orders.readline()


def _medians(rows: list[list[int]]) -> list[int]:
    return [round(statistics.median(column)) for column in zip(*rows, strict=True)]


def main() -> None:
    """Serve the profiler on standard input and output; what user code prints goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(1)

    def answer(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        with os.fdopen(0, "rb", buffering=0) as orders:
            _serve(orders, answer)
    except PenstockError as error:
        answer({"error": type(error).__name__, "detail": error.detail, "remedy": error.remedy})
        sys.exit(1)


if __name__ == "__main__":
    main()
