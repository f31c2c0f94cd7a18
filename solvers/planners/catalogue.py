"""The table of planners: a row each, with all that ``auto``, the driver and listings need.

``auto`` runs the rows that go with a request, by tier and then in the order of the table (``solve.tasks``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import get_args

from penstock.schemas.coverage import Covers
from penstock.schemas.errors import UnknownMethod, UnsupportedRequest, meant
from penstock.solvers.bounds.coverage import one_pipeline, planned_apart
from penstock.solvers.bounds.schedule_bound import MOST_LABELLED
from penstock.solvers.model.network import MAX_DENSE_DEVICES
from penstock.solvers.model.options import Option, Options, Value, checked
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.update_rules import UpdateRule
from penstock.solvers.planners.avgpipe import planner as avgpipe
from penstock.solvers.planners.chunked import planner as chunked
from penstock.solvers.planners.contiguous_bound import planner as relax
from penstock.solvers.planners.dapple import planner as dapple
from penstock.solvers.planners.even import planner as even
from penstock.solvers.planners.exact import planner as exact
from penstock.solvers.planners.hetpipe import planner as hetpipe
from penstock.solvers.planners.madpipe import planner as madpipe
from penstock.solvers.planners.many_devices import planner as spread
from penstock.solvers.planners.pipedream import planner as pipedream
from penstock.solvers.planners.proposal import Proposal
from penstock.solvers.planners.setting import Setting
from penstock.solvers.planners.simple import dp, gpipe
from penstock.solvers.planners.simple.candidates import Simple, averaged, eagerly, flushed, grouped, starred
from penstock.solvers.planners.spp import planner as spp
from penstock.solvers.planners.trainer import planner as uniform
from penstock.solvers.planners.wpipe import double_buffered as pipedream_2bw
from penstock.solvers.planners.wpipe import planner as wpipe
from penstock.solvers.schedules.catalogue import SCHEDULES, SYNCHRONOUS, Parts, schedule_row, tried_with
from penstock.solvers.schedules.names import remedy_for

Proposals = Callable[[Setting, Mapping[str, object]], Iterator[Proposal]]
PHASES = ("polish", "selective", "closing")
"""The phases that follow the planners in ``auto``."""
EXCLUDE = Option(
    "exclude", "", "contained planners to leave out, separated by commas; also 'polish', 'selective' and 'closing'"
)


UNPINNED = Simple("synchronous", flushed("early-backward"), unpinned=True)
"""The simplest plans under early backward, without pins as well."""


class Tier(IntEnum):
    """The order in which ``auto`` runs planners; of equal plans, ``auto`` keeps the first."""

    SIMPLE = 0
    """Planners of which at least one has a plan within a second."""
    SEARCH = 1
    PROOF = 2
    """Planners that work for long, for a proof or for many devices."""


@dataclass(frozen=True, slots=True)
class Planner:
    """A planner. ``proposals(setting, options)`` yields what to simulate; None for ``auto``, which runs all others.

    - ``schedules``: the schedules that may be requested, beside the schedules that name the planner (``accepts``).
    - ``parts``: the arrangements of parts that the planner lays out without an order; schedules that name the planner
      are for these.
    - ``supports``: the update rules of its plans.
    - ``exact``: its best plan is optimal over what it searches, by its own estimate; it does not run where any plan
      that fits will do.
    - ``makes``: the class of all its plans, if there is one. A bound that covers this class can make the planner
      needless.
    - ``early``: ``auto`` begins it first, since other planners need its bound to stop.
    - ``simple``: how it runs the simplest plans that keep the pins.
    - ``least_devices``: ``auto`` runs it from this many devices on, and first where that is more than one.
    - ``most_devices``: ``auto`` runs it up to this many devices, if any other planner takes more.
    - ``target``: its plans stay within what another trainer can express, so ``auto`` runs it only for requests with a
      target.
    - ``listed``: it has its best plans soon, because it ranks its candidates by a formula, without a search.
    - ``bounded``: its proposals depend on the setting's upper bound.

    Raises ``UnsupportedRequest`` for a schedule that does not exist.
    """

    name: str
    proposals: Proposals | None
    cites: str
    help: str
    schedules: tuple[str, ...] = ()
    parts: tuple[Parts, ...] = ("any",)
    supports: frozenset[UpdateRule] = SYNCHRONOUS
    tier: Tier = Tier.SEARCH
    exact: bool = False
    makes: Callable[[Problem], Covers] | None = None
    early: bool = False
    least_devices: int = 1
    most_devices: int = MAX_DENSE_DEVICES
    target: bool = False
    listed: bool = False
    bounded: bool = False
    options: Options = ()
    simple: tuple[Simple, ...] = ()

    def __post_init__(self) -> None:
        for schedule in self.schedules:
            schedule_row(schedule)

    @property
    def asks_others(self) -> bool:
        """True if it runs all other planners and has no proposals."""
        return self.proposals is None

    @property
    def accepts(self) -> tuple[str, ...]:
        """The names of the schedules that may be requested."""
        if self.asks_others:
            return tuple(SCHEDULES)
        return tuple(dict.fromkeys((*self.schedules, *(row.name for row in tried_with(self.name)))))

    def check(
        self, update_rules: frozenset[UpdateRule], schedule: str, options: Mapping[str, object]
    ) -> dict[str, Value]:
        """Return all options with their values; refuse what this planner never takes.

        Raises ``UnsupportedRequest`` for an unknown option or schedule and for update rules under which it makes no
        plans, ``InvalidDocument`` for a wrong value of an option.
        """
        self._refuse_schedule(schedule)
        if not update_rules & self.supports:
            supported = sorted(self.supports)
            raise UnsupportedRequest(
                f"planner {self.name!r} makes plans with the update rule {' or '.join(supported)} only; "
                f"the request allows {', '.join(sorted(update_rules))}",
                remedy=f"allow it: update_rules {[*sorted(update_rules), supported[0]]} (--update-rule {supported[0]})",
            )
        if schedule != "auto" and not SCHEDULES[schedule].supports & update_rules:
            supported = sorted(SCHEDULES[schedule].supports & self.supports)
            raise UnsupportedRequest(
                f"schedule {schedule!r} is for the update rule {' or '.join(supported)}; "
                f"the request allows {', '.join(sorted(update_rules))}",
                remedy=f"allow it (--update-rule {supported[0]}), or schedule auto",
            )
        return checked(self.name, self.options, options)

    def _refuse_schedule(self, schedule: str) -> None:
        if schedule == "auto" or schedule in self.accepts:
            return
        schedule_row(schedule)
        raise UnsupportedRequest(
            f"planner {self.name!r} does not combine with schedule {schedule!r}",
            remedy=f"one of {', '.join(('auto', *self.accepts))}",
        )


PLANNERS: dict[str, Planner] = {
    row.name: row
    for row in (
        Planner(
            "auto",
            None,
            "the planners below",
            "every planner in turn, the simple ones first; the best plan of all",
            supports=frozenset(get_args(UpdateRule)),
            target=True,
            options=(EXCLUDE, uniform.TRANSFORMER),
        ),
        Planner(
            "dp",
            dp.proposals,
            "ALGORITHMS 7.1",
            "data parallelism with gradient accumulation, with and without all-reduce overlap",
            ("early-backward", "gpipe"),
            tier=Tier.SIMPLE,
            makes=planned_apart,
            options=dp.OPTIONS,
            simple=(Simple("synchronous", flushed("early-backward")),),
        ),
        Planner(
            "gpipe",
            partial(gpipe.proposals, "gpipe", gpipe.BY_TIME),
            "GPipe (Huang et al., NeurIPS 2019)",
            "block partition, one device per stage, all forwards before all backwards",
            ("gpipe", "early-backward", "advance-forward"),
            tier=Tier.SIMPLE,
            makes=planned_apart,
            options=(gpipe.BY_TIME, gpipe.STAGES),
            simple=(Simple("synchronous", flushed("gpipe"), "straight"),),
        ),
        Planner(
            "model-parallel",
            partial(gpipe.proposals, "model-parallel", gpipe.BY_PARAMETERS),
            "DAPPLE section VII",
            "the model spread over the devices, one micro-batch in it at a time",
            ("model-parallel",),
            tier=Tier.SIMPLE,
            makes=planned_apart,
            options=(gpipe.BY_PARAMETERS, gpipe.STAGES),
            simple=(Simple("synchronous", flushed("model-parallel"), "straight"),),
        ),
        Planner(
            "even",
            even.proposals,
            "Megatron-LM (Narayanan et al., SC 2021), section 3",
            "equal stages, equally replicated, 1F1B or interleaved: every layout that people write by hand",
            ("early-backward", "interleaved"),
            parts=(),
            tier=Tier.SIMPLE,
            makes=one_pipeline,
        ),
        Planner(
            "dapple",
            dapple.proposals,
            "DAPPLE (Fan et al., PPoPP 2021)",
            "stages with replicas by memoised search, three placement policies, early backward",
            ("early-backward", "gpipe", "advance-forward"),
            makes=planned_apart,
            options=dapple.OPTIONS,
            simple=(UNPINNED,),
            bounded=True,
        ),
        Planner(
            "spp",
            spp.proposals,
            "SPP (Luo et al., INFOCOM 2022)",
            "devices in order of recursive minimum cuts, stages with replicas by threshold search, SPP's order",
            ("pe", "early-backward", "gpipe"),
            makes=planned_apart,
            options=spp.OPTIONS,
            simple=(Simple("synchronous", flushed("pe", "early-backward"), unpinned=True),),
        ),
        Planner(
            "hetpipe",
            hetpipe.proposals,
            "HetPipe (Park et al., USENIX ATC 2020)",
            "virtual workers with partitions of their own, data parallel with each other; two nodes at least",
            ("early-backward", "gpipe"),
            options=hetpipe.OPTIONS,
        ),
        Planner(
            "interleaved",
            chunked.interleaved_proposals,
            "Megatron-LM (Narayanan et al., SC 2021); breadth first (Lamy-Poirier, MLSys 2023)",
            "several parts of the model on each device, in a loop",
            parts=("loop",),
            makes=one_pipeline,
            listed=True,
            options=chunked.INTERLEAVED,
        ),
        Planner(
            "zero-bubble",
            chunked.zero_bubble_proposals,
            "zero bubble (Qi et al., ICLR 2024); controllable memory (Qi et al., NeurIPS 2024)",
            "backwards in two parts, weight gradients where a device would idle; stages in a line or in a V",
            parts=("line", "v", "own"),
            listed=True,
            options=chunked.ZERO_BUBBLE,
        ),
        Planner(
            "chimera",
            chunked.chimera_proposals,
            "Chimera (Li and Hoefler, SC 2021)",
            "pipelines in opposite directions over the same devices, which hold two copies of the model or more",
            parts=("both_ways",),
            options=chunked.CHIMERA,
        ),
        Planner(
            "relax",
            relax.proposals,
            "BOUNDS sections 2 and 3",
            "the plans whose proven bound is least, by one search over all partitions, replicas and placements",
            ("early-backward",),
            parts=(),
            tier=Tier.PROOF,
            makes=planned_apart,
            early=True,
            most_devices=relax.MOST_DEVICES,
            options=relax.OPTIONS,
            simple=(UNPINNED,),
        ),
        Planner(
            "uniform",
            uniform.proposals,
            "Megatron-LM (Narayanan et al., SC 2021), section 3",
            "with a target: plans that this trainer can express, every shape of equally replicated stages",
            ("early-backward", "gpipe", "interleaved", "looped-bfs-lifo", "zb-v"),
            parts=(),
            target=True,
            options=uniform.OPTIONS,
        ),
        Planner(
            "spread",
            spread.proposals,
            "BOUNDS section 1; Lagrangian prices on devices",
            "one pipeline over thousands of devices along the network's tree, the fewest devices for a time",
            ("early-backward",),
            tier=Tier.PROOF,
            makes=planned_apart,
            least_devices=MOST_LABELLED + 1,
            most_devices=sys.maxsize,
            simple=(Simple("synchronous", flushed("early-backward")),),
        ),
        Planner(
            "pipedream",
            pipedream.proposals,
            "PipeDream (Narayanan et al., SOSP 2019)",
            "partition and replication by dynamic programming; 1F1B without a flush where weight stashing is allowed",
            ("early-backward", "gpipe", "eager"),
            supports=frozenset({"synchronous", "weight_stashing"}),
            options=pipedream.OPTIONS,
            simple=(
                Simple("weight_stashing", eagerly("weight_stashing"), in_turn=True, unpinned=True),
                UNPINNED,
            ),
        ),
        Planner(
            "pipedream-2bw",
            pipedream_2bw.proposals,
            "PipeDream-2BW (Narayanan et al., ICML 2021)",
            "pipelines side by side with two weight versions, 1F1B without a flush",
            ("eager",),
            parts=(),
            supports=frozenset({"double_buffered"}),
            options=pipedream_2bw.OPTIONS,
            simple=(Simple("double_buffered", eagerly("double_buffered"), in_turn=True, unpinned=True),),
        ),
        Planner(
            "wpipe",
            wpipe.proposals,
            "WPipe (Yang et al., ICLR 2022)",
            "two groups of parts on the same devices, one of them a period ahead; d:w, layouts, M and recomputation",
            ("wpipe", "eager"),
            parts=(),
            supports=frozenset({"double_grouped"}),
            options=wpipe.OPTIONS,
            simple=(
                Simple("double_grouped", grouped, "folded", unpinned=True),
                Simple("double_grouped", eagerly("double_grouped"), in_turn=True, unpinned=True),
            ),
        ),
        Planner(
            "avgpipe",
            avgpipe.proposals,
            "AvgPipe (Chen et al., PPoPP 2023)",
            "parallel pipelines on the same devices, averaged elastically; forwards in advance, tuned degrees",
            ("advance-forward",),
            parts=(),
            supports=frozenset({"elastic_averaging"}),
            options=avgpipe.OPTIONS,
            simple=(Simple("elastic_averaging", averaged, "straight", unpinned=True),),
        ),
        Planner(
            "madpipe",
            madpipe.proposals,
            "MadPipe (Beaumont et al., 2022)",
            "memory-aware stages with two weight versions, one processor may hold several; 1F1B* without a flush",
            ("1f1b-star", "inside-out", "periodic-ilp"),
            parts=(),
            supports=frozenset({"double_buffered"}),
            options=madpipe.OPTIONS,
            simple=(Simple("double_buffered", starred, unpinned=True),),
        ),
        Planner(
            "exact",
            exact.proposals,
            "BOUNDS section 2; job shop with CP-SAT (ALGORITHMS 7.8)",
            "every partition, replication and placement of a small request, the best order proven",
            parts=(),
            tier=Tier.PROOF,
            exact=True,
            makes=planned_apart,
            options=exact.OPTIONS,
        ),
    )
}


def resolve(planner_name: str) -> Planner:
    """Return the planner of that name. Raises ``UnsupportedRequest`` with the names that are similar."""
    if planner_name in PLANNERS:
        return PLANNERS[planner_name]
    if planner_name in SCHEDULES:
        remedy: str | None = f"{planner_name!r} is a schedule: schedule={planner_name} (--schedule {planner_name})"
    else:
        schedule = remedy_for(planner_name, SCHEDULES)
        remedy = meant(planner_name, PLANNERS, schedule and f"as a schedule, {schedule}")
    raise UnknownMethod(f"no planner {planner_name!r}; there are {', '.join(PLANNERS)}", remedy=remedy)


def refuse_untried() -> None:
    """Raise ``UnsupportedRequest`` for a schedule that names a planner which does not exist or never tries it."""
    for row in SCHEDULES.values():
        for planner in map(resolve, row.tried_with):
            if row.parts not in planner.parts:
                raise UnsupportedRequest(
                    f"planner {planner.name!r} never tries schedule {row.name!r} for parts {row.parts!r}; "
                    f"it tries schedules for {', '.join(planner.parts) or 'no parts'}",
                    remedy="other planners in the schedule's tried_with, or the name among the planner's schedules",
                )


refuse_untried()
