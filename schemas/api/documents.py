"""Every document by name, with its JSON Schema: ``penstock schema`` and ``/v1/schemas`` show it."""

from __future__ import annotations

import json
from difflib import get_close_matches
from typing import Any

from penstock.schemas.api.agents import SyncReply, SyncRequest
from penstock.schemas.api.calibration import CalibrationOut, CalibrationRequest
from penstock.schemas.api.explanation import Explanation
from penstock.schemas.api.fits import FitsAnswer, FitsRequest
from penstock.schemas.api.jobs import JobEvent, JobOut, PlanComparison, ProblemDetails, ResultOut, RunOut, RunRequest
from penstock.schemas.api.layouts import LayoutImported, LayoutRequest
from penstock.schemas.api.placement import PlacementAnswer, PlacementRequest
from penstock.schemas.api.sweep import SweepOut, SweepRequest
from penstock.schemas.api.throughput import ThroughputOut, ThroughputRequest
from penstock.schemas.api.topology_import import TopologyImport, TopologyImported
from penstock.schemas.bundle import JobBundle, LaunchReport
from penstock.schemas.document import Part
from penstock.schemas.errors import UnknownName
from penstock.schemas.launch import LaunchSettings
from penstock.schemas.plan import Plan, PlanFile
from penstock.schemas.profile import ModelProfile, PipelineProfile
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology
from penstock.schemas.trace import Trace

DOCUMENTS: dict[str, type[Part]] = {
    "model-profile": ModelProfile,
    "pipeline-profile": PipelineProfile,
    "cluster-topology": ClusterTopology,
    "topology-import": TopologyImport,
    "topology-imported": TopologyImported,
    "plan-request": PlanRequest,
    "plan": Plan,
    "plan-file": PlanFile,
    "explanation": Explanation,
    "trace": Trace,
    "calibration-request": CalibrationRequest,
    "calibration": CalibrationOut,
    "throughput-request": ThroughputRequest,
    "throughput": ThroughputOut,
    "result": ResultOut,
    "plan-comparison": PlanComparison,
    "job": JobOut,
    "job-event": JobEvent,
    "run-request": RunRequest,
    "run": RunOut,
    "sweep-request": SweepRequest,
    "sweep": SweepOut,
    "placement-request": PlacementRequest,
    "placement": PlacementAnswer,
    "fits-request": FitsRequest,
    "fits": FitsAnswer,
    "layout-request": LayoutRequest,
    "layout-imported": LayoutImported,
    "launch-settings": LaunchSettings,
    "job-bundle": JobBundle,
    "launch-report": LaunchReport,
    "problem-details": ProblemDetails,
    "agent-sync-request": SyncRequest,
    "agent-sync-reply": SyncReply,
}


def schema_of(name: str) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a document. Raises UnknownName."""
    if name not in DOCUMENTS:
        nearest = get_close_matches(name, DOCUMENTS, 1)
        remedy = f"did you mean {nearest[0]!r}?" if nearest else f"one of {', '.join(DOCUMENTS)}"
        raise UnknownName(f"there is no document {name!r}", remedy=remedy)
    schema = DOCUMENTS[name].model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def schema_text(name: str) -> str:
    """Return the schema of a document as JSON for people. Raises UnknownName."""
    return json.dumps(schema_of(name), indent=2, ensure_ascii=False) + "\n"
