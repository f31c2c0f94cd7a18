"""Reasons for a placement: what was chosen, the alternatives, what binds, and what is proven."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.placing.job_problem import Job
from penstock.schemas.amounts import amount, doubtful_memory, duration, percent, shortage
from penstock.schemas.api.placement import PlacementRow
from penstock.solvers.bounds.stage_times import StageTimes
from penstock.solvers.explanation.changes import link_of
from penstock.solvers.model.plan_shape import layers_need, shape
from penstock.solvers.placement.choice import Choice, HostSet


def reasons(job: Job, choice: Choice, best: HostSet, rows: Sequence[PlacementRow]) -> tuple[str, ...]:
    """Return the reasons as sentences, the most important one first."""
    return (
        _chosen(job, best),
        *_instead(choice, rows),
        *_busiest_link(job, best),
        *_proven(job, choice),
        *_left_out(job),
    )


def reasons_without(job: Job, choice: Choice, least: HostSet | None) -> tuple[str, ...]:
    """Explain why there is no placement; ``least``: the smallest one without a budget and with any number of nodes."""
    enough = [] if least is None else [f"the smallest set found without these limits is {_size(least)}"]
    return (*_missing_sentences(job, choice), *enough, *_left_out(job))


def _missing_sentences(job: Job, choice: Choice) -> list[str]:
    planned = [option for option in choice.options if option.best is not None]
    if planned:
        fastest = min(planned, key=lambda option: (option.best.value_ns if option.best else 0, option.devices))
        assert fastest.best is not None
        allowed = choice.limits.deadline_ns
        closest = f"the fastest that was found takes {duration(fastest.best.value_ns)} on {_size(fastest)}"
        return [f"no plan meets the deadline of {duration(allowed or 0)}: {closest}"]
    return _memory(job, choice) if choice.options else [_nothing_affordable(job, choice)]


def _chosen(job: Job, best: HostSet) -> str:
    assert best.best is not None
    speed = job.spec.global_batch_size / best.best.value_ns * 1e9
    devices = [[stage.devices for stage in pipeline.stages] for pipeline in best.best.allocation.pipelines]
    stages = f"{len(devices[0])} stages" if len(devices) == 1 and len(devices[0]) > 1 else shape(devices)
    choice = None if best.result is None else best.result.choice
    stages += "" if choice is None else f" at {choice}"
    return (
        f"{_size(best)}: {duration(best.best.value_ns)} per global batch, {speed:,.1f} samples/s, {stages}, "
        f"by {best.best.planner}"
    )


def _size(option: HostSet) -> str:
    return f"{_nodes(len(option.used))}, {option.devices_used} device{'s' if option.devices_used > 1 else ''}"


def _nodes(count: int) -> str:
    return f"{count} node{'s' if count > 1 else ''}"


def _instead(choice: Choice, rows: Sequence[PlacementRow]) -> list[str]:
    """Compare with the planned numbers of nodes next to the chosen one."""
    planned = [row for row in rows if row.status == "planned"]
    at = next((place for place, row in enumerate(planned) if row.chosen), None)
    if at is None:
        return []
    base, sentences = planned[at], []
    for row in planned[max(0, at - 1) : at] + planned[at + 1 : at + 2]:
        assert row.samples_per_s is not None
        assert base.samples_per_s is not None
        change = row.samples_per_s / base.samples_per_s - 1
        more = row.nodes - base.nodes
        word = _change(change)
        late = "" if row.within_budget else ", which misses the deadline"
        sentences.append(f"with {_nodes(row.nodes)}, {abs(more)} {'more' if more > 0 else 'fewer'}: {word}{late}")
    others = [option for option in choice.options if option.number == base.nodes and option.best is not None]
    if len(others) > 1:
        slowest = max(option.best.value_ns for option in others if option.best is not None)
        best_ns = base.time_per_global_batch_ns or 1
        sentences.append(
            f"of {len(others)} classes of {_nodes(base.nodes)} the slowest takes {percent(slowest / best_ns - 1)} more"
        )
    return sentences


def _change(share: float) -> str:
    """Format a difference in throughput with enough digits to be nonzero."""
    if share == 0:
        return "the same throughput"
    shown = percent(abs(share)) if abs(share) >= 0.0005 else f"{100 * abs(share):.1g} %"
    return f"{'+' if share > 0 else '−'}{shown} throughput"


def _busiest_link(job: Job, best: HostSet) -> list[str]:
    """Describe the cable between nodes that is in use for most of a step."""
    plan = best.best
    assert plan is not None
    problem = job.problem_of(best)
    if not problem.rules.shared or problem.network.matrix_bytes_per_s is not None or len(best.used) == 1:
        return []
    times = StageTimes(problem, plan.allocation, plan.schedule)
    loads: dict[str, int] = {}
    for resource, uses in times.resources.items():
        link = link_of(problem.network, resource)
        if link is not None and link not in problem.network.node_names:
            loads[link] = max(loads.get(link, 0), sum(use.load_ns for use in uses))
    if not loads:
        return []
    link, load = max(loads.items(), key=lambda item: item[1])
    share = min(1.0, load / plan.value_ns)
    return [f"the busiest link between nodes, {link}, is in use {percent(share)} of a step"]


def _proven(job: Job, choice: Choice) -> list[str]:
    limits, samples = choice.limits, job.spec.global_batch_size
    least = choice.bound_cost
    which = "which are all of them" if choice.every_set else "compact, even and mixed ones"
    number = len(choice.options)
    classes = f"{number} class{'es' if number > 1 else ''} of sets examined, {which},"
    sentences = []
    if least is not None:
        value = limits.value(least, samples)
        unit = {"throughput_per_device": "samples/s per device"}.get(limits.objective, "samples/s")
        limit = (
            f"can use fewer than {-value:.0f} devices"
            if limits.cheapest
            else f"can reach more than {value:,.4g} {unit}"
        )
        sentences.append(f"proven: no set of the {classes} {limit}, whatever the plan")
    if choice.cut_short:
        sentences.append(f"not all of them were searched for better plans: {choice.cut_short}")
    if choice.unplanned:
        sentences.append(f"{choice.unplanned} of the classes have no plan yet and are not proven to be worse")
    return sentences


def _left_out(job: Job) -> list[str]:
    if not job.left_out:
        return []
    return [f"{job.left_out} free devices are of kinds that the profile {job.profile.name!r} has no costs for"]


def _nothing_affordable(job: Job, choice: Choice) -> str:
    """Return the sentence that the budget does not cover a single device of any set."""
    limits = choice.limits
    if limits.price is None or limits.least > 1:
        return f"the budget allows no set of {_nodes(limits.least)} with a device on each"
    prices = [job.site.devices[device].price for host in job.site.hosts for device in host.devices]
    cheapest = min(price for price in prices if price is not None)
    return f"the budget is too small for {_nodes(limits.least)}: the cheapest free device costs {cheapest:g} per hour"


def _memory(job: Job, choice: Choice) -> list[str]:
    """Return sentences on the bytes that are missing on the nearest set."""
    tried = [option for option in choice.options if option.result is not None and option.result.shortage is not None]
    if not tried and choice.refuted:
        return list(dict.fromkeys(option.result.sentence for option in choice.options if option.result is not None))
    if not tried:
        return [choice.cut_short or "the time limit was reached before any plan was found"]
    nearest = min(tried, key=lambda option: (_missing(option), option.devices))
    assert nearest.result is not None
    short = nearest.result.shortage
    assert short is not None
    names = [job.cluster.devices[number].name for number in job.site.devices_of(nearest.chosen)]
    whole = sum(job.site.devices[device].memory_bytes for device in job.site.devices_of(nearest.chosen))
    most = f"on {_size(nearest)}, the nearest of {len(tried)} classes of sets ({amount(whole)} in all)"
    verdict = (
        "the job does not fit in memory on any set"
        if choice.refuted
        else ("no plan was found that fits in memory on any set; it is not proven that there is none")
    )
    return [
        f"{verdict}: {most}, {layers_need(short.first_layer, short.last_layer)} "
        f"{shortage(short.needed_bytes, short.available_bytes, f'device {names[nearest.gpus(short.device)[0]]!r}')}",
        *([short.remedy] if short.remedy else []),
        *([doubt] if (doubt := doubtful_memory(max(each.memory_bytes for each in job.site.devices))) else []),
    ]


def _missing(option: HostSet) -> int:
    shortage = None if option.result is None else option.result.shortage
    return 2**62 if shortage is None else shortage.missing_bytes
