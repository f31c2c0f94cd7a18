"""The forty exchanges with a service that are recorded, in the order in which a new service answers them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.examples import tiny as samples

FEW_PLANS = {"termination": {"max_plans": 20}}
STORED = {"profile": "{profile}", "topology": "{topology}"}
WAIT = {"Prefer": "wait=300"}
JSON = "application/json"
NOTHING: Mapping[str, str] = {}


class Exchange(NamedTuple):
    """One request to the service; what it keeps of the answer stands in braces in later paths and bodies.

    ``keep`` names a place in the answer, such as ``result.plan_hash``. ``settle``: it is asked until its state is an
    end. ``digested``: the body is long, and none of it is prose.
    """

    name: str
    method: str
    path: str
    body: Any = None
    headers: Mapping[str, str] = NOTHING
    keep: Mapping[str, str] = NOTHING
    settle: bool = False
    digested: bool = False


def post(name: str, path: str, body: Any, **more: Any) -> Exchange:
    """Return an exchange that sends a document."""
    return Exchange(name, "POST", path, body, **more)


def get(name: str, path: str, **more: Any) -> Exchange:
    """Return an exchange that requests a document."""
    return Exchange(name, "GET", path, **more)


def _request(**more: Any) -> dict[str, Any]:
    return {**samples.tiny_request(), **FEW_PLANS, **more}


def _sweep() -> dict[str, Any]:
    return {**samples.tiny_sweep(), "request": _request()}


def _infeasible() -> dict[str, Any]:
    topology = samples.tiny_topology()
    topology["uniform"]["memory_bytes"] = 50_000_000
    return _request(topology=topology)


def _cut_short() -> dict[str, Any]:
    profile = samples.tiny_profile()
    return _request(profile={**profile, "layers": profile["layers"][:3]})


def _hanging_plan() -> dict[str, Any]:
    file = samples.tiny_plan_file()
    file["plan"]["schedule"]["rows"][0]["text"] = "B0 F0 F1 F2 B1 F3 B2 B3"
    return file


EXCHANGES: tuple[Exchange, ...] = (
    get("health", "/healthz"),
    get("ready", "/readyz"),
    get("operations", "/openapi.json"),
    get("examples", "/v1/examples", digested=True),
    get("planners", "/v1/planners"),
    post("store a profile", "/v1/profiles", samples.tiny_profile(), keep={"profile": "hash"}),
    post("store a topology", "/v1/topologies", samples.tiny_topology(), keep={"topology": "hash"}),
    get("a stored profile", "/v1/profiles/{profile}"),
    get("the stored topologies", "/v1/topologies"),
    post("plan", "/v1/plans", _request(), headers=WAIT, keep={"job": "id", "plan": "result.plan_hash"}),
    post("the same plan again", "/v1/plans", _request()),
    post("plan with stored documents", "/v1/plans", _request(**STORED, planner="gpipe"), headers=WAIT),
    post("plan what does not fit", "/v1/plans", _infeasible(), headers=WAIT, keep={"failed": "id"}),
    get("a job", "/v1/jobs/{job}"),
    get("jobs", "/v1/jobs?limit=2"),
    get("a job's events", "/v1/jobs/{job}/events?poll=1"),
    get("a plan", "/v1/plans/{plan}"),
    get("a plan file", "/v1/jobs/{job}/plan-file", digested=True),
    get("programs", "/v1/plans/{plan}/programs", digested=True),
    get("a program", "/v1/plans/{plan}/programs/0"),
    get("export as CSV", "/v1/plans/{plan}:export?to=csv"),
    get("export as a trace", "/v1/plans/{plan}:export?to=chrome-trace", digested=True),
    post("explain", "/v1/plans:explain", {"plan": "{plan}"}),
    post("verify", "/v1/plans:verify", samples.tiny_plan_file()),
    post("verify a plan that hangs", "/v1/plans:verify", _hanging_plan()),
    post("compare", "/v1/plans:compare", {"request": _request(), "planners": ["gpipe", "dapple"]}),
    post("import a topology", "/v1/topologies:import", samples.tiny_import()),
    post("import a layout", "/v1/layouts:import", samples.tiny_layout()),
    post("place", "/v1/placements", samples.tiny_placement()),
    post("sweep", "/v1/sweeps", _sweep(), keep={"sweep": "id"}),
    get("a sweep", "/v1/sweeps/{sweep}", settle=True),
    post("cancel what has ended", "/v1/jobs/{job}:cancel", None),
    Exchange("delete a job", "DELETE", "/v1/jobs/{failed}"),
    get("no such job", "/v1/jobs/{failed}"),
    post("layers are missing", "/v1/plans", _cut_short()),
    post("no such planner", "/v1/plans", _request(planner="gpip")),
    post("not JSON", "/v1/plans", "{", headers={"Content-Type": JSON}),
    get("page of a plan", "/plans/{plan}"),
    get("page of jobs", "/jobs"),
    get("no such page", "/nowhere"),
)
