"""One choice of a request that leaves degrees open, as far as it is known: its bounds, and its best plan.

Every choice has a bound on all of its plans from its load. Those of least load get a tighter one, and then the
tightest, from the memory that activations take over time, until it is known which is least: that is the request's.
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
from penstock.solvers.degrees.contract import Known, contract
from penstock.solvers.degrees.loads import Loads
from penstock.solvers.degrees.planned import asked_at, planned_cells
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.degrees import Choice, Degrees
from penstock.solvers.model.micro_batches import size_of
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Bound, Reason, Result, Status

LACKING = 0.1
"""Which part of a device's memory a choice may lack in its nearest plan and go on, where others have plans."""
MOST_RAISED = 32
"""How often the bound of the choice with the least one is tightened each time that the least of all is asked for."""


@dataclass
class Searched:
    """What is known of one choice: the bound on all of its plans, and the result of its best search.

    ``gpus``: the request; ``load_ns``: what its load alone takes; ``tightest``: whether no bound is left to be
    asked; ``far``: whether no plain layout was near the best plan of all choices; ``prove_bounds``: whether its
    last search looked for bounds, and for remedies where it found no plan. ``not_asked``: the planners that its
    last search by many did not ask, with the reasons; None where there was no such search, and ``dropped`` is why,
    if no bound is. ``asked``: the planners whose searches came to their end. ``known``: what was made of the
    choices on other nodes of the same kinds (``degrees.contract``). ``bounds_all``: whether its bound is needed for
    all plans: plans that leave a kind out are among those on all devices, unless one stage is shared out over all
    devices, or these are in other cells or in none.
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
    asked: set[str] = field(default_factory=set)
    dropped: str = ""
    known: Known | None = None
    bounds_all: bool = True
    _bound: Bound | None = None

    @cached_property
    def problem(self) -> Problem:
        """The choice as a problem, made when first asked for: of many choices most are ruled out by their load."""
        return contract(self.gpus, self.choice, self.known)

    @property
    def size(self) -> int:
        """What the planners' work grows with (``micro_batches.size_of``)."""
        return size_of(self.gpus) * self.cells // self.gpus.num_devices

    @property
    def bound(self) -> Bound:
        """The highest known bound."""
        if self._bound is None:
            self._bound = request_bound(self.problem)
        return self._bound

    @property
    def least_ns(self) -> int:
        """The bound, or the load as long as no bound was asked for."""
        return self.load_ns if self._bound is None else self._bound.bound_ns

    def tighten(self) -> None:
        """Ask for the next bound, which takes longer than those before."""
        self.tightest = self._bound is not None
        if self.tightest:
            self._keep(over_time_bound(self.problem))
        else:
            self._bound = request_bound(self.problem)

    def raised(self, _below_ns: float) -> Searched:
        """Return it with a higher bound, if one can be found."""
        least_ns = self.least_ns
        while self.least_ns == least_ns and not self.tightest:
            self.tighten()
        return self

    def is_below(self, limit_ns: float) -> bool:
        """Return whether no bound rules out plans below a time; asks for them as far as needed."""
        return Race([self]).next_below(lambda _self: limit_ns) is not None

    def _keep(self, *found: Bound | None) -> None:
        self._bound = max((self.bound, *filter(None, found)), key=lambda each: each.bound_ns)

    @property
    def by_load(self) -> bool:
        """Whether no bound but the load was asked for."""
        return self._bound is None

    @property
    def value_ns(self) -> int | None:
        """The time of its best plan; None as long as there is none."""
        return None if self.result is None or self.result.best is None else self.result.best.value_ns

    @property
    def is_one(self) -> bool:
        """Whether no GPUs share a layer, and none is left out."""
        return self.choice.degrees == Degrees() and self.choice.excluded is None

    @property
    def lacks_much(self) -> bool:
        """Whether no plan was found, and the nearest one lacks more than ``LACKING`` of a device's memory."""
        short = None if self.result is None or self.result.best is not None else self.result.shortage
        return short is not None and short.missing_bytes > LACKING * short.available_bytes

    @property
    def impossible(self) -> bool:
        """Whether it is proven that it has no plan."""
        return self.result is not None and self.result.status is Status.INFEASIBLE

    def by_value(self) -> tuple[bool, int, int]:
        """Return its place among choices: those with the best plans come first, those without one by their bound."""
        return self.value_ns is None, self.value_ns or 0, self.least_ns

    def take(self, result: Result) -> None:
        """Keep the higher bound, and the result of the last search whose plan is not worse than the known one."""
        if proven := [each for each in result.bounds if each.scope == REQUEST_SCOPE]:
            self._keep(*proven)
        known = self.value_ns
        if known is None or (result.best is not None and result.best.value_ns <= known):
            self.result = result


def choices_of(
    problem: Problem, known: Known | None = None, *, kinds: Sequence[str | None] = (None,)
) -> tuple[list[Searched], dict[Choice, UnsupportedRequest]]:
    """Return the choices of a request, and those that cannot be made, each with its reason.

    ``known``: what was made of them on other nodes of the same kinds. ``kinds``: each is left out in turn; None: all
    devices are there.
    """
    found: list[Searched] = []
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
                    found.append(Searched(problem, choice, len(cells), least_ns, known=known, bounds_all=alone))
    return found, refused


def _names(problem: Problem, cells: Cells) -> set[tuple[str, ...]]:
    return {tuple(problem.devices[gpu].name for gpu in cell) for cell in cells}


def kinds_apart(problem: Problem) -> tuple[str, ...]:
    """Return the kinds of devices that a plan may leave out: of devices of several kinds each, if no pin needs it.

    A slow kind can hold up the others. Plans within what a trainer can express use all devices, and codecs are chosen
    for the plan of a search.
    """
    if problem.within is not None or problem.codec:
        return ()
    kinds = sorted({device.kind for device in problem.devices})
    pinned = [{problem.devices[device].kind for device in pin.devices} for pin in problem.pins]
    return tuple(kind for kind in kinds if len(kinds) > 1 and all(each != {kind} for each in pinned))


def same_cells(part: Problem, whole: Problem, plan: Allocation) -> dict[int, int] | None:
    """Return the number in the whole of each cell of a plan for a part of the devices; None where it has not all."""
    number_of = {whole.names(cell): cell for cell in range(whole.num_devices)}
    used = {cell for stage in plan.stages for cell in stage.devices}
    numbers = {cell: number_of[part.names(cell)] for cell in used if part.names(cell) in number_of}
    return numbers if len(numbers) == len(used) else None


def _lanes_stay(problem: Problem) -> bool:
    """Return whether devices keep their lanes when others are left out: they are by a device's number in its node."""
    mixed = any(len({problem.devices[d].kind for d in node}) > 1 for node in problem.nodes())
    return not (mixed and any(cable.lanes > 1 for cable in problem.network.cables))


def least_of(problem: Problem, choices: Sequence[Searched], raised: int = MOST_RAISED) -> Bound:
    """Return the least of the choices' bounds, after it was tightened ``raised`` times or as far as it can be.

    No plan of the request takes less: a choice that the planner cannot take may have plans.
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

    Raises UnsupportedRequest where no choice can be made.
    """
    choices, refused = choices_of(problem)
    if not choices:
        raise next(iter(refused.values()))
    return least_of(problem, choices)
