"""Cost of a stage's operations: computation, recomputation, conversion and updates (ALGORITHMS 1.4, 1.8).

Times are in ns and sizes in bytes; a stage on devices of several kinds is as slow and as large as on its slowest kind.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.solvers.costs.transfer import transfer_ns
from penstock.solvers.model.allocation import Stage
from penstock.solvers.model.micro_batches import largest_slice
from penstock.solvers.model.problem import Problem

Places = int | np.ndarray
"""Numbers of layers, one or several."""


class StageCosts(NamedTuple):
    """Costs of one micro-batch on a stage's slowest replica: times in ns, bytes kept from F to B, workspace.

    ``recompute_ns`` is spent in the backward if recomputation is no separate operation, and ``workspace_bytes``
    includes the bytes rebuilt at once: a segment, or the recomputed modules of one layer. ``kept_bytes`` includes the
    input of each recomputed segment, except a stage's own input where that counts as a receive buffer. An input is a
    whole cut: profiles do not tell whether two cuts carry the same tensor.
    """

    forward_ns: int
    backward_ns: int
    weight_ns: int
    recompute_ns: int
    kept_bytes: int
    workspace_bytes: int

    @property
    def passes_ns(self) -> int:
        """Return the time of forward and backward together, recomputation included."""
        return self.forward_ns + self.backward_ns + self.recompute_ns

    def durations_ns(self, *, apart: bool = False) -> tuple[int, int, int, int, int]:
        """Return the durations of F, B, I, W and R; ``apart``: recomputation is a separate operation."""
        backward = self.backward_ns + (0 if apart else self.recompute_ns)
        return self.forward_ns, backward, backward - self.weight_ns, self.weight_ns, self.recompute_ns


def stage_rows(stage: Stage, rows: int) -> int:
    """Return the number of rows that the busiest replica computes of a micro-batch of ``rows``."""
    return rows if stage.dispatch == "round_robin" else largest_slice(rows, stage.replicas)


@lru_cache(maxsize=8192)
def stage_costs(problem: Problem, stage: Stage, rows: int) -> StageCosts:
    """Return the costs of a micro-batch of ``rows`` samples on the stage's slowest device (its largest slice)."""
    share = stage_rows(stage, rows)
    kinds = {problem.devices[d].kind for d in stage.devices}
    each = [slice_costs(problem, stage, kind, share) for kind in kinds]
    return each[0] if len(each) == 1 else StageCosts(*(max(column) for column in zip(*each, strict=True)))


def slice_costs(problem: Problem, stage: Stage, kind: str, rows: int) -> StageCosts:
    """Return the costs of ``rows`` samples on one device of a kind."""
    costs = problem.costs(kind, rows)
    coding = conversion_ns(problem, stage, kind, rows)
    i, j = stage.first, stage.last + 1
    kept = int(costs.stash_bytes[j] - costs.stash_bytes[i])
    workspace = int(costs.workspace_bytes[i:j].max())
    again, rebuilt = 0, 0
    for first, last in stage.recompute:
        part = int(costs.stash_bytes[last + 1] - costs.stash_bytes[first])
        again += int(costs.forward_ns[last + 1] - costs.forward_ns[first])
        kept -= part
        if first > i or not problem.memory.count_buffers:
            kept += input_bytes(problem, first, rows)
        rebuilt = max(rebuilt, part)
    if stage.modules:
        modules = costs.again(stage.modules)
        again += int(modules.recompute_ns[j] - modules.recompute_ns[i])
        kept -= int(modules.freed_bytes[j] - modules.freed_bytes[i])
        rebuilt = max(rebuilt, int(modules.rebuilt_bytes[i:j].max()))
    return StageCosts(
        int(costs.forward_ns[j] - costs.forward_ns[i]) + coding[0],
        int(costs.backward_ns[j] - costs.backward_ns[i]) + coding[1],
        int(costs.weight_ns[j] - costs.weight_ns[i]),
        again,
        kept,
        workspace + rebuilt,
    )


def input_bytes(problem: Problem, first: int, rows: int) -> int:
    """Return the bytes that ``rows`` samples carry over the cut before layer ``first``.

    The result is 0 for the model's own input, whose size no profile has.
    """
    return int(problem.forward_bytes[first - 1]) * rows if first > 0 else 0


def recomputed_inputs(problem: Problem, stage: Stage, rows: int) -> int:
    """Return the bytes of the recomputed segments' inputs that ``kept_bytes`` includes."""
    counts_first = not problem.memory.count_buffers
    return sum(
        input_bytes(problem, first, rows) for first, _last in stage.recompute if counts_first or first > stage.first
    )


def conversion_ns(problem: Problem, stage: Stage, kind: str, rows: int) -> tuple[int, int]:
    """Return the time that codecs add to a stage's forward and backward of ``rows`` samples (WPipe, appendix A.3).

    On an encoded edge a forward decodes its input or encodes its output, and a backward the reverse.
    """
    before, after = stage.coded
    if not (before or after):
        return 0, 0
    speed, (_, faster) = problem.codec_speeds[kind], problem.kind_source[kind]
    incoming = problem.encodable[stage.first - 1][0] * rows if before else 0
    outgoing = problem.encodable[stage.last][0] * rows if after else 0
    rates = int(speed.encode_bytes_per_s * faster), int(speed.decode_bytes_per_s * faster)
    forward = transfer_ns(outgoing, rates[0]) + transfer_ns(incoming, rates[1])
    return forward, transfer_ns(incoming, rates[0]) + transfer_ns(outgoing, rates[1])


def update_ns(problem: Problem, stage: Stage) -> int:
    """Return the time of one optimizer step over the stage's layers."""
    return int(step_ns(problem, stage.first, stage.last + 1, stage.replicas))


def step_ns(problem: Problem, first: Places, stop: Places, replicas: int) -> np.ndarray:
    """Return the time of one optimizer step over layers [first, stop), elementwise, on each of ``replicas``.

    If optimizer states are sharded, a replica steps its part; the sums of a cell among its GPUs take as long as before.
    """
    step = problem.update_ns[stop] - problem.update_ns[first]
    if not problem.memory.shard_states or replicas == 1:
        return np.asarray(step)
    summed = problem.step_sums_ns[stop] - problem.step_sums_ns[first]
    return np.asarray(summed - (summed - step) // replicas)


def least_update_ns(problem: Problem) -> np.ndarray:
    """Return prefix sums (L + 1,) of updates, none above its part of a step on any number of replicas."""
    if not problem.memory.shard_states:
        return problem.update_ns
    summed = problem.step_sums_ns
    return np.asarray(summed + (problem.update_ns - summed) // problem.num_devices)


def layers_alike(problem: Problem) -> tuple[int, int]:
    """Return the first of the longest run of layers that cost the same, and how many there are."""
    costs = problem.costs(problem.devices[0].kind, 1)
    sums = (costs.forward_ns, costs.backward_ns, costs.stash_bytes, problem.parameter_bytes)
    table = np.stack([np.diff(each) for each in sums])
    changes = np.flatnonzero((table[:, 1:] != table[:, :-1]).any(axis=0)) + 1
    edges = [0, *changes.tolist(), problem.num_layers]
    return max(((i, j - i) for i, j in pairwise(edges)), key=lambda run: (run[1], -run[0]))
