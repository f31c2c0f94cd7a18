"""The questions of the Python API that take what ``penstock.plan`` takes: models and clusters by name, and keywords."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, Unpack

from penstock.planning.compare import answer as comparison
from penstock.planning.inputs import find_topology
from penstock.planning.sweep import MAX_CASES
from penstock.questions import layouts as judging
from penstock.questions.answer import PlanOptions, refuse_beside, request_of
from penstock.questions.naming import with_documents
from penstock.questions.sweep import sweep_rows
from penstock.schemas.api.jobs import CompareRequest, PlanComparison
from penstock.schemas.api.layouts import LayoutFormat, LayoutImported, LayoutRequest
from penstock.schemas.api.sweep import Axes, SweepRequest, SweepRow
from penstock.schemas.api.terms import Terms, unheard
from penstock.schemas.document import read_text
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology
from penstock.workers.solving import SolveLimits


def compare(
    profile: str | Path | Mapping[str, Any] | ModelProfile | PlanRequest | CompareRequest,
    topology: str | Path | ClusterTopology | None = None,
    *,
    planners: Sequence[str] = (),
    schedules: Sequence[str] = (),
    layouts: Sequence[str] = (),
    workers: int | None = None,
    on_row: Callable[[PlanComparison], None] = unheard,
    **options: Unpack[PlanOptions],
) -> tuple[PlanComparison, ...]:
    """Solve with each planner and each compatible schedule, and return a row for each.

    Parameters
    ----------
    profile, topology, **options
        The request, as ``penstock.plan`` takes it, or a ``CompareRequest`` alone.
    planners, schedules
        Names to compare. Left out: all.
    layouts
        Layouts of yours to list as well, such as ``"tensor=8,pipeline=4,micro-batch=1"``.
    workers
        Processes that search a large request. Left out: one per processor.
    on_row
        Called with each row when it is ready.

    Raises
    ------
    InvalidDocument, UnsupportedRequest
        As ``penstock.plan``, and for planners that support none of the schedules.
    """
    fields: dict[str, Any] = {"planners": tuple(planners), "schedules": tuple(schedules), "layouts": tuple(layouts)}
    if isinstance(profile, CompareRequest):
        refuse_beside({"topology": topology, **fields, **options})
        question = profile
    else:
        question = CompareRequest(request=request_of(profile, topology, options), **fields)
    return comparison(question, Terms(workers=workers, notify=on_row))


def sweep(
    profile: str | Path | Mapping[str, Any] | ModelProfile | PlanRequest | SweepRequest,
    topology: str | Path | ClusterTopology | None = None,
    *,
    over: Axes | Mapping[str, Any] | None = None,
    executor: Executor | None = None,
    on_row: Callable[[SweepRow], None] | None = None,
    limits: SolveLimits | None = None,
    max_cases: int = MAX_CASES,
    **options: Unpack[PlanOptions],
) -> tuple[SweepRow, ...]:
    """Plan each combination of the values in ``over``, and return a row for each with the Pareto front marked.

    Parameters
    ----------
    profile, topology, **options
        The request that is varied, as ``penstock.plan`` takes it, or a ``SweepRequest`` alone.
    over
        Values by axis: ``{"clusters": ["1x4xV100", "1x8xV100"], "global_batch_sizes": [32, 64]}``. Left out: one case.
    executor
        Where the solves run, as ``executor_of("local:4")`` makes it. Left out: processes of this machine.
    on_row
        Called with each row when it is ready.

    Raises
    ------
    InvalidDocument
        There are more than ``max_cases`` cases, or one contradicts itself. A case that fails is a row that says so.
    """
    if isinstance(profile, SweepRequest):
        refuse_beside({"topology": topology, "over": over, **options})
        question = profile
    else:
        axes = over if isinstance(over, Axes) else dict(over or {})
        planners = axes.planners if isinstance(axes, Axes) else axes.get("planners")
        request = request_of(profile, topology, options, many=not planners)
        data = with_documents(SweepRequest, {"schema_version": 1, "request": request, "over": axes})
        question = SweepRequest.parse(data)
    return sweep_rows(question, executor=executor, on_row=on_row, limits=limits, max_cases=max_cases)


def import_layout(
    layout: str | Path | LayoutRequest,
    topology: str | Path | ClusterTopology | None = None,
    *,
    format: LayoutFormat | None = None,
    workers: int | None = None,
    on_progress: Callable[[str], None] = unheard,
    **options: Any,
) -> LayoutImported:
    """Judge the layout that another trainer runs, and compare it with the best plans.

    Parameters
    ----------
    layout
        A file that the trainer reads or its log, or a ``LayoutRequest`` alone.
    topology
        The cluster: a document, a file name, or a name such as ``"4x8xH100"``.
    format
        The trainer that the layout is for: megatron, torchtitan, deepspeed or ranges.
    **options
        The other fields of ``LayoutRequest`` and of its job: ``model``, ``global_batch_size``, ``values``, ``compare``.
    workers
        Processes that search a large request. Left out: one per processor.
    on_progress
        Called with a sentence for each step.

    Raises
    ------
    InvalidDocument, UnsupportedRequest, InvalidPlan
        As ``questions.layouts.answer``.
    """
    if isinstance(layout, LayoutRequest):
        refuse_beside({"topology": topology, "format": format, **options})
        question = layout
    else:
        if topology is None or format is None:
            raise InvalidDocument("a layout needs a cluster and a format", remedy='pass "4x8xH100", format="megatron"')
        path = Path(layout)
        fields = {name: options.pop(name) for name in LayoutRequest.model_fields.keys() & options.keys()}
        data = {
            "schema_version": 1,
            "format": format,
            "layout": read_text(path),
            "source": path.name,
            "request": {"topology": find_topology(topology), **options},
            **fields,
        }
        question = LayoutRequest.parse(with_documents(LayoutRequest, data))
    return judging.answer(question, Terms(workers=workers, notify=on_progress))
