"""Answer placement requests: each job in turn, or all jointly; the choice, the table and the reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from penstock.convert.requests import inline_documents
from penstock.importers.cluster.hostlist import fold
from penstock.placing.cluster import Cluster
from penstock.placing.job_problem import Job
from penstock.placing.words import reasons, reasons_without
from penstock.planning.inputs import find_profile, find_topology, nanoseconds_of, with_open_degrees
from penstock.schemas.api.placement import (
    Placement,
    PlacementAnswer,
    PlacementJob,
    PlacementProgress,
    PlacementRequest,
    PlacementRow,
)
from penstock.schemas.api.terms import NO_TERMS, Terms
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.plan import PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import PlanRequest, Training
from penstock.schemas.topology import ClusterTopology
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.model.deadline import Deadline
from penstock.solvers.model.result import Status
from penstock.solvers.placement.choice import Choice, Chooser, HostSet
from penstock.solvers.placement.joint import shares
from penstock.solvers.placement.limits import PlacementLimits, price_of

OnProgress = Callable[[PlacementProgress], None]
"""A function that is called for every set of nodes that is finished."""


class Best(NamedTuple):
    """The best plan so far of a job: its nodes, and a function that verifies it and makes its file."""

    job: str
    hostlist: str
    file: Callable[[], PlanFile]


OnBest = Callable[[Best], None]
"""A function that is called whenever there is a better plan, for callers that may end the search."""

JOINT_WAYS = 4
"""The number of orders in which nodes are chosen once each job's number of nodes is known."""
ALONE = "one job, which may use all that is free"
IN_TURN = "jobs in the order of the request: each gets the best that those before it have left"
JOINTLY = (
    "jointly: the numbers of nodes whose weighted throughputs add up to most, exact over the numbers that were planned "
    "for each job as if it were alone; then the nodes themselves, the largest, the heaviest or the first job first, or "
    "each in turn the best that is left: whichever of these gives most"
)


def answer(request: PlacementRequest, terms: Terms = NO_TERMS, on_best: OnBest = lambda _best: None) -> PlacementAnswer:
    """Place the jobs of a request with inline documents.

    Raises InvalidDocument for names that the topology lacks and kinds that a profile lacks, Conflict without any
    free device, UnsupportedRequest for jobs that no planner supports. A job that fits nowhere is an answer, not an
    error.
    """
    topology = _inline(request)
    cluster = Cluster(topology)
    free = cluster.free(request.free, request.busy)
    placing = _Placing(request, cluster, free, terms.notify, on_best)
    choices = placing.jointly(free) if request.together == "joint" and len(request.jobs) > 1 else placing.in_turn(free)
    return PlacementAnswer(
        topology=topology.name,
        objective=request.objective,
        free_nodes=len({cluster.devices[number].node for number in free}),
        free_devices=len(free),
        choices=tuple(choices),
        method=ALONE if len(request.jobs) == 1 else JOINTLY if request.together == "joint" else IN_TURN,
    )


def place(
    profile: str | Path | ModelProfile,
    topology: str | Path | ClusterTopology,
    *,
    global_batch_size: int,
    free: Sequence[str] | None = None,
    busy: Sequence[str] | None = None,
    objective: str = "throughput",
    name: str = "job",
    time_limit: str | float | None = None,
    **more: Any,
) -> Placement:
    """Choose nodes and a plan for one job. ``more``: fields of PlacementJob (``nodes={"max": 8}``, ``budget=…``).

    ``degrees`` and ``sharding`` are chosen by default, and ``time_limit`` is read, as ``penstock.plan`` does.
    """
    job = {"name": name, "profile": find_profile(profile), "global_batch_size": global_batch_size, **more}
    request = PlacementRequest.parse(
        {
            "topology": find_topology(topology),
            "jobs": [job],
            "free": free,
            "busy": busy,
            "objective": objective,
            "time_limit_ns": nanoseconds_of(time_limit),
        },
        units=True,
    )
    return answer(with_open_jobs(request)).choices[0]


def with_open_jobs(request: PlacementRequest) -> PlacementRequest:
    """Return the request with jobs whose degrees are a choice, where plans of them may have some."""
    jobs = []
    for job in request.jobs:
        fields = {name: getattr(job, name) for name in Training.model_fields}
        open_to = with_open_degrees(PlanRequest(profile=job.profile, topology=request.topology, **fields))
        opened = {name: getattr(open_to, name) for name in ("degrees", "sharding", "memory")}
        jobs.append(job.model_copy(update=opened))
    return request.model_copy(update={"jobs": tuple(jobs)})


def _inline(request: PlacementRequest) -> ClusterTopology:
    """Return the topology. Raises InvalidDocument where it or a profile is named by hash only."""
    for job in request.jobs:
        job_request = PlanRequest(
            profile=job.profile, topology=request.topology, global_batch_size=job.global_batch_size
        )
        _profile, topology = inline_documents(job_request)
    return topology


class _Placing:
    """The jobs of one request, one after the other."""

    def __init__(
        self,
        request: PlacementRequest,
        cluster: Cluster,
        free: frozenset[int],
        on_progress: OnProgress,
        on_best: OnBest,
    ) -> None:
        self.request, self.cluster, self.whole = request, cluster, free
        self.on_progress, self.on_best = on_progress, on_best
        self._announced: HostSet | None = None
        for number in range(len(request.jobs)):
            self._job(number, free)
        self.deadline = Deadline(request.time_limit_ns)
        self.left = len(request.jobs) * (1 if request.together == "priority" else 1 + JOINT_WAYS)

    def in_turn(self, free: frozenset[int]) -> list[Placement]:
        """Place each job on the devices that the jobs before it have left."""
        placements = []
        for number, job in enumerate(self.request.jobs):
            if free:
                placements.append(self._placed(number, free))
            else:
                placements.append(_nothing_left(job))
            free -= {self.cluster.number_of[name] for name in placements[-1].devices}
        return placements

    def jointly(self, free: frozenset[int]) -> list[Placement]:
        """Choose the numbers of hosts for all jobs first, then the hosts."""
        worth = []
        for number, job in enumerate(self.request.jobs):
            choice = self._choice(self._job(number, free))
            worth.append({hosts: job.weight * job.global_batch_size / time for hosts, time in _times(choice).items()})
        hosts = {self.cluster.devices[number].node for number in free}
        hosts_of = shares(worth, len(hosts))
        every, jobs = range(len(hosts_of)), self.request.jobs
        orders = {
            tuple(sorted(every, key=lambda n: -hosts_of[n])),
            tuple(sorted(every, key=lambda n: -jobs[n].weight)),
            tuple(every),
        }
        ways = [self._in_order(free, order, hosts_of) for order in sorted(orders)]
        return max([*ways, self.in_turn(free)], key=self._worth)

    def _in_order(self, free: frozenset[int], order: Sequence[int], hosts_of: Sequence[int]) -> list[Placement]:
        """Choose the nodes themselves, with the number of hosts that each job was given."""
        placements: dict[int, Placement] = {}
        for number in order:
            wanted = hosts_of[number] > 0 and bool(free)
            placements[number] = (
                self._placed(number, free, hosts_of[number]) if wanted else _nothing_left(self.request.jobs[number])
            )
            free -= {self.cluster.number_of[name] for name in placements[number].devices}
        return [placements[number] for number in sorted(placements)]

    def _worth(self, placements: Sequence[Placement]) -> float:
        jobs = self.request.jobs
        return sum(job.weight * (each.samples_per_s or 0.0) for job, each in zip(jobs, placements, strict=True))

    def _placed(self, number: int, free: frozenset[int], hosts: int | None = None) -> Placement:
        try:
            job = self._job(number, free)
        except InvalidDocument as error:
            if free == self.whole:
                raise
            return _nothing_left(self.request.jobs[number], error.detail)
        choice = self._choice(job, hosts)
        return _placement(job, choice) if choice.best is not None else _nowhere(job, choice)

    def _job(self, number: int, free: frozenset[int]) -> Job:
        """Return a job. Raises InvalidDocument where too few devices are free for it."""
        job = Job(self.request.jobs[number], self.cluster, free, f"/jobs/{number}")
        refuse_too_many(job.spec, len(job.site.hosts), f"/jobs/{number}")
        return job

    def _choice(self, job: Job, hosts: int | None = None) -> Choice:
        limits = job.limits(self.request.objective)
        if hosts is not None:
            limits = replace(limits, least=hosts, most=hosts)

        deadline = Deadline(self.deadline.share_ns(self.left))
        self.left = max(1, self.left - 1)
        return Chooser(
            job.site,
            range(len(job.site.hosts)),
            limits,
            job,
            deadline,
            lambda chooser: self._tell(job, chooser),
        ).run()

    def _tell(self, job: Job, chooser: Chooser) -> None:
        """Report the progress of the search, and a better plan where there is one."""
        self.on_progress(_progress(job, chooser))
        best = chooser.best
        if best is not None and best is not self._announced:
            self._announced = best

            def file() -> PlanFile:
                chooser.certify_best()
                return job.file(best)

            hosts = fold([job.site.hosts[host].name for host, _count in best.used])
            self.on_best(Best(job.spec.name, hosts, file))


def refuse_too_many(job: PlacementJob, hosts: int, where: str) -> None:
    """Raise InvalidDocument where the minimum number of hosts exceeds the free ones."""
    if job.nodes.min > hosts:
        free = "1 is free" if hosts == 1 else f"{hosts} are free"
        raise InvalidDocument(
            f"{where}/nodes/min: the job {job.name!r} needs at least {job.nodes.min} nodes, and {free} for it",
            remedy=f"request at most {hosts} nodes, or wait until a job has ended",
        )


def _progress(job: Job, chooser: Chooser) -> PlacementProgress:
    best = chooser.best
    return PlacementProgress(
        job=job.spec.name,
        considered=len(chooser.options),
        settled=sum(option.settled for option in chooser.options),
        nodes=None if best is None else len(best.used),
        time_per_global_batch_ns=None if best is None or best.best is None else best.best.value_ns,
    )


def _times(choice: Choice) -> dict[int, int]:
    """Return the least time of each number of hosts that keeps the deadline."""
    best: dict[int, int] = {}
    for option in choice.options:
        if option.best is not None and choice.limits.keeps(option.best.value_ns):
            best[option.number] = min(option.best.value_ns, best.get(option.number, option.best.value_ns))
    return best


def _nothing_left(job: PlacementJob, why: str = "they have taken all that is free") -> Placement:
    return Placement(job=job.name, status="infeasible", why=(f"because of the other jobs: {why}",))


def _nowhere(job: Job, choice: Choice) -> Placement:
    """Return a placement without nodes: what is missing, and the least change of budget or nodes that would help."""
    limits, least = choice.limits, None
    if limits.devices is not None or limits.price is not None or limits.most is not None:
        hosts = range(len(job.site.hosts))
        freer = PlacementLimits("fastest_within_budget", limits.least, deadline_ns=limits.deadline_ns or NEVER_NS)
        least = Chooser(job.site, hosts, freer, job, Deadline(None)).run().best
    status: Literal["infeasible", "none_found"] = "infeasible" if choice.refuted else "none_found"
    return Placement(**_common(job, choice), status=status, why=reasons_without(job, choice, least))


def _common(job: Job, choice: Choice) -> dict[str, Any]:
    return {
        "job": job.spec.name,
        "rows": tuple(_rows(job, choice)),
        "considered": len(choice.options),
        "planned": sum(option.result is not None for option in choice.options),
        "every_set": choice.every_set,
    }


def _placement(job: Job, choice: Choice) -> Placement:
    best, common = choice.best, _common(job, choice)
    assert best is not None
    assert best.best is not None
    samples, time_ns = job.spec.global_batch_size, best.best.value_ns
    cost = choice.limits.cost(time_ns, best.devices_used)
    least = choice.bound_cost
    bound = max(choice.limits.value(cost if least is None else least, samples), choice.limits.value(cost, samples))
    value = choice.limits.value(cost, samples)
    nodes = tuple(job.site.hosts[host].name for host, _count in best.used)
    return Placement(
        **common,
        status="placed",
        nodes=nodes,
        hostlist=fold(nodes),
        devices=tuple(job.cluster.devices[number].name for number in job.site.devices_of(best.used)),
        plan_file=job.file(best),
        time_per_global_batch_ns=time_ns,
        samples_per_s=samples / time_ns * 1e9,
        value=value,
        bound=bound,
        gap=None if choice.limits.cheapest else bound / value - 1,
        why=reasons(job, choice, best, common["rows"]),
    )


def _rows(job: Job, choice: Choice) -> Iterable[PlacementRow]:
    """Yield a row per number of nodes; the chosen plan is in the row of the number that it uses."""
    samples, before, best = job.spec.global_batch_size, None, choice.best
    chosen_number = None if best is None else len(best.used)
    by_number = choice.by_number()
    if best is not None and chosen_number is not None:
        by_number.setdefault(chosen_number, [best])
    for number, options in sorted(by_number.items()):
        most = samples / min(option.bound_ns for option in options) * 1e9
        planned = [(option.best.value_ns, option.devices, option) for option in options if option.best is not None]
        if not planned and number != chosen_number:
            results = [option.result for option in options if option.result is not None]
            proven = len(results) == len(options) and all(r.status is Status.INFEASIBLE for r in results)
            devices = max(option.devices for option in options)
            yield PlacementRow(
                nodes=number,
                devices=devices,
                status="infeasible" if proven else "none_found" if results else "unplanned",
                most_samples_per_s=most,
            )
            continue
        if number == chosen_number and best is not None and best.best is not None:
            time_ns, devices, option = best.best.value_ns, best.devices_used, best
        else:
            time_ns, devices, option = min(planned, key=lambda each: each[:2])
        speed = samples / time_ns * 1e9
        yield PlacementRow(
            nodes=number,
            devices=devices,
            status="planned",
            time_per_global_batch_ns=time_ns,
            samples_per_s=speed,
            samples_per_s_per_device=speed / devices,
            most_samples_per_s=max(most, speed),
            gain_per_node=None if before is None else (speed - before[1]) / (number - before[0]),
            price_per_hour=price_of(job.site, option.used if number == chosen_number else option.chosen),
            within_budget=choice.limits.keeps(time_ns),
            chosen=number == chosen_number,
        )
        before = number, speed
