"""Update rules: the weights that a micro-batch uses, and the steps that a stage may take (ALGORITHMS 5.1).

Their training is described in ``docs/running.md``, the times of their steps in ``docs/theory/judge.md``, sections 5
and 6.

Version v of a stage's weights is the result of v updates. Global batch t is *round* t of a stage.
"""

from __future__ import annotations

from typing import Literal

from penstock.solvers.model.allocation import Allocation, Stage

UpdateRule = Literal["synchronous", "weight_stashing", "double_buffered", "double_grouped", "elastic_averaging"]

PERIODIC_RULES: frozenset[UpdateRule] = frozenset({"weight_stashing", "double_buffered", "double_grouped"})
"""Rules without a flush: their schedules are patterns."""


def group_of(allocation: Allocation, stage: int) -> int:
    """Return WPipe's group of a stage: 0 for the first half of its pipeline's stages, 1 for the second (5.2)."""
    pipeline = allocation.pipeline_of[stage]
    number = stage - allocation.pipeline_of.index(pipeline)
    return 0 if 2 * number < len(allocation.pipelines[pipeline].stages) else 1


def version_used(rule: UpdateRule, group: int, update_round: int) -> int | None:
    """Return the version that forwards and backwards of a round use.

    None: the newest version when the forward starts, whatever its round, if any.
    """
    if rule == "weight_stashing":
        return None
    if rule == "double_buffered" or (rule == "double_grouped" and group == 0):
        return max(update_round - 1, 0)
    return update_round


def micro_batches_per_update(rule: UpdateRule, stage: Stage, num_micro_batches: int) -> int:
    """Return how many micro-batches a stage accumulates per step; under weight stashing, one per replica in turn."""
    if rule == "weight_stashing":
        return stage.replicas if stage.dispatch == "round_robin" else 1
    return num_micro_batches


def weight_copies(rule: UpdateRule, allocation: Allocation, stage: int, in_flight: int) -> int:
    """Return the weight copies of a stage, the current one included; ``in_flight``: its most in-flight micro-batches.

    Under weight stashing each in-flight micro-batch may have used a different version.
    """
    if rule == "weight_stashing":
        holder = allocation.stages[stage]
        return max(1, -(-in_flight // micro_batches_per_update(rule, holder, allocation.num_micro_batches)))
    if rule == "double_buffered" or (rule == "double_grouped" and group_of(allocation, stage) == 0):
        return 2
    return 1
