"""``StageLine``: an allocation for periodic schedules under two weight versions (MadPipe sections 3 and 4.1).

One pipeline; stages in order, each on a processor (a device, or replicas that split each micro-batch), a transfer each
way between stages on different processors. Several stages may share a processor, the special one.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.program import BACKWARD, FORWARD
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.memory import activation_bytes, free_bytes, transient_bytes, weight_bytes
from penstock.solvers.costs.stage import stage_costs, stage_rows
from penstock.solvers.costs.tables.step_graph import StepGraph
from penstock.solvers.model.allocation import Allocation, Stage
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Pattern, PatternOperation

ALL_BUFFERS = 2


@dataclass(frozen=True)
class StageLine:
    """Times and bytes of S stages for one micro-batch; the hop lists have S - 1 entries.

    ``processor[s]`` numbers the processors. A stage holds ``fixed_bytes`` always (weights in two versions, buffers),
    ``kept_bytes`` for each micro-batch between its F's start and its B's end, ``work_bytes`` while it computes.
    ``most_in_flight``: two versions serve at most M + 1 micro-batches.
    """

    forward_ns: tuple[int, ...]
    backward_ns: tuple[int, ...]
    hop_forward_ns: tuple[int, ...]
    hop_backward_ns: tuple[int, ...]
    processor: tuple[int, ...]
    fixed_bytes: tuple[int, ...]
    kept_bytes: tuple[int, ...]
    work_bytes: tuple[int, ...]
    available_bytes: tuple[int, ...]
    most_in_flight: int

    @property
    def size(self) -> int:
        """The number of stages S."""
        return len(self.forward_ns)

    @property
    def contiguous(self) -> bool:
        """True if every stage has a separate processor."""
        return len(set(self.processor)) == self.size

    def load_bound_ns(self) -> int:
        """Return a bound on the period: the largest load of a processor, or of a pair of processors' link (O-3)."""
        loads: dict[object, int] = {}
        for s in range(self.size):
            loads[self.processor[s]] = loads.get(self.processor[s], 0) + self.forward_ns[s] + self.backward_ns[s]
        for s in range(self.size - 1):
            link = frozenset(self.processor[s : s + 2])
            if len(link) == 2:
                loads[link] = loads.get(link, 0) + self.hop_forward_ns[s] + self.hop_backward_ns[s]
        return max(1, *loads.values())

    def alone_ns(self) -> int:
        """Return the time of one micro-batch through all stages: at this period each stage holds one."""
        return max(1, sum((*self.forward_ns, *self.backward_ns, *self.hop_forward_ns, *self.hop_backward_ns)))

    @classmethod
    def of(cls, problem: Problem, allocation: Allocation, halves: int = ALL_BUFFERS) -> StageLine:
        """Return the line of a plan; ``halves``: see ``buffer_bytes``.

        Raises ``UnsupportedRequest`` for several pipelines or replicas that take turns.
        """
        stages = allocation.stages
        if len(allocation.pipelines) > 1 or any(s.dispatch == "round_robin" and s.replicas > 1 for s in stages):
            raise UnsupportedRequest(
                "periodic patterns with two weight versions need one pipeline whose replicas split each micro-batch",
                remedy="one pipeline with dispatch rows",
            )
        graph = StepGraph(problem, allocation)
        rows, costs = graph.classes[0][0], [each[0] for each in graph.costs]
        hops = [
            tuple(min(graph.lags_ns(s + way, way)[0], NEVER_NS // 4) for s in range(len(stages) - 1)) for way in (0, 1)
        ]
        resident = [static.total + weight_bytes(problem, s)[1] for static, s in zip(graph.static, stages, strict=True)]
        buffers = [buffer_bytes(problem, stage, rows, halves) for stage in stages]
        groups = list(dict.fromkeys(stage.devices for stage in stages))
        return cls(
            forward_ns=tuple(c.forward_ns for c in costs),
            backward_ns=tuple(c.durations_ns()[BACKWARD] for c in costs),
            hop_forward_ns=hops[0],
            hop_backward_ns=hops[1],
            processor=tuple(groups.index(stage.devices) for stage in stages),
            fixed_bytes=tuple(map(sum, zip(resident, buffers, strict=True))),
            kept_bytes=tuple(activation_bytes(problem, stage, rows) for stage in stages),
            work_bytes=tuple(c.workspace_bytes for c in costs),
            available_bytes=tuple(free_bytes(problem, group) for group in groups),
            most_in_flight=allocation.num_micro_batches + 1,
        )


def buffer_bytes(problem: Problem, stage: Stage, rows: int, halves: int) -> int:
    """Return the bytes of a stage's buffers, without the inputs of in-flight micro-batches.

    The gradient that a backward reads always counts. The other three (one input ahead, the output and the gradient
    being sent) are seldom in use together: ``halves`` halves of them count.
    """
    if not problem.memory.count_buffers:
        return 0
    everything = transient_bytes(problem, stage, rows) - stage_costs(problem, stage, rows).workspace_bytes
    certain = 0
    if stage.last < problem.num_layers - 1:
        certain = int(problem.backward_bytes[stage.last]) * stage_rows(stage, rows)
    return certain + (everything - certain) * halves // ALL_BUFFERS


def as_pattern(name: str, period_ns: int, forward_ns: list[int], backward_ns: list[int]) -> Pattern:
    """Return the pattern in which F_s and B_s of micro-batch 0 start at these times, none of which is negative."""
    starts = [(FORWARD, s, t) for s, t in enumerate(forward_ns)] + [(BACKWARD, s, t) for s, t in enumerate(backward_ns)]
    operations = [PatternOperation(kind, s, t % period_ns, t // period_ns) for kind, s, t in starts]
    operations.sort(key=lambda o: (o.start_ns, o.shift, o.stage))
    return Pattern(name, period_ns, 1, tuple(operations))
