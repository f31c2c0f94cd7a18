"""The memoised search in plain Python, from the simulator's cost functions and ``latency``: the kernel's oracle.

It shares the reachable placements with ``search`` and nothing else: no tables, no labels, no compiled code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from dapple_latency import latency

from penstock.solvers.costs.collectives import all_reduce_ns
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.memory import micro_batches_that_fit, static_bytes
from penstock.solvers.costs.stage import stage_costs
from penstock.solvers.costs.transfer import transfer
from penstock.solvers.model.allocation import Stage, single_pipeline
from penstock.solvers.model.micro_batches import Batch, largest_slice
from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.dapple.search import Rules, channel_of
from penstock.solvers.planners.dapple.tables import PlacementTables


class Times(NamedTuple):
    """A stage of the latency formula; ``network``: a transfer."""

    forward_ns: int
    backward_ns: int
    all_reduce_ns: int
    network: bool


class Prefix(NamedTuple):
    """Stages placed so far; ``last`` is the last one, its servers numbered as in occupancy ``state``."""

    end: int
    state: int
    last: Stage | None
    times: tuple[Times, ...]

    @property
    def stages(self) -> int:
        """The number of computation stages."""
        return sum(not each.network for each in self.times)


@dataclass(frozen=True)
class Plain:
    """One problem, one number of micro-batches, one set of rules."""

    problem: Problem
    batch: Batch
    rules: Rules
    base: PlacementTables

    def memoised(self) -> int | None:
        """Return the best latency of the memoised search with one prefix per entry; None without a plan."""
        best: int | None = None
        memo: dict[tuple[int, int, int], tuple[tuple[int, int, int], Prefix]] = {}
        places = self.base.places
        for state in places.by_used.tolist():
            prefixes = [p for _, p in memo.values() if p.state == state]
            prefixes += [Prefix(0, 0, None, ())] if state == 0 else []
            for prefix in prefixes:
                for key, longer in self.extensions(prefix):
                    for value in self.plans(longer):
                        best = value if best is None else min(best, value)
                    if longer.end == self.problem.num_layers or longer.stages + 1 > self.max_stages:
                        continue
                    if not self.may_fit(longer):
                        continue
                    rank = self.rank(longer)
                    entry = (key, longer.end, longer.stages if self.rules.total_stages else 0)
                    if entry not in memo or rank < memo[entry][0]:
                        memo[entry] = (rank, longer)
        return best

    def exhaustive(self, prefix: Prefix | None = None) -> int | None:
        """Return the best latency of all plans that the placement policies reach, by enumeration."""
        values: list[int] = []
        for _, longer in self.extensions(prefix or Prefix(0, 0, None, ())):
            values += self.plans(longer)
            if longer.end < self.problem.num_layers:
                deeper = self.exhaustive(longer)
                values += [] if deeper is None else [deeper]
        return min(values, default=None)

    @property
    def max_stages(self) -> int:
        """The largest number of stages."""
        most = min(self.problem.num_layers, self.problem.num_devices)
        return min(self.rules.total_stages or most, most)

    def extensions(self, prefix: Prefix) -> Iterator[tuple[int, Prefix]]:
        """Yield each stage that can follow a prefix, as the memo key and the longer prefix."""
        problem, places = self.problem, self.base.geometry
        if prefix.stages >= self.max_stages:
            return
        used = places.states[prefix.state]
        total = int(self.base.places.node_size.sum())
        for t in range(int(places.first[prefix.state]), int(places.first[prefix.state + 1])):
            devices = self._devices(used, used + places.take[t])
            free = total - int(places.used[prefix.state]) - len(devices)
            for end in range(prefix.end + 1, problem.num_layers + 1):
                last = end == problem.num_layers
                if not last and (free == 0 or not problem.cuttable[end - 1]):
                    continue
                if last and not (free == 0 and prefix.last is None) and not (free > 0 and not self.rules.paper):
                    continue
                stage = Stage(prefix.end, end - 1, devices)
                times = self.stage_times(stage, self.flying(prefix.stages))
                link = self.link_times(prefix.last, stage)
                if times is None or link is None or len(devices) > self.batch.replicas_fed(problem.min_slice):
                    continue
                moved = self._moved(stage, t)
                line = (*prefix.times, *link, times)
                yield int(self.base.places.key_of[t]), Prefix(end, int(places.target[t]), moved, line)

    def plans(self, prefix: Prefix) -> list[int]:
        """Return the latencies of a prefix's plans: itself when it is whole, or with one stage for the rest."""
        total = self.rules.total_stages
        if prefix.end == self.problem.num_layers:
            return [self.value(prefix.times)] if total in (0, prefix.stages) else []
        rest = self._rest(prefix)
        if rest is None or prefix.stages + 1 > self.max_stages or total not in (0, prefix.stages + 1):
            return []
        if rest.replicas > self.batch.replicas_fed(self.problem.min_slice):
            return []
        times, link = self.stage_times(rest, 1), self.link_times(prefix.last, rest)
        return [] if times is None or link is None else [self.value((*prefix.times, *link, times))]

    def may_fit(self, prefix: Prefix) -> bool:
        """Return whether the remaining parameters and states fit on the free devices, if all had the most memory."""
        problem = self.problem
        room = max(problem.capacity_bytes(d) - problem.devices[d].context_bytes for d in range(problem.num_devices))
        free = problem.num_devices - int(self.base.geometry.used[prefix.state])
        start = prefix.end
        if self.rules.total_stages and self.rules.total_stages - prefix.stages > min(free, problem.num_layers - start):
            return False
        for _ in range(min(free, self.max_stages - prefix.stages)):
            end = start
            while end < problem.num_layers and self._least_held(start, end) <= room:
                end += 1
            start = end
        return start == problem.num_layers

    def _least_held(self, first: int, last: int) -> int:
        static = static_bytes(self.problem, Stage(first, last, (0,)))
        shared_by = self.problem.num_devices if self.problem.memory.shard_states else 1
        return static.parameters + static.gradients + static.optimizer // shared_by

    def rank(self, prefix: Prefix) -> tuple[int, int, int]:
        """Return the memo's key of comparison: the bound (or 0), the latency with the rest as one stage, the stages."""
        rest = self._rest(prefix)
        assert rest is not None
        times = self.stage_times(rest, 1, whatever_fits=True) or Times(0, 0, 0, False)
        link = self.link_times(prefix.last, rest) or (Times(0, 0, 0, True),)
        value = self.value((*prefix.times, *link, times))
        return (0 if self.rules.paper else self.bound(prefix)), value, prefix.stages

    def bound(self, prefix: Prefix) -> int:
        """Return a bound on all completions: the prefix's latency, and the remaining work evenly on free devices."""
        problem = self.problem
        free = problem.num_devices - int(self.base.geometry.used[prefix.state])
        work = -(-self._least_work(prefix.end) // free) * self.batch.num_micro_batches
        forward = sum(t.forward_ns for t in prefix.times)
        after = [sum(t.backward_ns for t in prefix.times[s:]) for s in range(len(prefix.times))]
        ending = max(t.all_reduce_ns + b for t, b in zip(prefix.times, after, strict=True))
        return max(self.value(prefix.times), forward + ending + work)

    def value(self, times: tuple[Times, ...]) -> int:
        """Return the latency of stages."""
        forward, backward, reduce, network = zip(*times, strict=True)
        return latency(
            forward,
            backward,
            reduce,
            self.batch.num_micro_batches,
            pivot="formula" if self.rules.paper else "max",
            network=network,
            channel=channel_of(self.problem),
        ).value_ns

    def flying(self, before: int) -> int:
        """Return how many micro-batches in flight a stage has to hold, behind so many others."""
        return max(1, min(self.batch.num_micro_batches, self.rules.total_stages - before))

    def stage_times(self, stage: Stage, flying: int, whatever_fits: bool = False) -> Times | None:
        """Return a stage's times, recomputing if needed; None where it does not fit or its replicas are apart."""
        problem, rows = self.problem, self.batch.most_rows
        again = Stage(stage.first, stage.last, stage.devices, "rows", ((stage.first, stage.last),))
        choices = {"never": [stage], "auto": [stage, again], "always": [again]}[problem.recompute]
        fitting = [s for s in choices if micro_batches_that_fit(problem, s, rows) >= flying]
        if not fitting and not whatever_fits:
            return None
        chosen = fitting[0] if fitting else choices[-1]
        costs = stage_costs(problem, chosen, rows)
        backward = costs.backward_ns + costs.recompute_ns
        return Times(costs.forward_ns, backward, self._exposed(stage, backward), False)

    def _exposed(self, stage: Stage, backward_ns: int) -> int:
        """Return how long the all-reduce outlasts the last backward (see ``planners.dapple.cost_kernel.reduced``)."""
        problem = self.problem
        size = int(problem.trainable_bytes[stage.last + 1] - problem.trainable_bytes[stage.first])
        if stage.replicas == 1 or size == 0:
            return 0
        bucket = problem.rules.bucket_bytes
        fixed = all_reduce_ns(problem, 1, stage.devices) - 1
        buckets = -(-size // bucket)
        whole = all_reduce_ns(problem, size, stage.devices) + (buckets - 1) * fixed
        if not problem.rules.overlap_all_reduce:
            return whole
        return max(whole - backward_ns, all_reduce_ns(problem, min(size, bucket), stage.devices))

    def link_times(self, before: Stage | None, stage: Stage) -> tuple[Times, ...] | None:
        """Return the network stage between two stages: empty before the first, None where no wire leads."""
        if before is None:
            return ()
        pair = single_pipeline((before, stage), self.batch.num_micro_batches)
        both = [transfer(self.problem, pair, s, self.batch.most_rows, s) for s in (0, 1)]
        sent, returned = (0 if each is None else each.duration_ns for each in both)
        return None if max(sent, returned) >= NEVER_NS else (Times(sent, returned, 0, True),)

    def _least_work(self, start: int) -> int:
        problem = self.problem
        fed = max(1, min(problem.num_devices, self.batch.replicas_fed(problem.min_slice)))
        total = 0
        for layer in range(start, problem.num_layers):
            each = []
            for replicas in range(1, fed + 1):
                for kind in self.base.kinds:
                    costs = problem.costs(kind, largest_slice(self.batch.most_rows, replicas))
                    work = costs.backward_ns[layer + 1] - costs.backward_ns[layer]
                    forwards = 2 if problem.recompute == "always" else 1
                    work += forwards * (costs.forward_ns[layer + 1] - costs.forward_ns[layer])
                    each.append(replicas * int(work))
            total += min(each)
        return total

    def _rest(self, prefix: Prefix) -> Stage | None:
        devices = self._devices(self.base.geometry.states[prefix.state], self.base.places.node_size)
        return Stage(prefix.end, self.problem.num_layers - 1, devices) if devices else None

    def _moved(self, stage: Stage, t: int) -> Stage:
        """Return the stage with its servers at their places in the next occupancy."""
        places = self.base.geometry
        after = places.states[places.target[t]]
        low = [after[p] - places.take[t][n] for p, n in enumerate(places.order[t])]
        return Stage(stage.first, stage.last, self._devices(low, after))

    def _devices(self, low: object, high: object) -> tuple[int, ...]:
        table = self.base.places.node_device
        return tuple(int(d) for n, (a, b) in enumerate(zip(low, high, strict=True)) for d in table[n, a:b])  # type: ignore[call-overload]
