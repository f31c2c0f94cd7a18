"""The content of a plan's page, computed once: the service's page and the report render it by one template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.calibration.comparing import compared
from penstock.planning.bound_sentences import bound_sentence, bound_sentences, widest
from penstock.planning.headline import headline, most_better, proof, speed, taken_for_granted
from penstock.planning.sentences import pace, subtitle
from penstock.report.baselines import Baseline
from penstock.report.blocks import Bar, Bars, Bullets, Drawing, Facts, Section, Text
from penstock.report.cluster_map import cluster_map, traffic_blocks
from penstock.report.device_names import idle_sentence
from penstock.report.drawing.picture import Picture, rows_in_words
from penstock.report.explained import explained, in_words
from penstock.report.gists import cluster_words, devices_words, stages_words
from penstock.report.memory_curves import fullest, peaks
from penstock.report.plan_tables import alternatives_table, bounds_table, devices_table, operations_table, stages_table
from penstock.report.traffic import Flow
from penstock.schemas.amounts import amount, duration, percent
from penstock.schemas.api.explanation import Explanation
from penstock.schemas.api.jobs import Alternative
from penstock.schemas.plan import Certificate, Plan, PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.topology import ClusterTopology
from penstock.schemas.trace import Trace

SMALL_STAGES = 8
SMALL_DEVICES = 64
"""The largest numbers of stages and devices whose sections are open at first."""


@dataclass(frozen=True)
class PlanView:
    """The page of a plan: its head, its figures, sentences about it, and sections.

    ``rows``: what a row of the timeline stands for, where that is not one device; ``note``: about a measurement.
    """

    title: str
    headline: tuple[str, ...]
    faults: tuple[str, ...]
    figures: tuple[tuple[str, str], ...]
    note: str | None
    standing: Bars | None
    sentences: tuple[str, ...]
    rows: str | None
    sections: tuple[Section, ...]

    def having(self, *further: Section) -> PlanView:
        """Return the view with further sections before the last one, which is on the plan's origin."""
        return replace(self, sections=(*self.sections[:-1], *further, self.sections[-1]))


def view_of(
    file: PlanFile,
    plan: Plan,
    picture: Picture,
    *,
    flows: Sequence[Flow],
    names: Sequence[str],
    explanation: Explanation | None = None,
    faults: Sequence[str] = (),
    trace: Trace | None = None,
    others: Sequence[Baseline] = (),
) -> PlanView:
    """Return the page of a plan. ``plan``: the judged plan of the file; ``names``: of all devices that flows number."""
    profile, topology = file.request.profile, file.request.topology
    assert isinstance(profile, ModelProfile)
    assert isinstance(topology, ClusterTopology)
    figures, note = _measured(plan, trace)
    return PlanView(
        title=f"{profile.name} on {topology.name}",
        headline=(headline(plan), speed(plan), proof(plan)),
        faults=tuple(faults),
        figures=(*_figures(plan), *figures),
        note=note,
        standing=standing(plan, others),
        sentences=tuple(_sentences(plan, topology, explanation)),
        rows=rows_in_words(picture),
        sections=tuple(_sections(file, plan, picture, flows, names, explanation)),
    )


def _sections(
    file: PlanFile,
    plan: Plan,
    picture: Picture,
    flows: Sequence[Flow],
    names: Sequence[str],
    explanation: Explanation | None,
) -> Iterator[Section]:
    profile, topology = file.request.profile, file.request.topology
    assert isinstance(profile, ModelProfile)
    assert isinstance(topology, ClusterTopology)
    if explanation is not None:
        yield explained(explanation)
    stages = stages_table(plan, profile)
    yield Section("stages", "Stages", stages_words(plan), (stages,), opened=stages.total <= SMALL_STAGES)
    yield _cluster(plan, topology, flows, names)
    yield Section("memory", "Memory", fullest(picture), (Drawing(peaks(picture)),))
    yield Section("devices", "Devices", devices_words(plan), (devices_table(plan),))
    yield _bounds(plan)
    yield Section("operations", "Operations", "the timeline as a table", (operations_table(picture),))
    yield _origin(plan, profile, topology)


def search(why: Sequence[str]) -> Section:
    """Return the section on how a plan was found; the first clause is the plan itself."""
    return Section("search", "How it was found", why[0], (Bullets(tuple(why[1:])),))


def compared_degrees(alternatives: Sequence[Alternative]) -> Section:
    """Return the section with the choices of degrees that were compared."""
    gist = f"{len(alternatives):,} choices of degrees, the best first"
    return Section("alternatives", "Degrees compared", gist, (alternatives_table(alternatives),))


def _figures(plan: Plan) -> Iterator[tuple[str, str]]:
    p = plan.prediction
    assert p is not None
    yield "time per global batch", duration(p.time_per_global_batch_ns)
    best = widest(plan.certificates)
    if best is not None:
        share, limits = most_better(best, p.time_per_global_batch_ns), taken_for_granted(best)
        yield f"at most better{f' ({limits})' if limits else ''}", percent(share) if share else "0 %: no plan is faster"
    yield f"stated error ({p.basis} costs)", f"± {percent(p.expected_error)}"
    yield "samples per second", f"{plan.global_batch_size / p.time_per_global_batch_ns * 1e9:,.1f}"
    yield "not computing (bubble)", percent(p.bubble)
    yield "peak memory", amount(p.peak_memory_bytes)
    if best is not None:
        yield "no plan can beat", duration(best.bound_ns)
    yield from pace(p)
    if p.cost_per_sample is not None:
        yield "cost per sample", f"{p.cost_per_sample:.3g}"


def standing(plan: Plan, others: Sequence[Baseline]) -> Bars | None:
    """Return the plan's time between the bound and the layouts that nobody had to search for; None without those."""
    p, best = plan.prediction, widest(plan.certificates)
    if p is None or not others:
        return None
    time_ns, error = p.time_per_global_batch_ns, p.expected_error
    rows = [Bar("this plan", (("time", float(time_ns)),), duration(time_ns), error=time_ns * error)]
    for each in others:
        lacks = f", a GPU lacks {amount(each.missing_bytes)}" if each.missing_bytes else ""
        text = f"{duration(each.time_ns)} ({each.time_ns / time_ns:.2f}×){lacks}"
        rows.append(
            Bar(each.name, (("time", float(each.time_ns)),), text, error=each.time_ns * error, is_pale=bool(lacks))
        )
    words = "" if best is None else f"no plan can beat {duration(best.bound_ns)} ({_bounded(best)})"
    caption = f"Time of one global batch; whiskers are the stated error of ± {percent(error)}."
    return Bars(tuple(rows), caption, None if best is None else best.bound_ns, words)


def _bounded(bound: Certificate) -> str:
    limits = taken_for_granted(bound)
    return f"of this request, {limits}" if limits else "of this request"


def _measured(plan: Plan, trace: Trace | None) -> tuple[Sequence[tuple[str, str]], str | None]:
    """Return figures of a measured run, and a note where they cannot be compared."""
    if trace is None or not trace.measured_times_per_global_batch_ns:
        return (), None
    assert plan.prediction is not None
    times = sorted(trace.measured_times_per_global_batch_ns)
    ranks = [rank.hardware for rank in trace.ranks if rank.hardware is not None]
    comparison = compared(plan.prediction.time_per_global_batch_ns, times[len(times) // 2], ranks)
    return comparison.figures(), comparison.note


def _sentences(plan: Plan, topology: ClusterTopology, explanation: Explanation | None) -> Iterator[str]:
    """Yield what the first screen says: what binds, who is idle, how good the plan is."""
    assert plan.prediction is not None
    if explanation is not None:
        yield in_words(explanation)
    if (idle := idle_sentence(plan, topology)) is not None:
        yield idle
    if (bound := widest(plan.certificates)) is not None:
        yield bound_sentence(bound, plan.prediction.time_per_global_batch_ns)


def _cluster(plan: Plan, topology: ClusterTopology, flows: Sequence[Flow], names: Sequence[str]) -> Section:
    small = topology.num_devices <= SMALL_DEVICES
    key = "Numbers and colours are stages; pale squares are idle."
    key += " The thicker a line, the more data it carries." if small else ""
    drawn = Drawing(cluster_map(plan, topology, flows), key)
    blocks = (drawn, *traffic_blocks(plan, flows, names))
    return Section("cluster", "Cluster", cluster_words(plan, topology), blocks, opened=small)


def _bounds(plan: Plan) -> Section:
    number = len(plan.certificates)
    if not number:
        return Section("bounds", "Bounds", "This plan has no bound.", ())
    gist = f"{number} proven bound{'s' if number > 1 else ''}"
    return Section("bounds", "Bounds", gist, (Bullets(tuple(bound_sentences(plan))), bounds_table(plan.certificates)))


def _origin(plan: Plan, profile: ModelProfile, topology: ClusterTopology) -> Section:
    entries = (*plan.assumptions, *(each for each in profile.assumptions if each not in plan.assumptions))
    number = len(entries)
    source = profile.source
    costs = f"Costs: {source.method}{f'; {source.description}' if source.description else ''}"
    versions = ", ".join(f"{name} {version}" for name, version in sorted(plan.versions.items()))
    facts = Facts(
        (
            ("in words", subtitle(plan, topology)),
            ("plan", plan.content_hash()),
            ("request", plan.request_hash),
            ("seed", str(plan.seed)),
            ("made by", versions),
        )
    )
    return Section(
        "origin",
        "Assumptions and origin",
        f"{source.method} costs, {number} assumption{'' if number == 1 else 's'}",
        (Text(costs), *([Bullets(entries)] if entries else []), facts),
    )
