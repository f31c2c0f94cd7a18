"""A rank that trains by any rule and keeps everything: weights before each update, versions, messages, buffers."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from slow_link import SlowLink, SlowTransport, slow_all_reduces
from torch.utils._pytree import tree_map_only

from penstock.executor.program.interpreter import Interpreter
from penstock.executor.run.chain import Chain
from penstock.executor.run.job import load_job
from penstock.executor.stage.held_stage import HeldStage
from penstock.executor.transport import GlooTransport, connect, process_groups
from penstock.schemas.program import Program


class Counting(GlooTransport):
    """Counts messages by peer."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[int] = Counter()

    def send(self, tensor: torch.Tensor, peer: int, tag: int, size_bytes: int) -> None:
        self.sent[peer] += 1
        super().send(tensor, peer, tag, size_bytes)


class Recorder:
    """A record of a run, by stage: all newest weights and gradients, before each update and at the end."""

    def __init__(self) -> None:
        self.weights: dict[int, list[dict[str, torch.Tensor]]] = {}
        self.gradients: dict[int, list[dict[str, torch.Tensor]]] = {}
        self.losses: list[tuple[int, float, int]] = []

    def before_step(self, stage: HeldStage) -> None:
        self.gradients.setdefault(stage.entry.stage, []).append({n: g.clone() for n, g in stage.named_gradients()})
        self.keep(stage)

    def keep(self, stage: HeldStage) -> None:
        weights = {name: p.detach().clone() for name, p in stage.parameters.items()}
        self.weights.setdefault(stage.entry.stage, []).append(weights)


def run(assignment: Mapping[str, Any]) -> None:
    """Run ``programs`` in the order ``uses``; the record goes to the file ``record``."""
    programs = [Program.from_json(one) for one in assignment["programs"]]
    chain = Chain(load_job(assignment["job"], assignment["directory"]))
    shapes = chain.infer_shapes(range(2))
    connect(
        assignment["store"],
        prefix=assignment["prefix"],
        rank=programs[0].rank,
        world_size=programs[0].world_size,
    )
    link = SlowLink(assignment["bytes_per_s"]) if "bytes_per_s" in assignment else None
    transport = Counting() if link is None else SlowTransport(link)
    groups = process_groups(programs[0].groups)
    interpreter = Interpreter(programs, chain, shapes, seed=assignment["seed"], transport=transport, groups=groups)
    interpreter.agree()
    buffers = watch_buffers(interpreter)
    recorder = Recorder()
    interpreter.actions.before_step = recorder.before_step
    with nullcontext() if link is None else slow_all_reduces(link):
        _train(interpreter, assignment["uses"], recorder)
    messages = dict(transport.sent) if isinstance(transport, Counting) else {}
    evaluation = interpreter.evaluate(range(chain.job.num_evaluation_batches)).loss  # type: ignore[attr-defined]
    for stage in interpreter.stages.values():
        recorder.keep(stage)
    references = {}
    for stage in interpreter.stages.values():
        names = {id(parameter): name for name, parameter in stage.parameters.items()}
        for parameter, value in stage.averaging.reference() if stage.averaging is not None else ():
            references[names[id(parameter)]] = value
    record = {
        "weights": recorder.weights,
        "gradients": recorder.gradients,
        "losses": recorder.losses,
        "evaluation": evaluation,
        "references": references,
        "messages": messages,
        "expected_count": interpreter.expected_count,
        "peak_versions": {s: h.versions.peak if h.versions else 1 for s, h in interpreter.stages.items()},
        "peak_buffers": buffers,
        "sent": None if link is None else link.bytes_sent,
    }
    with open(assignment["record"], "wb") as file:  # arrays, since torch.save takes as long as the training
        pickle.dump(tree_map_only(torch.Tensor, torch.Tensor.numpy, record), file)
    dist.barrier()
    transport.close()


def _train(interpreter: Interpreter, uses: Sequence[int], recorder: Recorder) -> None:
    """Run programs in this order, and keep their losses."""
    step = 0
    for use in uses:
        interpreter.use(use)
        if interpreter.program.batches == 1:
            result = interpreter.step(step)
            recorder.losses.append((step, result.loss, result.count))
            step += 1
        else:
            interpreter.run(step, lambda at, result, _: recorder.losses.append((at, result.loss, result.count)))
            step += interpreter.program.batches


def watch_buffers(interpreter: Interpreter) -> dict[str, int]:
    """Count the most micro-batches with receive buffers at once, by direction."""
    peak = {"inputs": 0, "gradients": 0}
    actions = interpreter.actions
    for field, receive in (("inputs", "receive_forward"), ("gradients", "receive_backward")):
        for bound in interpreter._bound:
            for code in bound.segments:
                for k, (function, arguments) in enumerate(code.calls):
                    if function == getattr(actions, receive):

                        def counted(
                            *tensors: Any, _do: Any = function, _field: str = field, _bound: Any = bound
                        ) -> None:
                            _do(*tensors)
                            buffers = sum(getattr(cell, _field) is not None for cell in _bound.cells.values())
                            peak[_field] = max(peak[_field], buffers)

                        code.calls[k] = counted, arguments
    return peak
