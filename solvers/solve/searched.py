"""One choice of a request that leaves degrees open: its bounds, and its best plan so far.

Every choice has a bound on all of its plans from its load. The choices of least load get a tighter bound, and then the
tightest, from the memory that activations take over time, until the least bound is certain: it is the request's bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from penstock.schemas.coverage import REQUEST_SCOPE
from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.bounds.coverage import allowed
from penstock.solvers.bounds.over_time import over_time_bound
from penstock.solvers.bounds.race import Race
from penstock.solvers.bounds.schedule_bound import LOAD, request_bound
from penstock.solvers.degrees.cells import Cells
from penstock.solvers.degrees.contract import Problems, contract
from penstock.solvers.degrees.loads import Loads
from penstock.solvers.degrees.planned import asked_at, planned_cells
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.degrees import Choice, Degrees
from penstock.solvers.model.micro_batches import size_of
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Bound, Reason, Result, Status

LACKING = 0.1
"""Greatest shortage, as a part of a device's memory, of a choice without a plan that continues where others have plans.
"""
MOST_RAISED = 32
"""Most times that the least choice's bound is tightened per computation of the least bound of all."""


@dataclass
class Searched:
    """One choice: the bound on all of its plans, and the result of its best search.

    ``gpus``: the request. ``load_ns``: the time of its load alone. ``tightest``: whether no tighter bound is left to
    compute. ``far``: whether no plain layout was near the best plan of all choices. ``prove_bounds``: whether its last
    search looked for bounds, and for remedies if it found no plan. ``not_asked``: the planners that its last search by
    many
    planners did not run, with the reasons; None before such a search. ``dropped``: the reason, other than a bound, for
    which the choice does not continue. ``finished_planners``: the planners whose searches came to their end.
    ``problems``: the problems of choices on other nodes of the same kinds (``degrees.contract``). ``bounds_all``:
    whether
    the bound on all plans needs this choice's bound: plans that leave a kind out are among the plans on all devices,
    unless
    one stage is shared out over all devices, or these are in other cells or in none.
    """

    gpus: Problem
    choice: Choice
    cells: int
    load_ns: int
    result: Result | None = None
    tightest: bool = False
    far: bool = False
    prove_bounds: bool = False
    not_asked: Mapping[str, Reason] | None = None
    finished_planners: set[str] = field(default_factory=set)
    dropped: str = ""
    problems: Problems | None = None
    bounds_all: bool = True
    _bound: Bound | None = None

    @cached_property
    def problem(self) -> Problem:
        """The choice as a problem, made on first use: of many choices most are ruled out by their load."""
        return contract(self.gpus, self.choice, self.problems)

    @property
    def size(self) -> int:
        """The size that the planners' work grows with (``micro_batches.size_of``)."""
        return size_of(self.gpus) * self.cells // self.gpus.num_devices

    @property
    def bound(self) -> Bound:
        """The highest bound computed so far."""
        if self._bound is None:
            self._bound = request_bound(self.problem)
        return self._bound

    @property
    def least_ns(self) -> int:
        """The bound, or the load as long as no bound was computed."""
        return self.load_ns if self._bound is None else self._bound.bound_ns

    def tighten(self) -> None:
        """Compute the next bound, which takes longer than the bounds before."""
        self.tightest = self._bound is not None
        if self.tightest:
            self._keep(over_time_bound(self.problem))
        else:
            self._bound = request_bound(self.problem)

    def raised(self, _below_ns: float) -> Searched:
        """Return this choice with a higher bound, if there is one."""
        least_ns = self.least_ns
        while self.least_ns == least_ns and not self.tightest:
            self.tighten()
        return self

    def is_below(self, limit_ns: float) -> bool:
        """Return whether no bound rules out plans below a time; compute bounds until one does or none is left."""
        return Race([self]).next_below(lambda _self: limit_ns) is not None

    def _keep(self, *bounds: Bound | None) -> None:
        self._bound = max((self.bound, *filter(None, bounds)), key=lambda each: each.bound_ns)

    @property
    def by_load(self) -> bool:
        """Whether no bound but the load was computed."""
        return self._bound is None

    @property
    def value_ns(self) -> int | None:
        """The time of the choice's best plan; None before the first plan."""
        return None if self.result is None or self.result.best is None else self.result.best.value_ns

    @property
    def is_one(self) -> bool:
        """Whether no GPUs share a layer, and no kind of devices is left out."""
        return self.choice.degrees == Degrees() and self.choice.excluded is None

    @property
    def lacks_much(self) -> bool:
        """Whether no plan was found, and the nearest one lacks more than ``LACKING`` of a device's memory."""
        short = None if self.result is None or self.result.best is not None else self.result.shortage
        return short is not None and short.missing_bytes > LACKING * short.available_bytes

    @property
    def impossible(self) -> bool:
        """Whether the choice is proven to have no plan."""
        return self.result is not None and self.result.status is Status.INFEASIBLE

    def by_value(self) -> tuple[bool, int, int]:
        """Return the sort key among choices: the best plans come first, choices without a plan last, by their bound."""
        return self.value_ns is None, self.value_ns or 0, self.least_ns

    def take(self, result: Result) -> None:
        """Keep the higher bound, and the result of the last search whose plan is not worse than the previous one."""
        if proven := [each for each in result.bounds if each.scope == REQUEST_SCOPE]:
            self._keep(*proven)
        previous_ns = self.value_ns
        if previous_ns is None or (result.best is not None and result.best.value_ns <= previous_ns):
            self.result = result


def choices_of(
    problem: Problem, problems: Problems | None = None, *, kinds: Sequence[str | None] = (None,)
) -> tuple[list[Searched], dict[Choice, UnsupportedRequest]]:
    """Return the choices of a request, and the choices that cannot be made, each with its reason.

    ``problems``: the choices' problems on other nodes of the same kinds. ``kinds``: each is left out in turn; None: all
    devices are used.
    """
    choices: list[Searched] = []
    refused: dict[Choice, UnsupportedRequest] = {}
    whole: dict[Choice, set[tuple[str, ...]]] = {}
    for kind in kinds:
        loads: dict[Problem, Loads] = {}
        for choice in (each._replace(excluded=kind) for each in problem.choices or (Choice(),)):
            try:
                part = asked_at(problem, kind, choice.values)
                cells = planned_cells(part, choice._replace(excluded=None))
            except UnsupportedRequest as reason:
                refused[choice] = reason
            else:
                names = _names(part, cells) if len(kinds) > 1 else set()
                if kind is None:
                    whole[choice] = names
                there = names <= whole.get(choice._replace(excluded=None), set())
                alone = kind is None or choice.in_one_stage or not there
                if kind is None or not alone or _lanes_stay(problem):
                    least_ns = loads.setdefault(part, Loads(part)).least_ns(choice, cells)
                    choices.append(Searched(problem, choice, len(cells), least_ns, problems=problems, bounds_all=alone))
    return choices, refused


def _names(problem: Problem, cells: Cells) -> set[tuple[str, ...]]:
    return {tuple(problem.devices[gpu].name for gpu in cell) for cell in cells}


def kinds_apart(problem: Problem) -> tuple[str, ...]:
    """Return the kinds of devices that a plan may leave out: each of several kinds that no pin needs.

    A slow kind can hold up the others. Plans within what a trainer can express use all devices, and codecs are chosen
    for the plan of a search.
    """
    if problem.within is not None or problem.codec:
        return ()
    kinds = sorted({device.kind for device in problem.devices})
    pinned = [{problem.devices[device].kind for device in pin.devices} for pin in problem.pins]
    return tuple(kind for kind in kinds if len(kinds) > 1 and all(each != {kind} for each in pinned))


def same_cells(part: Problem, whole: Problem, plan: Allocation) -> dict[int, int] | None:
    """Return the number in ``whole`` of each cell that a plan of ``part`` uses; None if a cell is not in ``whole``."""
    number_of = {whole.names(cell): cell for cell in range(whole.num_devices)}
    used = {cell for stage in plan.stages for cell in stage.devices}
    numbers = {cell: number_of[part.names(cell)] for cell in used if part.names(cell) in number_of}
    return numbers if len(numbers) == len(used) else None


def _lanes_stay(problem: Problem) -> bool:
    """Return whether devices keep their channels when a kind is left out: a channel follows a device's number in its
    node.
    """
    mixed = any(len({problem.devices[d].kind for d in node}) > 1 for node in problem.nodes())
    return not (mixed and any(cable.lanes > 1 for cable in problem.network.cables))


def least_of(problem: Problem, choices: Sequence[Searched], raised: int = MOST_RAISED) -> Bound:
    """Return the least of the choices' bounds, after at most ``raised`` tightenings.

    No plan of the request takes less: a choice that the planner does not support may have plans.
    """
    needed = [each for each in choices if each.bounds_all]
    possible = [each for each in needed if not each.impossible] or needed
    Race(possible).least_ns(raises=raised)
    least = min(possible, key=lambda each: each.least_ns)
    if not problem.choices:
        return least.bound
    method, tolerance_ns = (LOAD, 0) if least.by_load else (least.bound.method, least.bound.tolerance_ns)
    sentence = f"the least, of {least.choice}: {method}"
    parts = tuple(each.choice for each in needed if each.choice.excluded)
    covers = allowed(replace(problem, choices=(*problem.choices, *parts)))
    return Bound(REQUEST_SCOPE, covers, least.least_ns, sentence, tolerance_ns)


def least_bound(problem: Problem) -> Bound:
    """Return the bound on every plan of a request that leaves choices open, from the load of each.

    Raises UnsupportedRequest if no choice can be made.
    """
    choices, refused = choices_of(problem)
    if not choices:
        raise next(iter(refused.values()))
    return least_of(problem, choices)
