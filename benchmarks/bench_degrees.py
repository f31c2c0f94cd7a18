"""Every uniform layout of a request, simulated one by one, against the plan of ``auto`` over all degrees.

A uniform layout (``penstock.even_layout``) has equal stages, equally replicated, on all GPUs: tensor degree, stages,
virtual stages, micro-batch size, with optimizer states sharded or not, every layer recomputed or none. Layouts are
simulated from the least load on. A layout whose load alone takes longer than the ten best, or whose fixed bytes and
micro-batches in flight exceed the memory, is counted and not simulated. Beside them: the best plan of ``auto`` over all
degrees, and of degree 1 with the same effort. Prints Markdown, and ``name value unit target ok|MISSED`` for each row
with a target; refuses a profile whose best layout on H100 uses less than 25 % or more than 60 % of the peak.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the command line does: a process with one thread may fork

import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple, get_args

from penstock.convert import to_problem
from penstock.convert.answers import to_prediction
from penstock.examples.catalogue import cluster, profile, shape
from penstock.layouts.even import Even
from penstock.planning.inputs import with_open_degrees
from penstock.questions.solve import solve
from penstock.schemas.api.fits import Module
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.plan import Plan, Prediction
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import PlanRequest, Termination
from penstock.schemas.transformers.degrees import Degrees, Framework
from penstock.shapes.layout import FULL, Layout, divisors
from penstock.shapes.legality import broken
from penstock.shapes.profiles import profile_of
from penstock.solvers.costs.memory import activation_bytes, free_bytes, shortages, static_bytes
from penstock.solvers.costs.stage import stage_costs
from penstock.solvers.degrees.contract import contract
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model import degrees as solver_degrees
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.micro_batches import most_rows
from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.proposal import whole_backwards_bound_ns
from penstock.solvers.solve.searched import least_bound
from penstock.solvers.solve.warm import warm

BEST = 10
UTILISATION = (0.25, 0.60)
"""The range of an H100's peak that trained dense models reach."""


class Case(NamedTuple):
    """A request in words, and the largest ratio of its best plan's time to the best time of degree 1."""

    model: str
    cluster: str
    batch: int
    of_one: float | None = None

    def __str__(self) -> str:
        return f"{self.model} on {self.cluster}, {self.batch} samples"


CASES = (
    Case("llama-3-70b", "8x8xH100", 64, 0.65),
    Case("llama-3-8b", "1x8xH100", 64),
    Case("llama-3-8b", "8x8xH100", 64),
    Case("gpt-3-175b", "64x8xA100", 1536),
    Case("llama-3.1-405b", "64x8xH100", 512),
)


LARGEST = Case("llama-3.1-405b", "2048x8xH100", 2048)
"""A request whose uniform layouts are not listed."""
LOADS = 4096, "128x8xH100"
"""The number of choices whose loads are computed, and their cluster."""


class Judged(NamedTuple):
    """A layout that fits, and its time."""

    time_ns: int
    layout: Layout
    prediction: Prediction

    def __str__(self) -> str:
        one = self.layout
        text = f"TP{one.tensor} PP{one.pipeline} DP{one.data} b{one.micro_batch_size}"
        text += f" VP{one.virtual_stages}" if one.virtual_stages > 1 else ""
        text += " sharded" if one.sharding == "optimizer" else ""
        return text + (" recomputing" if one.recompute else "")


def least_ns(problem: Problem, plan: Allocation) -> int:
    """Return a bound on the plan's time: the busiest rank's work, or the bound of ``whole_backwards_bound_ns``."""
    work: dict[tuple[int, ...], int] = {}
    for stage in plan.stages:
        cost = stage_costs(problem, stage, most_rows(problem, plan))
        each = cost.forward_ns + cost.backward_ns + cost.recompute_ns
        work[stage.devices] = work.get(stage.devices, 0) + plan.num_micro_batches * each
    return max(max(work.values()), whole_backwards_bound_ns(problem, plan))


class Uniform:
    """The uniform layouts of a request; ``best``: at most ten, the quickest first."""

    def __init__(self, request: PlanRequest) -> None:
        assert isinstance(request.profile, ModelProfile)
        self.profile, self.problem = request.profile, to_problem(request)
        self.counts: Counter[str] = Counter()
        self.best: list[Judged] = []
        candidates = [each for even in self._choices() for each in self._candidates(even)]
        for bound_ns, _number, layout, allocation, even in sorted(candidates, key=lambda each: each[:2]):
            if len(self.best) == BEST and bound_ns >= self.best[-1].time_ns:
                self.counts["slower by load"] += 1
            else:
                self._judge(even, layout, allocation)

    def _choices(self) -> Iterator[Even]:
        for choice in self.problem.choices:
            yield Even(self.profile, contract(self.problem, choice))

    def _candidates(self, even: Even) -> Iterator[tuple[int, int, Layout, Allocation, Even]]:
        """Yield legal layouts that may fit, with a bound on their time."""
        for layout in self._layouts(even.cells):
            self.counts["layouts"] += 1
            assert self.profile.shape is not None
            if broken(self.profile.shape, layout, self.problem.num_devices):
                self.counts["illegal"] += 1
                continue
            allocation = even.allocation(layout)
            if not _may_fit(even.cells, allocation):
                self.counts["too large"] += 1
                continue
            yield least_ns(even.cells, allocation), self.counts["layouts"], layout, allocation, even

    def _layouts(self, cells: Problem) -> Iterator[Layout]:
        assert cells.choice is not None
        assert self.profile.shape is not None
        tensor, layers, batch = cells.choice.degrees.tensor, self.profile.shape.layers, cells.global_batch_size
        parts = sorted({*divisors(layers), *divisors(layers + 2)})
        sizes = [2**power for power in range(batch.bit_length())]
        recomputed: tuple[frozenset[Module], ...] = (frozenset(), FULL)
        for pipeline, chunks, size, again in product(divisors(cells.num_devices), parts, sizes, recomputed):
            data = cells.num_devices // pipeline
            if pipeline * chunks <= layers + 2 and size * data <= batch and (pipeline > 1 or chunks == 1):
                assert cells.choice.sharding is not None
                yield Layout(
                    tensor=tensor, pipeline=pipeline, data=data, virtual_stages=chunks, micro_batch_size=size,
                    global_batch_size=batch, sharding=cells.choice.sharding, recompute=again,
                    framework=self.profile.framework or "megatron",
                )  # fmt: skip

    def _judge(self, even: Even, layout: Layout, allocation: Allocation) -> None:
        try:
            orders = even.orders(layout, allocation)
        except InvalidDocument:
            self.counts["illegal"] += 1
            return
        self.counts["judged"] += 1
        timeline = simulate(even.cells, allocation, orders, overlap=even.cells.rules.overlap_all_reduce)
        if shortages(even.cells, allocation, timeline):
            self.counts["too large when judged"] += 1
            return
        candidate = Judged(timeline.time_per_global_batch_ns, layout, to_prediction(even.cells, self.profile, timeline))
        self.best = sorted([*self.best, candidate], key=lambda each: each.time_ns)[:BEST]


def _may_fit(problem: Problem, plan: Allocation) -> bool:
    """Return whether every rank can hold its states, and the micro-batches in flight at its first backward."""
    ranks, number = len({stage.devices for stage in plan.stages}), plan.num_micro_batches
    parts = len(plan.stages) // ranks
    for rank in range(ranks):
        stages = plan.stages[rank::ranks]
        ahead = ranks - rank - 1 if parts == 1 else 2 * (ranks - rank - 1) + (parts - 1) * ranks
        resident = sum(static_bytes(problem, stage).total for stage in stages)
        kept = [activation_bytes(problem, stage, most_rows(problem, plan)) for stage in stages]
        if resident + min(ahead + 1, number * parts) * min(kept) > free_bytes(problem, stages[0].devices):
            return False
    return True


class Answered(NamedTuple):
    """A result of the planners, and the seconds of CPU until its first plan and in all."""

    plan: Plan
    first_s: float
    seconds: float

    @property
    def time_ns(self) -> int:
        """The time of the best plan."""
        assert self.plan.prediction is not None
        return self.plan.prediction.time_per_global_batch_ns

    @property
    def gap(self) -> float:
        """The gap to the bound over all choices."""
        return self.plan.certificates[0].gap

    def __str__(self) -> str:
        """Return the plan in the words of a layout, with its planner."""
        stages, plan = self.plan.pipelines[0].stages, self.plan
        tensor = 1 if plan.degrees is None else plan.degrees.tensor
        replicas = sorted({len(stage.devices) // tensor for stage in stages})
        ranks = len({stage.devices for stage in stages})
        text = f"TP{tensor} PP{ranks} DP{'/'.join(map(str, replicas))} rows {plan.micro_batch_size}"
        text += f" VP{len(stages) // ranks}" if len(stages) > ranks else ""
        text += " sharded" if plan.sharding == "optimizer" else ""
        again = sum(stage.recompute != "none" for stage in stages)
        text += f", {again} of {len(stages)} stages recomputing" if again else ""
        return f"{text}; {plan.planner}, {plan.schedule.name}"


def answered(request: PlanRequest) -> Answered:
    """Run the planners in one process and return the result."""
    started, first = _cpu_s(), list[float]()
    answer = solve(request, on_incumbent=lambda _plan: first.append(_cpu_s() - started), workers=1)
    if answer.plan is None:
        raise SystemExit(f"bench-degrees: no plan: {answer.sentence}")
    return Answered(answer.plan, first[0], _cpu_s() - started)


def _cpu_s() -> float:
    """Return the seconds of CPU of this process and of its ended children."""
    return sum(os.times()[:4])


def main() -> None:
    """Run the requested cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="requests for this model alone; may be repeated")
    parser.add_argument("--cluster", help="requests on this cluster alone; another one with --model and --batch")
    parser.add_argument("--batch", type=int, help="samples of another request")
    parser.add_argument("--framework", choices=get_args(Framework), default="megatron", help="whose kernels and memory")
    parser.add_argument("--max-plans", type=int, default=8, help="plans of each planner that are judged")
    parser.add_argument("--uniform", action="store_true", help="the uniform layouts alone, without planners")
    parser.add_argument("--loads", action="store_true", help="what the loads of thousands of choices cost, alone")
    parser.add_argument("--largest", action="store_true", help=f"{LARGEST} alone, without uniform layouts")
    arguments = parser.parse_args()
    if arguments.loads:
        sys.exit(report_loads())
    warm()
    if arguments.largest:
        sys.exit(1 if report_largest(arguments.framework) else 0)
    cases = list(_cases(arguments.model, arguments.cluster, arguments.batch))
    if not cases:
        raise SystemExit(f"bench-degrees: none of the requests; they are {'; '.join(map(str, CASES))}")
    missed = sum(
        report(case, arguments.framework, arguments.max_plans, planned=not arguments.uniform) for case in cases
    )
    sys.exit(1 if missed else 0)


def _cases(models: Sequence[str] | None, topology: str | None, batch: int | None) -> Iterator[Case]:
    if batch is not None:
        if not models or topology is None:
            raise SystemExit("bench-degrees: --batch needs --model and --cluster")
        yield from (Case(model, topology, batch) for model in models)
        return
    for case in CASES:
        if case.model in (models or [case.model]) and case.cluster == (topology or case.cluster):
            yield case


def request_of(case: Case, framework: Framework, max_plans: int | None) -> PlanRequest:
    """Return a request with all degrees and shardings of a model; the shipped profile where it is of the framework."""
    shipped, kind = profile(case.model), case.cluster.rpartition("x")[2]
    model = shipped if shipped.framework == framework else profile_of(shape(case.model), framework, (kind,))
    request = PlanRequest(
        profile=model,
        topology=cluster(case.cluster),
        global_batch_size=case.batch,
        termination=Termination(max_plans=max_plans),
    )
    return with_open_degrees(request)


def report_largest(framework: Framework) -> int:
    """Print the planners' answer to the largest request, with the default effort; return the missed targets."""
    ours = answered(request_of(LARGEST, framework, None))
    print("| | s | tokens/s/GPU | MFU | gap | CPU s, first plan / all |\n|---|---|---|---|---|---|")
    _print_answer(f"{LARGEST}, planned", ours)
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    rows = [("answer", ours.seconds, "s", 120.0), ("peak", peak_gib, "GiB", 4.0)]
    return sum(_row(f"{LARGEST}: {name}", value, unit, target) for name, value, unit, target in rows)


def report_loads() -> int:
    """Print the cost of the loads of many choices, with the bound over all of them; return whether a target is missed.

    No profile has that many degrees: each of these has the costs of its tensor degree.
    """
    number, where = LOADS
    request = PlanRequest(profile=profile("llama-3.1-405b"), topology=cluster(where), global_batch_size=512)
    problem = to_problem(with_open_degrees(request))
    costs = {each.degrees.tensor: each for each in problem.variants}
    powers, sizes = (
        [2**power for power in range(11)],
        [3**three * 2**two for three, two in product(range(2), range(11))],
    )
    every = [
        solver_degrees.Degrees(tensor, context, expert, shares)
        for tensor, context, expert, shares in product(costs, powers, powers, sizes)
        if max(tensor * context, expert * shares) <= problem.num_devices
    ]
    degrees = every[: number // 2]
    many = replace(
        problem,
        variants=tuple(replace(costs[each.tensor], degrees=each) for each in degrees),
        choices=tuple(solver_degrees.Choice(*each) for each in product(degrees, ("none", "optimizer"))),
    )
    started = time.process_time()
    bound = least_bound(many)
    name = f"loads of {len(many.choices)} choices on {problem.num_devices} GPUs, bound {bound.bound_ns / 1e9:.1f} s"
    return _row(name, time.process_time() - started, "s", 2.0)


def report(case: Case, framework: Framework, max_plans: int, *, planned: bool) -> int:
    """Print one request's tables; return how many targets are missed. Exits where no such profile can be right."""
    request = request_of(case, framework, max_plans)
    started = time.process_time()
    uniform = Uniform(request)
    if not uniform.best:
        raise SystemExit(f"bench-degrees: no uniform layout of {case} fits")
    text = ", ".join(f"{number} {what}" for what, number in uniform.counts.items())
    print(f"\n**{case}, {framework}**: {text}; {time.process_time() - started:.1f} s of CPU.\n")
    print("| | s | tokens/s/GPU | MFU | gap | CPU s, first plan / all |\n|---|---|---|---|---|---|")
    for each in uniform.best:
        print(_line(str(each), each.prediction, ""), flush=True)
    _refuse_wrong(case, uniform.best[0].prediction.model_flops_utilisation)
    return _planned(case, request, uniform.best[0]) if planned else 0


def _planned(case: Case, request: PlanRequest, best: Judged) -> int:
    ours = answered(request)
    _print_answer("planned", ours)
    one = answered(request.model_copy(update={"degrees": Degrees()}))
    _print_answer("planned at degree 1", one)
    print()
    wanted = [
        ("time over the best uniform layout's", ours.time_ns / best.time_ns, "", 1.0),
        ("time over the best plan's of degree 1", ours.time_ns / one.time_ns, "", case.of_one or 1.0),
        ("gap over all choices", 100 * ours.gap, "%", 5.0),
        ("first plan", ours.first_s, "s", 2.0),
        ("answer", ours.seconds, "s", 60.0),
    ]
    return sum(_row(f"{case}: {name}", value, unit, target) for name, value, unit, target in wanted)


def _print_answer(title: str, answer: Answered) -> None:
    assert answer.plan.prediction is not None
    rest = f"{100 * answer.gap:.1f} % | {answer.first_s:.1f} / {answer.seconds:.1f}"
    print(_line(f"{title}: {answer}", answer.plan.prediction, rest), flush=True)


def _line(name: str, prediction: Prediction, rest: str) -> str:
    seconds = prediction.time_per_global_batch_ns / 1e9
    pace, used = prediction.tokens_per_s_per_gpu or 0.0, prediction.model_flops_utilisation or 0.0
    return f"| {name} | {seconds:.3f} | {pace:.0f} | {100 * used:.1f} % | {rest or '– | –'} |"


def _refuse_wrong(case: Case, used: float | None) -> None:
    low, high = UTILISATION
    if case.cluster.endswith("xH100") and used is not None and not low <= used <= high:
        raise SystemExit(
            f"bench-degrees: the best uniform layout of {case} uses {100 * used:.1f} % of the peak; dense models on "
            f"H100 use {100 * low:.0f}–{100 * high:.0f} %: the profile's times are wrong"
        )


def _row(name: str, value: float, unit: str, target: float) -> bool:
    missed = value > target
    print(f"{name} {value:.3f} {unit} {target} {'MISSED' if missed else 'ok'}", flush=True)
    return missed


if __name__ == "__main__":
    main()
