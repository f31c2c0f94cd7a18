"""DAPPLE's planner for one number of micro-batches: partition, replication and placement by memoised search.

T_PL(j, m, g) of formulas (4) and (5): the first j layers planned on the m devices of g, all other layers as one stage
on the remaining devices; j = 0 is data parallelism (R-6). A memo entry is an occupancy up to interchangeable servers
and the last stage's set. It keeps the best prefix (``beam`` of them, without dominated ones). So the result is the best
plan of all plans whose prefixes were the best of their entries. These contain every plan of one or two stages that the
placement policies reach. With a beam that never overflows (``SearchResult.exact``) the result is the best of all plans
that the policies reach.

Difference from [1]_: a prefix whose remaining layers do not fit on the remaining devices is not a plan, but is
extended. Otherwise models that need many stages would have no plan.

.. [1] DAPPLE, section IV-B, IV-C, formulas (4), (5). O(L² × transitions) latencies, each in constant time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.memory import micro_batches_that_fit
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.micro_batches import Batch
from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.dapple import search_kernel as kernel
from penstock.solvers.planners.dapple.kernel_arrays import Layers, Memo, Scratch, Settings
from penstock.solvers.planners.dapple.latency_kernel import R
from penstock.solvers.planners.dapple.tables import PlacementTables, layers, shape

STRAIGHT_BEAM = 64
KEPT_PLANS = 16
MAX_PREFIXES = 2_000_000
Channel = Literal["half", "full", "none"]
MODES = {"nic": 0, "spp": 1, "madpipe": 2, "dapple": 3}
CHANNELS: dict[Channel, int] = {"half": 0, "full": 1, "none": 2}
RECOMPUTE = {"never": 0, "auto": 1, "always": 2}


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of a search.

    ``paper``: latencies are taken at the pivot of formula (3), no device is left over, and a memo entry keeps the
    prefix with the smallest latency when all other layers are one stage. Otherwise latencies are the largest over all
    pivots, and an entry keeps the prefix with the smallest bound on its completions (then latency). ``prune`` skips
    what a proven bound rules out, and changes no value. ``limit_ns``: plans from this latency on are left out.
    ``total_stages``: exactly S stages; then the memory test is for P_A's min(S - i, M) micro-batches in flight (0: any
    number of stages, one micro-batch in flight). ``beam``: prefixes per entry, fewer where all together would exceed
    ``MAX_PREFIXES``. ``lenient`` leaves buffers out of the memory test, for requests where nothing fits otherwise; the
    simulator decides.
    """

    paper: bool = False
    beam: int = 1
    lenient: bool = False
    prune: bool = True
    kept: int = KEPT_PLANS
    limit_ns: int = NEVER_NS
    total_stages: int = 0


class FormulaPlan(NamedTuple):
    """A plan and its latency by DAPPLE's formula, which is an estimate: the simulator computes the plan's time."""

    latency_ns: int
    allocation: Allocation


@dataclass(frozen=True)
class SearchResult:
    """The best plans, ascending, and the best plan of each number of stages; ``exact``: no memo entry overflowed."""

    plans: tuple[FormulaPlan, ...]
    exact: bool


def channel_of(problem: Problem) -> Channel:
    """Return how the channel of a network stage works: as the request says, or in a shared network as its cables do."""
    if not problem.rules.shared:
        return problem.rules.channel
    network = problem.network
    duplex = [cable.full_duplex for cable in network.cables]
    duplex += [inside.full_duplex and inside.form != "bus" for inside in network.insides if inside is not None]
    return "full" if all(duplex) else "half"


def search(
    problem: Problem, batch: Batch, rules: Rules | None = None, base: PlacementTables | None = None
) -> SearchResult:
    """Search over all replications with a memo. ``base``: the problem's ``shape``, if at hand."""
    rules = rules or Rules()
    base = base or shape(problem)
    return _run(problem, batch, rules, base, batch.replicas_fed(problem.min_slice))


def straight(problem: Problem, batch: Batch, rules: Rules, base: PlacementTables) -> SearchResult:
    """Search the plans with one device per stage; ``base`` is a shape with ``replicas=(1,)``.

    Every undominated prefix is kept. The search is exact over all such plans on devices in the policies' order, unless
    an entry overflows ``STRAIGHT_BEAM``.
    """
    return _run(problem, batch, replace(rules, beam=STRAIGHT_BEAM), base, 1, unused=True)


def _run(
    problem: Problem, batch: Batch, rules: Rules, base: PlacementTables, most_replicas: int, *, unused: bool = False
) -> SearchResult:
    table = layers(problem, base, batch)
    settings = _settings(problem, batch, rules, most_replicas, unused or not rules.paper)
    keys = len(base.places.keys_of) * (settings.total + 1)
    beam = max(1, min(rules.beam, MAX_PREFIXES // (keys * (problem.num_layers + 1)))) if settings.labels else 1
    memo = _memo(keys, settings.total + 1, problem.num_layers, beam, settings.labels)
    best = np.full((rules.kept, 7), kernel.NONE, dtype=np.int64)
    best[:, kernel.VALUE] = min(rules.limit_ns, NEVER_NS)
    by_length = np.full((settings.max_stages + 1, 7), kernel.NONE, dtype=np.int64)
    by_length[:, kernel.VALUE] = min(rules.limit_ns, NEVER_NS)
    kernel.run(
        base.places,
        base.routes,
        base.placed,
        base.remaining,
        table,
        settings,
        memo,
        _scratch(problem, base, table, settings),
        best,
        by_length,
    )
    rows = [row for row in (*best.tolist(), *by_length.tolist()) if row[kernel.KEY] != kernel.NONE]
    plans = dict.fromkeys(
        FormulaPlan(row[kernel.VALUE], _trace(problem, batch, base, memo, row, settings.total)) for row in rows
    )
    exact = not memo.overflow[0] and settings.labels and beam > 1
    return SearchResult(tuple(sorted(plans, key=lambda plan: plan.latency_ns)), bool(exact))


def _settings(problem: Problem, batch: Batch, rules: Rules, most_replicas: int, unused: bool) -> Settings:
    stages = min(problem.num_layers, problem.num_devices)
    return Settings(
        mode=0 if problem.rules.shared else MODES[problem.rules.transfer],
        channel=CHANNELS[channel_of(problem)],
        micro_batches=batch.num_micro_batches,
        rows=batch.most_rows,
        fed=most_replicas,
        recompute=RECOMPUTE[problem.recompute],
        lenient=rules.lenient,
        sharded=problem.memory.shard_states,
        buffers=problem.memory.count_buffers,
        overlap=problem.rules.overlap_all_reduce,
        bucket=problem.rules.bucket_bytes,
        max_stages=min(rules.total_stages or stages, stages),
        total=min(rules.total_stages, stages),
        unused=unused,
        labels=not rules.paper,
        prune=rules.prune and not rules.paper,
    )


def _memo(keys: int, width: int, num_layers: int, beam: int, labels: bool) -> Memo:
    none = (1, 1, 1)
    full = (keys, num_layers + 1, beam)
    info = np.full((*full, 5), kernel.NONE, dtype=np.int32)
    memo = Memo(
        info=info,
        rank=np.full((*full, 2), NEVER_NS, dtype=np.int64),
        label=np.zeros((*(full if labels else none), 4), dtype=np.int64),
        times=np.zeros((*(none if labels else full), 5), dtype=np.int64),
        overflow=np.zeros(1, dtype=np.int64),
    )
    root = keys - width
    info[root, 0, 0, kernel.STAGES] = 0
    memo.rank[root, 0, 0] = 0
    if labels:
        memo.label[root, 0, 0, R] = -NEVER_NS
    return memo


def _scratch(problem: Problem, base: PlacementTables, table: Layers, settings: Settings) -> Scratch:
    devices, resources = problem.num_devices, len(base.routes.bandwidth)
    length = 2 * settings.max_stages + 4
    return Scratch(
        source=np.empty(devices, dtype=np.int64),
        target=np.empty(devices, dtype=np.int64),
        load=np.zeros(resources, dtype=np.int64),
        touched=np.empty(resources, dtype=np.int64),
        line=np.zeros((4, length), dtype=np.int64),
        legal=np.ones(length, dtype=np.bool_),
        widest=np.zeros(len(table.forward_ns), dtype=np.int64),
    )


def _trace(
    problem: Problem, batch: Batch, base: PlacementTables, memo: Memo, row: Sequence[int], total: int
) -> Allocation:
    """Return the stages of a plan; follow the servers through its transitions to name their devices."""
    steps = [(row[kernel.STEP], row[kernel.END])]
    key, cut, slot = row[kernel.KEY], row[kernel.CUT], row[kernel.SLOT]
    while memo.info[key, cut, slot, kernel.STAGES] > 0:
        info = memo.info[key, cut, slot]
        steps.append((int(info[kernel.LAST]), cut))
        key, cut, slot = int(info[kernel.PARENT_KEY]), int(info[kernel.PARENT_CUT]), int(info[kernel.PARENT_SLOT])
    nodes = problem.nodes()
    servers = list(range(len(nodes)))
    stages: list[Stage] = []
    start, state = 0, 0
    for transition, end in reversed(steps):
        used = base.geometry.states[state]
        counts = base.geometry.take[transition]
        devices = [d for p, n in enumerate(servers) for d in nodes[n][used[p] : used[p] + counts[p]]]
        stages.append(Stage(start, end - 1, tuple(devices)))
        servers = [servers[p] for p in base.geometry.order[transition]]
        start, state = end, int(base.geometry.target[transition])
    if start < problem.num_layers:
        used = base.geometry.states[state]
        devices = [d for p, n in enumerate(servers) for d in nodes[n][used[p] :]]
        stages.append(Stage(start, problem.num_layers - 1, tuple(devices)))
    flying = [max(1, min(total - i, batch.num_micro_batches)) for i in range(len(stages))]
    recomputing = (_recomputing(problem, batch, stage, k) for stage, k in zip(stages, flying, strict=True))
    return single_pipeline(tuple(recomputing), batch.num_micro_batches)


def _recomputing(problem: Problem, batch: Batch, stage: Stage, flying: int) -> Stage:
    """Return the stage, recomputing if the request always requires it or if too little fits without."""
    if problem.recompute == "never":
        return stage
    if problem.recompute == "auto" and micro_batches_that_fit(problem, stage, batch.most_rows) >= flying:
        return stage
    return stage.whole
