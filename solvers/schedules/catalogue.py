"""The schedules: one row each, with all that planners, dispatch, other trainers' layouts and listings use.

A schedule for stages on separate devices (``parts="any"``) is built for any allocation (``candidates``). The others
come with a planner that lays out the stages as they need them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from penstock.schemas.errors import UnknownMethod
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.options import Option, Options
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders, Schedule
from penstock.solvers.model.update_rules import UpdateRule
from penstock.solvers.schedules.advance_forward import advance_forward, deltas, everything, in_flight
from penstock.solvers.schedules.chimera import chimera
from penstock.solvers.schedules.early_backward import early_backward, one_f_one_b
from penstock.solvers.schedules.gpipe import gpipe
from penstock.solvers.schedules.interleaved import interleaved, looped_bfs, looped_bfs_lifo
from penstock.solvers.schedules.model_parallel import model_parallel
from penstock.solvers.schedules.names import remedy_for
from penstock.solvers.schedules.overtaking import overtaking
from penstock.solvers.schedules.periodic.eager import eager
from penstock.solvers.schedules.periodic.inside_out import inside_out
from penstock.solvers.schedules.periodic.one_f_one_b_star import one_f_one_b_star
from penstock.solvers.schedules.periodic.smallest_period import periodic_ilp
from penstock.solvers.schedules.periodic.wpipe import wpipe
from penstock.solvers.schedules.pipeline_execution import execution_warmup, pipeline_execution
from penstock.solvers.schedules.support.policies import vectors_of
from penstock.solvers.schedules.v_shape import v_half, v_min, zb_v, zb_v_cut
from penstock.solvers.schedules.zero_bubble import zb_h1, zb_h2

SYNCHRONOUS: frozenset[UpdateRule] = frozenset({"synchronous"})
DOUBLE_BUFFERED: frozenset[UpdateRule] = frozenset({"double_buffered"})
Parts = Literal["any", "line", "loop", "v", "both_ways", "own"]
"""The parts of the model on a device.

- ``any``: one stage each, of any pipelines; ``line``: one stage each, of one pipeline of equal ranks.
- ``loop``: several parts in a loop, ``v``: two in a V, ``both_ways``: one of each direction.
- ``own``: what the schedule's planner assigns.
"""
Vector = tuple[int, ...]
Vectors = Callable[[Problem, Allocation, str], Iterable[Vector]]


def one_each(problem: Problem, allocation: Allocation, policy: str) -> Iterable[Vector]:
    """Return one micro-batch in flight on each stage, which every order has."""
    return [(1,) * len(allocation.stages)]


def all_of_them(problem: Problem, allocation: Allocation, policy: str) -> Iterable[Vector]:
    """Return all micro-batches in flight on each stage."""
    return [(allocation.num_micro_batches,) * len(allocation.stages)]


def _execution(problem: Problem, allocation: Allocation, policy: str) -> Iterable[Vector]:
    return [execution_warmup(problem, allocation)]


def _advances(problem: Problem, allocation: Allocation, policy: str) -> Iterable[Vector]:
    vectors = [in_flight(allocation, delta) for delta in deltas(len(allocation.stages))]
    return dict.fromkeys([*vectors, everything(allocation)])


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """A schedule. ``build(problem, allocation, **parameters)`` makes its orders, or its pattern without a flush.

    - ``build`` raises ``UnsupportedRequest`` for stages that it does not order; then no plan runs them under this
      schedule.
    - ``split``: backwards are two operations, for inputs and for weights.
    - ``tried_with``: planners that try it, by default where they lay out its ``parts``; all others in ``auto`` and on
      request.
    - ``in_flight``: for each order worth simulating, by policy, a lower bound on each stage's in-flight micro-batches,
      to check memory before the order is built.
    - ``by_vector``: ``build`` takes them as ``warmup``.
    - ``fewer``: where memory is short, orders with fewer are tried as well.
    - ``orders_of``: another schedule that has the same orders.
    - ``parameters``: each of their choices is tried.
    - ``trained``: the order that other trainers run under this name.
    - ``grouped``: it takes a number of micro-batches as ``group``.
    """

    name: str
    build: Callable[..., Schedule]
    cites: str
    help: str
    parts: Parts = "any"
    supports: frozenset[UpdateRule] = SYNCHRONOUS
    split: bool = False
    tried_with: tuple[str, ...] = ()
    in_flight: Vectors = one_each
    by_vector: bool = False
    fewer: bool = False
    orders_of: str = ""
    parameters: Options = ()
    trained: Callable[..., Orders] | None = None
    grouped: bool = False

    @property
    def for_any_stages(self) -> bool:
        """Return whether its orders can be built for any allocation."""
        return self.parts == "any" and "synchronous" in self.supports

    @property
    def whole(self) -> bool:
        """Return whether every stage holds all micro-batches before its first backward."""
        return self.in_flight is all_of_them

    def orders(self, problem: Problem, allocation: Allocation, **parameters: object) -> Orders:
        """Return the orders that ``build`` makes of a schedule with a flush."""
        schedule = self.build(problem, allocation, **parameters)
        assert isinstance(schedule, Orders)
        return schedule

    def trained_in_flight(self, stages: int, number: int) -> Vector:
        """Return the micro-batches surely in flight on each stage of one pipeline, as other trainers run it."""
        if self.trained is one_f_one_b:
            return tuple(min(stages - s, number) for s in range(stages))
        return (number if self.whole else 1,) * stages

    def choices(self, allocation: Allocation) -> list[Mapping[str, object]]:
        """Return the parameters to try; the defaults alone where a single micro-batch leaves nothing to choose."""
        if allocation.num_micro_batches == 1:
            return [{}]
        names = [parameter.name for parameter in self.parameters]
        values = product(*(parameter.choices for parameter in self.parameters))
        return [dict(zip(names, each, strict=True)) for each in values]


SCHEDULES: dict[str, ScheduleRow] = {
    row.name: row
    for row in (
        ScheduleRow(
            "early-backward",
            early_backward,
            "DAPPLE section III-B; PipeDream-flush, 1F1B",
            "K forwards, then a backward and a forward in turn",
            in_flight=vectors_of,
            by_vector=True,
            fewer=True,
            trained=one_f_one_b,
        ),
        ScheduleRow(
            "pe",
            pipeline_execution,
            "SPP (Luo et al., INFOCOM 2022), section IV-A, Algorithm 1",
            "early backward with 4 (S - n) + 1 forwards ahead on stage n",
            in_flight=_execution,
            orders_of="early-backward",
        ),
        ScheduleRow(
            "gpipe",
            gpipe,
            "GPipe (Huang et al., NeurIPS 2019)",
            "all forwards, then all backwards",
            tried_with=("dapple",),
            in_flight=all_of_them,
            parameters=(Option("backward", "fifo", "order of the backwards", choices=("fifo", "lifo")),),
            trained=gpipe,
        ),
        ScheduleRow(
            "eager",
            eager,
            "PipeDream (Narayanan et al., SOSP 2019), section 3.2: 1F1B and 1F1B-RR",
            "one forward and one backward in turn, without a flush",
            parts="own",
            supports=frozenset({"weight_stashing", "double_buffered", "double_grouped"}),
        ),
        ScheduleRow(
            "wpipe",
            wpipe,
            "WPipe (Yang et al., ICLR 2022), section 3.2",
            "M slots of one group, then M of the other, each 1F1B; group 0 a period ahead",
            parts="own",
            supports=frozenset({"double_grouped"}),
        ),
        ScheduleRow(
            "1f1b-star",
            one_f_one_b_star,
            "MadPipe (Beaumont et al., 2022), section 4.1",
            "the pattern of a contiguous allocation that keeps fewest micro-batches at its period",
            parts="own",
            supports=DOUBLE_BUFFERED,
        ),
        ScheduleRow(
            "inside-out",
            inside_out,
            "iterative modulo scheduling (Rau, MICRO 1994)",
            "a pattern for stages that share processors, placed from the last stage outwards",
            parts="own",
            supports=DOUBLE_BUFFERED,
        ),
        ScheduleRow(
            "periodic-ilp",
            periodic_ilp,
            "MadPipe (Beaumont et al., 2022), section 4.3",
            "the pattern of the smallest period of any allocation, by the periodic ILP",
            parts="own",
            supports=DOUBLE_BUFFERED,
        ),
        ScheduleRow(
            "advance-forward",
            advance_forward,
            "AvgPipe (Chen et al., PPoPP 2023), section 4.2, algorithm 1",
            "1F1B with forwards in advance, fewer from stage to stage",
            supports=frozenset({"synchronous", "elastic_averaging"}),
            in_flight=_advances,
            by_vector=True,
        ),
        ScheduleRow(
            "interleaved",
            interleaved,
            "Megatron-LM (Narayanan et al., SC 2021), section 2.2.2",
            "1F1B over several parts of the model on each device, micro-batches in groups",
            parts="loop",
            tried_with=("interleaved",),
            trained=interleaved,
            grouped=True,
        ),
        ScheduleRow(
            "looped-bfs",
            looped_bfs,
            "breadth-first pipeline parallelism (Lamy-Poirier, MLSys 2023)",
            "all micro-batches through one of a device's parts, then the next",
            parts="loop",
            tried_with=("interleaved",),
            trained=looped_bfs,
        ),
        ScheduleRow(
            "looped-bfs-lifo",
            looped_bfs_lifo,
            "breadth-first pipeline parallelism (Lamy-Poirier, MLSys 2023); PyTorch's ScheduleLoopedBFS",
            "looped-bfs, backwards from the last micro-batch on",
            parts="loop",
            trained=looped_bfs_lifo,
        ),
        ScheduleRow(
            "zb-h1",
            zb_h1,
            "zero bubble (Qi et al., ICLR 2024)",
            "1F1B with weight gradients apart and later, in the memory of 1F1B",
            parts="line",
            split=True,
            tried_with=("zero-bubble",),
        ),
        ScheduleRow(
            "zb-h2",
            zb_h2,
            "zero bubble (Qi et al., ICLR 2024)",
            "weight gradients apart, twice the forwards in advance",
            parts="line",
            split=True,
            tried_with=("zero-bubble",),
        ),
        ScheduleRow(
            "zb-v",
            zb_v,
            "zero bubble (Qi et al., ICLR 2024)",
            "two parts on each device in a V, weight gradients apart; no bubble for equal times, in the memory of 1F1B",
            parts="v",
            split=True,
            tried_with=("zero-bubble",),
            trained=zb_v_cut,
        ),
        ScheduleRow(
            "v-half",
            v_half,
            "controllable memory (Qi et al., NeurIPS 2024)",
            "a V with about half of the activations of 1F1B",
            parts="v",
            split=True,
            tried_with=("zero-bubble",),
        ),
        ScheduleRow(
            "v-min",
            v_min,
            "controllable memory (Qi et al., NeurIPS 2024)",
            "a V with about a third of the activations of 1F1B",
            parts="v",
            split=True,
            tried_with=("zero-bubble",),
        ),
        ScheduleRow(
            "chimera",
            chimera,
            "Chimera (Li and Hoefler, SC 2021)",
            "pipelines in opposite directions over the same devices, each filling the other's bubbles",
            parts="both_ways",
            tried_with=("chimera",),
        ),
        ScheduleRow(
            "overtaking",
            overtaking,
            "list scheduling (Graham, 1966) under memory limits",
            "weight gradients apart, for unequal stages and transfers: what is ready overtakes, within the memory",
            parts="own",
            split=True,
            tried_with=("zero-bubble",),
        ),
        ScheduleRow(
            "model-parallel", model_parallel, "DAPPLE section VII", "one micro-batch in the pipeline at a time"
        ),
    )
}


def schedule_row(name: str) -> ScheduleRow:
    """Return the row of that name. Raises ``UnsupportedRequest`` with all names and the closest one."""
    if name not in SCHEDULES:
        raise UnknownMethod(
            f"no schedule {name!r}; there are {', '.join(SCHEDULES)}", remedy=remedy_for(name, SCHEDULES)
        )
    return SCHEDULES[name]


def tried_with(planner: str, parts: Sequence[Parts] | None = None) -> list[ScheduleRow]:
    """Return the schedules for these ``parts`` that name a planner in ``tried_with``."""
    rows = (row for row in SCHEDULES.values() if planner in row.tried_with)
    return [row for row in rows if parts is None or row.parts in parts]
