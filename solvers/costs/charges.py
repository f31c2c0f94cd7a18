"""The instructions of a rank that the judge times; a plan's assumptions list the others with their bytes.

``CHARGES`` has every instruction of programs (``schemas.program.WORDS``); a test fails if one is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from penstock.solvers.costs.buckets import bucket_bytes
from penstock.solvers.costs.reductions import ReductionGroup, reduction_groups
from penstock.solvers.costs.ties import SUMMING_RULES, tied_stages, tied_sums
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.update_rules import UpdateRule

How = Literal["timed", "assumed", "free"]
"""Kinds of charges.

``timed``: the judge times it. ``assumed``: the plan's assumptions name it with its bytes. ``free``: it neither computes
nor leaves a device.
"""

TOTALS_BYTES = 16
"""A global batch's loss and the number of its terms, as ranks add them up."""
NORM_BYTES = 8
"""The sum of squared gradients, as ranks add it up."""


class Charge(NamedTuple):
    """The charge for an instruction's time: its kind, and a description."""

    how: How
    what: str


CHARGES: dict[str, Charge] = {
    "F": Charge("timed", "an operation, with what it encodes and decodes; its inputs from the batch as LOAD"),
    "B": Charge("timed", "an operation, with what it encodes and decodes"),
    "I": Charge("timed", "an operation: the backward without its weight part"),
    "W": Charge("timed", "an operation: the backward's weight part"),
    "R": Charge("timed", "an operation: the forward of the recomputed layers"),
    "SEND_F": Charge("timed", "a transfer, encoded or not"),
    "RECV_F": Charge("timed", "the transfer that it receives"),
    "SEND_B": Charge("timed", "a transfer, encoded or not"),
    "RECV_B": Charge("timed", "the transfer that it receives"),
    "LOCAL_F": Charge("free", "stays in the device's memory"),
    "LOCAL_B": Charge("free", "stays in the device's memory"),
    "REDUCE": Charge("timed", "a bucket's all-reduce"),
    "WAIT_REDUCE": Charge("timed", "steps follow the last bucket"),
    "REDUCE_SHARED": Charge("timed", "a tie's all-reduce"),
    "REDUCE_PARTS": Charge("timed", "with the update of its layers, of which GPUs of a mesh have parts of gradients"),
    "UNSHARD": Charge("timed", "a bucket's all-gather, with the reduce-scatter of its gradients"),
    "RESHARD": Charge("free", "lets go of memory"),
    "STEP": Charge("timed", "an update; with shared-out states what replicas send each other after it is assumed"),
    "LOAD": Charge("assumed", "inputs of the batch"),
    "FREE": Charge("free", "lets go of memory"),
    "VERSION": Charge("free", "chooses among weights that are there"),
    "NORM": Charge("assumed", "one number over all ranks"),
    "WAIT_NORM": Charge("assumed", "as NORM"),
    "AVG_PUSH": Charge("assumed", "updates to the reference model"),
    "AVG_PULL": Charge("assumed", "the reference model"),
}


class Untimed(NamedTuple):
    """Work that the judge does not time: its instructions, and its bytes per step (None: not known)."""

    words: tuple[str, ...]
    bytes: int | None
    sentence: str


def untimed(problem: Problem, allocation: Allocation, rule: UpdateRule) -> Iterator[Untimed]:
    """Yield the work of a plan's ranks that the judge does not time.

    Bytes are the bytes of the tensors that a collective reduces or gathers, counted once, however often they are sent.
    """
    averages = rule == "elastic_averaging"
    holders = [
        (p, d) for p, stage in zip(allocation.pipeline_of, allocation.stages, strict=True) for d in stage.devices
    ]
    ranks = len({(p if averages else 0, d) for p, d in holders})
    yield Untimed(
        ("LOAD",), None, "inputs and targets are on the devices in time; the profile does not have their bytes"
    )
    if ranks > 1:
        size = TOTALS_BYTES * (len(allocation.pipelines) if averages else 1)
        what = f"the loss and the number of its terms over {ranks} ranks"
        yield Untimed(("F",), size, f"not timed: {what}, {size} bytes per step")
    if ranks > 1 and rule == "synchronous":
        what = f"the norm of all gradients over {ranks} ranks, where a run clips them or trains in fp16"
        yield Untimed(("NORM", "WAIT_NORM"), NORM_BYTES, f"not timed: {what}, {NORM_BYTES} bytes per step")
    if averages and len(allocation.pipelines) > 1:
        size = int(problem.trainable_bytes[-1])
        what = "what each pipeline pulls of the reference model, and pushes to it"
        yield Untimed(("AVG_PULL", "AVG_PUSH"), 2 * size, f"not timed: {what}, {2 * size} bytes per step")
    elif problem.memory.shard_states and (size := _exchanged(problem, allocation)):
        what = "the stepped parameters that replicas with shared-out optimizer states hand each other"
        yield Untimed(("STEP",), size, f"not timed: {what}, {size} bytes per step over all stages")
    yield from _copies(problem, allocation, rule)


def _exchanged(problem: Problem, allocation: Allocation) -> int:
    """Return the bytes of parameters that one replica updates for the others; 0 if no stage is replicated."""
    if all(stage.replicas == 1 for stage in allocation.stages):
        return 0
    return sum(_trainable(problem, group) for group in reduction_groups(allocation) if len(group.devices) > 1)


def _trainable(problem: Problem, group: ReductionGroup) -> int:
    sums = bucket_bytes(problem, group.first, group.last)
    return int(sums[group.last + 1] - sums[group.first])


def _copies(problem: Problem, allocation: Allocation, rule: UpdateRule) -> Iterator[Untimed]:
    """Yield updates of copies of tied parameters; under rules that do not sum ties, a note that no rank trains them."""
    for tie in tied_sums(problem, allocation, rule):
        copies = len(tie.devices) - 1
        if copies > 0:
            what = f"the optimizer's step of the copies of {tie.name!r} other than the first"
            yield Untimed(("STEP",), tie.bytes * copies, f"not timed: {what}, {tie.bytes * copies} bytes per step")
    for name, layers, size in problem.shared_parameters if rule not in SUMMING_RULES else ():
        if any(len(stages) > 1 for stages in tied_stages(allocation, layers)):
            what = f"the sum of {name!r}, {size} bytes, over the stages that share it"
            why = f"under {rule} updates they have different versions of it, and no executor trains this"
            yield Untimed(("REDUCE_SHARED",), size, f"not timed: {what}; {why}")
