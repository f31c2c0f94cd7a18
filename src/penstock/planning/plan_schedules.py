"""Export a plan's order as PyTorch's schedule CSV, and import one into a plan (``torch_csv`` defines the format)."""

from __future__ import annotations

from typing import NamedTuple

from penstock.convert import to_plan
from penstock.convert.torch_csv import onto, remarks, to_csv
from penstock.planning.judge import judge
from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.schemas.plan import PlanFile
from penstock.solvers.bounds.schedule_bound import request_bound, schedule_bound
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.model.schedule import Orders
from penstock.solvers.verify.verifier import verify


def with_schedule(file: PlanFile, text: str) -> PlanFile:
    """Return the plan with the CSV's order on its stages and devices, judged, with simulated numbers and bounds.

    Raises as ``torch_csv.onto``, and InvalidPlan where the plan itself is invalid or the result does not verify.
    """
    judgement = judge(file)
    if judgement.allocation is None:
        raise InvalidPlan(f"the plan cannot be read: {judgement.faults[0]}", remedy="see `penstock verify`")
    problem = judgement.problem
    allocation, orders = onto(text, judgement.allocation)
    if allocation.num_micro_batches > problem.global_batch_size:
        raise UnsupportedRequest(
            f"the schedule runs {allocation.num_micro_batches} micro-batches; the plan's global batch has "
            f"{problem.batch_samples} samples",
            remedy=f"a schedule of at most {problem.global_batch_size} micro-batches, or a larger global batch",
        )
    overlap = file.plan.overlap_all_reduce
    timeline = simulate(problem, allocation, orders, overlap=overlap)
    if faults := verify(problem, allocation, orders, timeline, overlap=overlap):
        raise InvalidPlan(
            f"the plan with this schedule does not verify: {faults[0]}", remedy="another plan or schedule"
        )
    best = JudgedPlan.of(orders.name, allocation, orders, timeline, overlap, "synchronous")
    bounds = (request_bound(problem), schedule_bound(problem, allocation, orders, overlap=overlap))
    return PlanFile(plan=to_plan(problem, file.request, best, bounds), request=file.request)


class ScheduleText(NamedTuple):
    """An order as CSV, and in sentences the parts of the plan that the CSV format cannot hold."""

    text: str
    remarks: tuple[str, ...]


def schedule_csv(file: PlanFile) -> ScheduleText:
    """Return the plan's order as CSV.

    Raises InvalidPlan for a faulty plan, UnsupportedRequest for what PyTorch's format cannot express.
    """
    judgement = judge(file)
    if judgement.faults or judgement.allocation is None:
        raise InvalidPlan(f"the plan does not verify: {judgement.faults[0]}", remedy="see `penstock verify`")
    if not isinstance(judgement.schedule, Orders) or file.plan.update_rule != "synchronous":
        raise UnsupportedRequest(
            f"a PyTorch schedule is synchronous; schedule {file.plan.schedule.name} has {file.plan.update_rule} "
            "updates",
            remedy="a plan with update_rules: [synchronous]",
        )
    allocation, orders = judgement.allocation, judgement.schedule
    return ScheduleText(to_csv(allocation, orders), remarks(allocation, orders))
