"""One job as the solver's chooser needs it: its problem on a set of devices, and its planner."""

from __future__ import annotations

from functools import cached_property

from penstock.convert import to_plan, to_problem
from penstock.convert.requested_degrees import choices_of
from penstock.placing.cluster import Cluster
from penstock.planning.solve import refuse_unsupported
from penstock.schemas.api.placement import Objective, PlacementJob
from penstock.schemas.errors import Fault, InvalidDocument, UnsupportedRequest
from penstock.schemas.plan import PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import PlanRequest, Training
from penstock.schemas.topology import ClusterTopology
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Result
from penstock.solvers.placement.choice import HostSet
from penstock.solvers.placement.limits import PlacementLimits
from penstock.solvers.placement.site import Chosen, Site
from penstock.solvers.planners.catalogue import resolve
from penstock.solvers.solve import choices, driver


class Job:
    """A job on the free devices of a cluster. Raises InvalidDocument where its profile covers no free device's kind."""

    def __init__(self, job: PlacementJob, cluster: Cluster, free: frozenset[int], where: str) -> None:
        assert isinstance(job.profile, ModelProfile)
        self.spec, self.cluster, self.profile = job, cluster, job.profile
        self._refuse_unplannable(where)
        costed_kinds = self._costed_kinds()
        usable = frozenset(number for number in free if cluster.devices[number].kind in costed_kinds)
        if not usable:
            kinds = sorted({cluster.devices[number].kind for number in free})
            raise InvalidDocument(
                f"no free device is of a kind that the profile {job.profile.name!r} was measured on",
                faults=(
                    Fault(
                        f"{where}/profile",
                        f"the profile has costs of {', '.join(costed_kinds)}; free are {', '.join(kinds)}",
                    ),
                ),
                remedy="profile the model on a free kind, or derive its costs from a profiled kind with topology.kinds",
            )
        self.left_out = len(free) - len(usable)
        self.site = Site(cluster.devices, cluster.network, usable)

    def _refuse_unplannable(self, where: str) -> None:
        spec = self.spec
        try:
            resolve(spec.planner).check(frozenset(spec.update_rules), spec.schedule, spec.options)
            refuse_unsupported(self._request(self.cluster.topology))
        except UnsupportedRequest as error:
            raise UnsupportedRequest(f"{where}: {error.detail}", remedy=error.remedy) from None
        priced = all(device.price is not None for device in self.cluster.devices)
        if spec.budget is not None and spec.budget.price_per_hour is not None and not priced:
            raise UnsupportedRequest(
                f"{where}/budget/price_per_hour: {self.cluster.topology.name!r} has devices without a price",
                remedy="give each device a price (per hour), or a budget of devices",
            )

    def _costed_kinds(self) -> list[str]:
        profiled = self.profile.device_kinds
        topology = self.cluster.topology
        return [
            *profiled,
            *(kind.name for kind in topology.kinds if topology.costed_from(kind.name, profiled) is not None),
        ]

    def limits(self, objective: Objective) -> PlacementLimits:
        """Return the limits of the job, for the solver."""
        budget, nodes = self.spec.budget, self.spec.nodes
        limits = (
            (None, None, None)
            if budget is None
            else (budget.devices, budget.price_per_hour, budget.time_per_global_batch_ns)
        )
        return PlacementLimits(objective, nodes.min, nodes.max, *limits)

    @property
    def limited(self) -> bool:
        """Return whether the job limits its planner."""
        limits = self.spec.termination
        counted = limits.max_plans is not None or limits.planned_effort != "thorough"
        return counted or limits.time_limit_ns is not None

    @cached_property
    def drawn(self) -> bool:
        """Return whether regular plans satisfy the job's constraints."""
        spec = self.spec
        plain = spec.planner == "auto" and spec.schedule in ("auto", "early-backward") and not spec.options
        return plain and "synchronous" in spec.update_rules and spec.target is None

    @cached_property
    def has_choices(self) -> bool:
        """Return whether the job leaves degrees of parallelism open."""
        whole = self._request(self.cluster.topology)
        return bool(choices_of(whole, self.profile, self.cluster.topology))

    def request(self, chosen: Chosen) -> PlanRequest:
        """Return the plan request of the job on a set of hosts."""
        return self._request(self.cluster.part(self.site.devices_of(chosen)))

    def _request(self, topology: ClusterTopology) -> PlanRequest:
        fields = {name: getattr(self.spec, name) for name in Training.model_fields}
        return PlanRequest(profile=self.profile, topology=topology, **fields)

    def problem(self, chosen: Chosen) -> Problem:
        """Return that request as a frozen problem."""
        return to_problem(self.request(chosen))

    def problem_of(self, option: HostSet) -> Problem:
        """Return the problem of a set's plan: its request at the plan's choice of degrees."""
        problem = self.problem(option.chosen)
        return problem if option.result is None else choices.problem_of(problem, option.result)

    def solve(self, problem: Problem, left_ns: int | None) -> Result:
        """Solve with the job's own planner, within its limits and the remaining time of the placement."""
        spec, own_ns = self.spec, self.spec.termination.time_limit_ns
        return (choices.solve if problem.choices else driver.solve)(
            problem,
            spec.planner,
            schedule=spec.schedule,
            time_limit_ns=left_ns if own_ns is None else min(own_ns, own_ns if left_ns is None else left_ns),
            max_plans=spec.termination.max_plans,
            effort=spec.termination.planned_effort,
            gap=spec.termination.gap,
            options=spec.options,
        )

    def file(self, option: HostSet) -> PlanFile:
        """Return the plan file of a set, with the hosts that it uses as its topology.

        A bound on all plans for the set also holds for plans on a part of it.
        """
        assert option.result is not None
        assert option.best is not None
        request = self.request(option.chosen)
        plan = to_plan(self.problem_of(option), request, option.best, option.result.bounds)
        if option.used == option.chosen:
            return PlanFile(plan=plan, request=request)
        part = self.request(option.used)
        return PlanFile(plan=plan.model_copy(update={"request_hash": part.content_hash()}), request=part)
