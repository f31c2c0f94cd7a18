"""Limits of what a trainer can express, and the trainer's words for a plan; `convert.trainers` has what each can train.

.. [1] Megatron-LM, ``core/pipeline_parallel/schedules.py``, ``core/transformer/transformer_block.py``,
   ``core/transformer/pipeline_parallel_layer_layout.py``, ``core/parallel_state.py`` (tp-cp-ep-dp-pp).
.. [2] torchtitan, ``distributed/pipeline_parallel.py``; PyTorch, ``distributed/pipelining/schedules.py``.
.. [3] DeepSpeed, ``runtime/pipe/module.py``, ``schedule.py`` (TrainSchedule) and ``topology.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.convert.layer_roles import OPTION
from penstock.convert.trainers import MODULES, TRAINERS
from penstock.layouts.legal import refuse_beyond_degrees
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.program import BACKWARD, FORWARD, INPUT, WEIGHT
from penstock.schemas.request import PlanRequest
from penstock.solvers.model.allocation import Allocation, Stage
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders, Schedule
from penstock.solvers.model.trainer_limits import Recomputing, Within, misnumbered
from penstock.solvers.schedules.interleaved import group_of
from penstock.solvers.schedules.trainer_orders import IN_A_V, ONE_STAGE


def refuse_beyond(request: PlanRequest) -> None:
    """Raise UnsupportedRequest for a request that its target, or the lack of one, rules out."""
    if request.target is None:
        if request.options.get(OPTION):
            raise UnsupportedRequest(
                f"option {OPTION!r} names the transformer layers for a target, and the request has no target",
                remedy=f"add a target (--target megatron), or leave {OPTION} out",
            )
        return
    orders = TRAINERS[request.target].orders
    if request.schedule not in ("auto", *orders):
        raise UnsupportedRequest(
            f"{request.target} has no schedule {request.schedule!r}; it runs "
            + ", ".join(f"{ours} ({theirs})" for ours, theirs in orders.items()),
            remedy="one of these, or schedule auto",
        )
    if "synchronous" not in request.update_rules:
        raise UnsupportedRequest(
            f"{request.target} updates synchronously; the request allows {', '.join(request.update_rules)}",
            remedy="allow synchronous updates: update_rules [synchronous] (--update-rule synchronous), or leave the "
            "target out",
        )
    refuse_beyond_degrees(request)
    if request.codec is not None:
        raise UnsupportedRequest(
            f"{request.target} cannot send encoded tensors, and the request sets a codec",
            remedy="leave codec or target out",
        )


def faults(problem: Problem, allocation: Allocation, schedule: Schedule, within: Within) -> list[str]:
    """Return sentences on why a trainer cannot express a plan; empty where it can."""
    if len(allocation.pipelines) > 1:
        return [f"it has {len(allocation.pipelines)} pipelines; {within.trainer} runs one"]
    if not isinstance(schedule, Orders) or schedule.update_every:
        return [f"its updates are not synchronous; those of {within.trainer} are"]
    sentences = [
        *_unequal(problem, allocation, within),
        *_misplaced(problem, allocation, within),
        *_cut(problem, allocation, within),
    ]
    if not sentences:
        sentences += _recomputing(allocation, within)
        sentences += _ordered(allocation, schedule, within)
    return sentences


def _unequal(problem: Problem, allocation: Allocation, within: Within) -> Iterator[str]:
    stages = allocation.stages
    for s, stage in enumerate(stages):
        if stage.replicas != stages[0].replicas:
            yield (
                f"stage {s} ({_named(problem, stage)}) has {_counted(stage.replicas, 'replica')}, stage 0 "
                f"{stages[0].replicas}; {within.trainer} replicates every stage equally"
            )
            break
    for s, stage in enumerate(stages):
        if stage.dispatch == "round_robin" and stage.replicas > 1:
            yield f"the replicas of stage {s} take whole micro-batches in turn; {within.trainer} shares each by rows"
            break
        if any(stage.coded):
            yield f"stage {s} sends encoded tensors; {within.trainer} sends them as they are"
            break
    each = allocation.num_micro_batches * stages[0].replicas
    if problem.global_batch_size % each:
        yield (
            f"{problem.global_batch_size} samples in {allocation.num_micro_batches} micro-batches over "
            f"{_counted(stages[0].replicas, 'replica')} are not even; {within.trainer} takes equal micro-batches only"
        )


def _misplaced(problem: Problem, allocation: Allocation, within: Within) -> Iterator[str]:
    """Check that ranks hold stages in a loop, or in a V.

    Ranks count through nodes, and in each node from its first device on.
    """
    stages = allocation.stages
    ranks = len({stage.devices for stage in stages})
    if not in_a_v(stages) or not set(IN_A_V) & set(within.schedules):
        for s, stage in enumerate(stages):
            if stage.devices != stages[s % ranks].devices:
                yield (
                    f"stage {s} is not on the devices of stage {s % ranks}; {within.trainer} deals stages to its "
                    f"{ranks} ranks in turn"
                )
                return
    if ranks == 1 and len(stages) > 1:
        yield f"all {len(stages)} stages are on the same devices; {within.trainer} interleaves two ranks or more"
        return
    used = [device for stage in stages[:ranks] for device in stage.devices]
    if len(set(used)) != len(used):
        yield f"a device is in two groups of replicas; in {within.trainer} each is of one rank"
        return
    if (devices := misnumbered(problem.nodes(), stages)) is not None:
        name = problem.network.node_names[problem.devices[devices[0]].node]
        yield (
            f"counted stage after stage, the devices of node {name!r} are not "
            f"neighbours in their order from the first ({', '.join(problem.devices[d].name for d in devices[:4])}); "
            f"{within.trainer} numbers its ranks through nodes and devices in order"
        )


def _cut(problem: Problem, allocation: Allocation, within: Within) -> Iterator[str]:
    for s, stage in enumerate(allocation.stages[:-1]):
        if not within.cuts[stage.last]:
            yield (
                f"stage {s} ends with layer {stage.last} ({problem.layer_names[stage.last]}), inside what is one piece "
                f"to {within.trainer}"
            )


def recomputing_of(stages: Sequence[Stage], within: Within) -> Recomputing | None:
    """Return the stages' recomputation in the trainer's words; None if it has no such words."""
    segments = [segment for stage in stages for segment in stage.recompute]
    if not segments:
        return Recomputing()
    most = max(last - first + 1 for first, last in segments)
    count = max(len(stage.recompute) for stage in stages)
    apart = next(stage.recompute[0][0] - max(stage.first, within.span.first) + 1 for stage in stages if stage.recompute)
    every = [Recomputing("every", apart)] if apart > 0 else []  # an embedding that is recomputed is before the first
    for how in (Recomputing("uniform", most), Recomputing("block", count), *every):
        is_possible = how.method in within.recompute and (within.at_once or how.layers == 1 or how.method != "uniform")
        if is_possible and all(within.segments(stage, how) == stage.recompute for stage in stages):
            return how
    return None


def _recomputing(allocation: Allocation, within: Within) -> Iterator[str]:
    """Check that the trainer has words for the recomputation.

    Single modules are the same in every layer of the model.
    """
    stages = allocation.stages
    odd = next((s for s, stage in enumerate(stages) if stage.modules != stages[0].modules), None)
    if odd is not None:
        yield (
            f"stage {odd} recomputes {_modules(stages[odd])}, stage 0 {_modules(stages[0])}; {within.trainer} has one "
            "setting for all stages"
        )
    elif beyond := [module for module in stages[0].modules if module not in MODULES.get(within.trainer, {})]:
        yield f"every layer recomputes {beyond[0]} by itself, for which {within.trainer} has no word"
    elif stages[0].modules and any(stage.recompute for stage in stages):
        yield f"some layers are recomputed whole and of others {_modules(stages[0])}; {within.trainer} does one of them"
    if odd is not None or recomputing_of(allocation.stages, within) is not None:
        return
    s, stage = next((s, stage) for s, stage in enumerate(allocation.stages) if stage.recompute)
    ways = {
        "megatron": "all transformer layers in groups of N, or the first N of every stage",
        "torchtitan": "every transformer layer by itself, every nth, or none",
        "deepspeed": "groups of N layers in every stage, or none",
    }
    shown = ", ".join(f"{first}–{last}" for first, last in stage.recompute[:4])
    yield f"stage {s} recomputes layers {shown}; {within.trainer} recomputes {ways[within.trainer]}"


def _modules(stage: Stage) -> str:
    return " and ".join(stage.modules) or "no module"


def _ordered(allocation: Allocation, orders: Orders, within: Within) -> Iterator[str]:
    if order_name(allocation, orders, within) is None:
        ranks = len({stage.devices for stage in allocation.stages})
        orders_text = ", ".join(TRAINERS[within.trainer].orders[name] for name in within.runs(ranks))
        alone = " without a pipeline" if ranks == 1 else ""
        yield f"its order ({orders.name}) is none of those that {within.trainer} runs{alone}: {orders_text}"


def in_a_v(stages: Sequence[Stage]) -> bool:
    """Return whether stages go down two or more ranks and back up."""
    ranks = len({stage.devices for stage in stages})
    mirrored = all(a.devices == b.devices for a, b in zip(stages, reversed(stages), strict=True))
    return len(stages) == 2 * ranks and ranks > 1 and mirrored


class Order(NamedTuple):
    """One of a trainer's orders, by our name; ``group``: micro-batches that interleaved 1F1B takes together."""

    name: str
    group: int


def order_name(allocation: Allocation, orders: Orders, within: Within) -> Order | None:
    """Return the trainer's order that the rows follow; None if they follow no such order."""
    operations = {device: row.operations for row in orders.rows for device in row.devices}
    stages, number = allocation.stages, allocation.num_micro_batches
    ranks = len({stage.devices for stage in stages})
    chunks = len(stages) // ranks
    for name in within.runs(ranks):
        if (name in ONE_STAGE) != (chunks == 1) or (name in IN_A_V) != in_a_v(stages):
            continue
        group = _group(within, allocation, orders, ranks) if name == "interleaved" else ranks
        if group is None:
            continue
        wanted = [rank_order(name, rank, ranks, chunks, number, group) for rank in range(ranks)]
        if all(operations[d].tolist() == wanted[rank] for rank in range(ranks) for d in stages[rank].devices):
            return Order(name, group)
    return None


def _group(within: Within, allocation: Allocation, orders: Orders, ranks: int) -> int | None:
    """Return the group that the trainer chooses by default, or takes from its settings."""
    number = allocation.num_micro_batches
    if within.rounds:
        return within.group(ranks, number)
    group = group_of(allocation, orders)
    return group if ranks <= group and (number % group == 0 or number % group >= ranks) else None


def rank_order(name: str, rank: int, ranks: int, chunks: int, number: int, group: int) -> list[list[int]]:
    """Return [kind, stage, micro-batch] of a rank; passes are counted through groups of micro-batches and chunks."""
    if name in IN_A_V:
        return _v_order(rank, ranks, number)
    if name == "looped-bfs-lifo":
        order = [(chunk, m) for chunk in range(chunks) for m in range(number)]
        back = [(chunk, m) for chunk in reversed(range(chunks)) for m in reversed(range(number))]
    else:
        group = group if chunks > 1 else number
        starts = [range(start, min(start + group, number)) for start in range(0, number, group)]
        order = [(chunk, m) for some in starts for chunk in range(chunks) for m in some]
        back = [(chunk, m) for some in starts for chunk in reversed(range(chunks)) for m in some]
    ahead = {
        "early-backward": ranks - rank - 1,
        "interleaved": 2 * (ranks - rank - 1) + (chunks - 1) * group,
    }.get(name, len(order))
    ahead = min(ahead, len(order))
    row = [[FORWARD, chunk * ranks + rank, m] for chunk, m in order[:ahead]]
    for turn, (chunk, m) in enumerate(back):
        if ahead + turn < len(order):
            forward, ours = order[ahead + turn]
            row.append([FORWARD, forward * ranks + rank, ours])
        row.append([BACKWARD, chunk * ranks + rank, m])
    return row


def _v_order(rank: int, ranks: int, number: int) -> list[list[int]]:
    """Build ZB-V from words of letters.

    F and f are forwards of the lower and the upper stage. I, W and i, w are the halves of their backwards.
    """
    enough = max(number, 2 * ranks - 1)
    ahead = 2 * ranks - rank - 1
    words = "F" * (ahead - rank) + "fF" * rank + "fiw" * (ranks - rank)
    words += "FIWfiw" * (enough - ahead) + "IWfiw" * (ahead - ranks)
    words += "Ii" * rank + "IW" * (ranks - rank)
    words += "w" * (enough - words.count("w")) + "W" * (enough - words.count("W"))
    kinds = {"F": FORWARD, "I": INPUT, "W": WEIGHT}
    done: Counter[str] = Counter()
    row = []
    for word in words:
        row.append([kinds[word.upper()], rank if word.isupper() else 2 * ranks - 1 - rank, done[word]])
        done[word] += 1
    return [each for each in row if each[2] < number]


def _named(problem: Problem, stage: Stage) -> str:
    return f"layers {stage.first}–{stage.last}, {problem.layer_names[stage.first]} … {problem.layer_names[stage.last]}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
