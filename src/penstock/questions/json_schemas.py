"""Every document by name, with its JSON Schema: ``penstock schema`` and ``/v1/schemas`` show it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, get_args

from penstock.questions.table import QUESTIONS
from penstock.schemas.api.agents import SyncReply, SyncRequest
from penstock.schemas.api.calibration import CalibrationOut
from penstock.schemas.api.explanation import Explanation
from penstock.schemas.api.fits import FitsAnswer
from penstock.schemas.api.jobs import JobEvent, JobOut, ProblemDetails, ResultOut, RunOut, RunRequest
from penstock.schemas.api.layouts import LayoutJob
from penstock.schemas.api.placement import PlacementAnswer
from penstock.schemas.api.sweep import SweepOut, SweepRequest
from penstock.schemas.api.throughput import ThroughputOut
from penstock.schemas.document import Part
from penstock.schemas.errors import UnknownName
from penstock.schemas.plan import Plan, PlanFile
from penstock.schemas.profile import ModelProfile, PipelineProfile
from penstock.schemas.ranks.bundle import JobBundle, LaunchReport
from penstock.schemas.ranks.launch import LaunchSettings
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology
from penstock.schemas.trace import Trace


def _name(document: type[Part]) -> str:
    """Return the name of a document: its kind, or else its class in words."""
    kind = getattr(document, "kind", None) or re.sub(r"(?<=[a-z])(?=[A-Z])", " ", document.__name__)
    return str(kind).lower().replace(" ", "-")


def _of_questions(named: Iterable[type[Part]]) -> dict[str, type[Part]]:
    """Return the requests and answers of questions that are not ``named`` already."""
    documents = {
        document: _name(document)
        for question in QUESTIONS.values()
        for document in (question.request, *(get_args(question.answer)[:1] or (question.answer,)))
    }
    return {name: document for document, name in documents.items() if document not in named}


DOCUMENTS: dict[str, type[Part]] = {
    "model-profile": ModelProfile,
    "pipeline-profile": PipelineProfile,
    "cluster-topology": ClusterTopology,
    "plan-request": PlanRequest,
    "plan": Plan,
    "plan-file": PlanFile,
    "explanation": Explanation,
    "trace": Trace,
    "calibration": CalibrationOut,
    "throughput": ThroughputOut,
    "result": ResultOut,
    "job": JobOut,
    "job-event": JobEvent,
    "run-request": RunRequest,
    "layout-job": LayoutJob,
    "run": RunOut,
    "sweep-request": SweepRequest,
    "sweep": SweepOut,
    "placement": PlacementAnswer,
    "fits": FitsAnswer,
    "launch-settings": LaunchSettings,
    "job-bundle": JobBundle,
    "launch-report": LaunchReport,
    "problem-details": ProblemDetails,
    "agent-sync-request": SyncRequest,
    "agent-sync-reply": SyncReply,
}
DOCUMENTS |= _of_questions(set(DOCUMENTS.values()))


def schema_of(name: str) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a document. Raises UnknownName."""
    if name not in DOCUMENTS:
        raise UnknownName.among("document", name, DOCUMENTS)
    schema = DOCUMENTS[name].model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def schema_text(name: str) -> str:
    """Return the schema of a document as JSON for people. Raises UnknownName."""
    return json.dumps(schema_of(name), indent=2, ensure_ascii=False) + "\n"
