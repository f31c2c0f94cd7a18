"""Every question that is answered at once, as a row: its documents, its route, and the function that answers it.

Child processes, HTTP routes, both clients, the OpenAPI document, pages and ``penstock ask`` are made from these rows. A
further row, with the schemas and the function that it names, is a question on all of them: docs/extending.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from pydantic import TypeAdapter

from penstock.examples import tiny
from penstock.schemas.api.calibration import CalibrationOut, CalibrationRequest
from penstock.schemas.api.explanation import ExplainRequest, Explanation
from penstock.schemas.api.fits import FitsAnswer, FitsRequest
from penstock.schemas.api.jobs import CompareRequest, PlanComparison, Simulation, Verdict
from penstock.schemas.api.layouts import LayoutImported, LayoutRequest
from penstock.schemas.api.listing import ListAnswer, ListRequest
from penstock.schemas.api.placement import PlacementAnswer, PlacementProgress, PlacementRequest
from penstock.schemas.api.terms import NO_TERMS, Terms
from penstock.schemas.api.throughput import ThroughputOut, ThroughputRequest
from penstock.schemas.api.topology_import import TopologyImport, TopologyImported
from penstock.schemas.document import Document
from penstock.schemas.errors import UnknownName
from penstock.schemas.plan import PlanFile, PlanQuestion


def _never(_request: Any) -> bool:
    """Return false: a question of closed forms searches for no plan."""
    return False


def _no_plans(_answer: Any) -> Iterable[PlanFile]:
    """Return no plans, for answers that contain none of ours."""
    return ()


@dataclass(frozen=True, kw_only=True)
class Question:
    """A row of ``QUESTIONS``: the documents, the route, and the function that answers."""

    summary: str
    """One sentence: what the answer says."""
    about: str = ""
    """Further sentences for users, in Markdown."""
    path: str
    """The route of the service."""
    tag: str = "questions"
    request: type[Document]
    answer: Any
    """The type of the answer: a model, or a tuple of them."""
    entry: str
    """``module:function`` with the request, whose documents are inline, and the terms."""
    example: Callable[[], dict[str, Any]]
    """A request that can be sent as it is."""
    event: tuple[str, Any] | None = None
    """Name and type of the messages before the answer, such as each row of a table as soon as it is known."""
    is_quick: bool = False
    """Whether it is answered in the process that is asked: closed forms, or one plan judged."""
    plans: Callable[[Any], bool] = _never
    """Whether a request searches for a plan, which may take as long as a solve."""
    plan_files: Callable[[Any], Iterable[PlanFile]] = _no_plans
    """The plans of our own planners in an answer, which nobody gets unless they verify."""

    def here(self, request: Document, terms: Terms = NO_TERMS) -> Any:
        """Answer a request, whose documents are inline, on this machine."""
        module, _, name = self.entry.partition(":")
        return getattr(import_module(module), name)(request, terms)


def _placed(answer: PlacementAnswer) -> Iterable[PlanFile]:
    """Yield the plans of a placement's jobs."""
    return (choice.plan_file for choice in answer.choices if choice.plan_file is not None)


def _best_within(answer: LayoutImported) -> Iterable[PlanFile]:
    """Yield the best plan within the limits of the layout's trainer, if it has a plan."""
    rivals = answer.rivals[: answer.request.target is not None]
    return (PlanFile(plan=rival.plan, request=answer.request) for rival in rivals if rival.plan is not None)


QUESTIONS: dict[str, Question] = {
    "verify": Question(
        summary="Whether a plan keeps all rules, in a sentence per fault.",
        about="A plan with faults is an answer, not an error.",
        path="/v1/plans:verify",
        request=PlanQuestion,
        answer=Verdict,
        entry="penstock.planning.judge:verdict",
        example=tiny.tiny_plan_file,
        is_quick=True,
    ),
    "simulate": Question(
        summary="A plan with its simulated prediction.",
        about="A plan that cannot be simulated (deadlock, shape) is refused.",
        path="/v1/plans:simulate",
        request=PlanQuestion,
        answer=Simulation,
        entry="penstock.planning.judge:simulation",
        example=tiny.tiny_plan_file,
        is_quick=True,
    ),
    "compare": Question(
        summary="The plans of each planner with each of its schedules, on one request.",
        about="`planners` and `schedules` restrict them. Each of `layouts` has a row of planner `yours`. A planner "
        "that cannot take the request has a row with status `unsupported`, whose `why` says what it can take.",
        path="/v1/plans:compare",
        request=CompareRequest,
        answer=tuple[PlanComparison, ...],
        entry="penstock.planning.compare:answer",
        example=tiny.tiny_compare,
        event=("row", PlanComparison),
        plans=lambda _request: True,
    ),
    "explain": Question(
        summary="What a plan's time is made of, what limits it, and what would help.",
        about="A plan that cannot be simulated is refused. With `layout` the answer compares stages of yours, with "
        "`why_not` other degrees, with `what_if` changes of cluster, model or request.",
        path="/v1/plans:explain",
        request=ExplainRequest,
        answer=Explanation,
        entry="penstock.planning.explain:answer",
        example=tiny.tiny_explain,
        event=("progress", str),
        plans=lambda request: bool(request.what_if or request.why_not),
    ),
    "fits": Question(
        summary="Which degrees of parallelism are legal for a transformer on a cluster, and which fit into its memory.",
        about="Closed forms, no search. That nothing fits is an answer. A degree that no layout can have is refused, "
        "with the rule and the nearest legal values.",
        path="/v1/fits",
        request=FitsRequest,
        answer=FitsAnswer,
        entry="penstock.planning.fits:answer",
        example=tiny.tiny_fits,
        is_quick=True,
    ),
    "list": Question(
        summary="The names of models, clusters, planners, schedules or devices that requests may use.",
        path="/v1/names:list",
        request=ListRequest,
        answer=ListAnswer,
        entry="penstock.questions.listing:answer",
        example=lambda: {"schema_version": 1, "what": "planners"},
        is_quick=True,
    ),
    "place": Question(
        summary="The nodes that each job should get, with its plan, the results for other numbers of nodes, and why.",
        about="A job that fits nowhere is an answer, with the bytes that are missing. It is refused where no device "
        "is free, and for nodes that the topology lacks. Without `time_limit_ns` large sets of nodes get regular "
        "layouts only, which takes seconds.",
        path="/v1/placements",
        request=PlacementRequest,
        answer=PlacementAnswer,
        entry="penstock.placing:answer",
        example=tiny.tiny_placement,
        event=("progress", PlacementProgress),
        plans=lambda _request: True,
        plan_files=_placed,
    ),
    "calibrate": Question(
        summary="A profile and a topology corrected by the traces of runs.",
        about="`GET /v1/runs/{id}/trace` has the traces.",
        path="/v1/profiles:calibrate",
        request=CalibrationRequest,
        answer=CalibrationOut,
        entry="penstock.calibration.calibrate:answer",
        example=tiny.tiny_calibration,
    ),
    "calibrate-throughput": Question(
        summary="The pace of one run folded into a kind of device, and other plans predicted before and after.",
        path="/v1/profiles:calibrate-throughput",
        request=ThroughputRequest,
        answer=ThroughputOut,
        entry="penstock.calibration.throughput:answer",
        example=tiny.tiny_throughput,
    ),
    "import-topology": Question(
        summary="One topology of what Slurm, Kubernetes, drivers and fabric tools print.",
        about="No file that the texts name is opened. The answer says what was assumed and which nodes were left out. "
        "It is refused, all faults at once, for what cannot be read, by line and column, for contradictions, and for "
        "whatever neither sources nor options say. A service keeps the topology under its hash, unless `store` is "
        "false; with `agents` its living agents are a source as well.",
        path="/v1/topologies:import",
        request=TopologyImport,
        answer=TopologyImported,
        entry="penstock.importers.cluster.formats:answer",
        example=tiny.tiny_import,
    ),
    "import-layout": Question(
        summary="A layout of Megatron, torchtitan or DeepSpeed as a plan with simulated times.",
        about="A request without a model or a batch takes the text's. `rivals` has the best plan that the same "
        "trainer can express, and the best of all; `compare: false` leaves them out. Limits of the request hold for "
        "each of their solves. A layout that does not fit memory is an answer. What cannot be read is refused, by line "
        "and column, as is what does not go with model, cluster and batch.",
        path="/v1/layouts:import",
        request=LayoutRequest,
        answer=LayoutImported,
        entry="penstock.questions.layouts:answer",
        example=tiny.tiny_layout,
        event=("progress", str),
        plans=lambda request: bool(request.compare),
        plan_files=_best_within,
    ),
}
"""All of them by name."""


def question_of(name: str) -> Question:
    """Return a row by its name. Raises UnknownName, with the nearest name."""
    if name not in QUESTIONS:
        raise UnknownName.among("question", name, QUESTIONS)
    return QUESTIONS[name]


@cache
def adapter_of(kind: Any) -> TypeAdapter[Any]:
    """Return what converts values of a type to JSON and back."""
    return TypeAdapter(kind)


def json_of(kind: Any, value: Any, *, indent: int | None = None) -> bytes:
    """Return a value of a type as JSON."""
    return adapter_of(kind).dump_json(value, indent=indent)
