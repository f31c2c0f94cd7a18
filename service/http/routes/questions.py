"""The questions of ``penstock.questions.table``, each by POST, and the check of a request before it is planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Request, Response
from fastapi.routing import APIRoute

from penstock.examples.tiny import tiny_request
from penstock.questions.table import QUESTIONS, Question, json_of
from penstock.schemas.api.jobs import RequestChecked
from penstock.schemas.api.placement import PlacementRequest
from penstock.schemas.api.topology_import import ImportSource, TopologyImport, TopologyImported
from penstock.schemas.document import Document
from penstock.schemas.request import PlanRequest
from penstock.service.http.requests.access import Access, Solver
from penstock.service.http.requests.bodies import STREAM, json_response, reader, takes
from penstock.service.http.requests.children import result_of, streamed, wants_events
from penstock.service.http.requests.once import OnceRoute
from penstock.service.http.routes.plans import PlanRequestBody
from penstock.service.problems import problems
from penstock.service.runs.live_topology import living_topology
from penstock.service.services import Service

router = APIRouter(tags=["questions"])


@router.post(
    "/v1/plans:validate",
    response_model=RequestChecked,
    responses=problems(404, 413, 415, 422),
    openapi_extra=takes(PlanRequest, tiny_request()),
)
async def validate(caller: Solver, plan_request: PlanRequestBody, service: Access) -> RequestChecked:
    """Check a request without solving it; 422 names all faults that this finds, at once."""
    address, is_stored = await run_sync(service.planning.of(caller.tenant).checked, plan_request)
    return RequestChecked(request_hash=address, cached=is_stored)


def _within_limit(service: Service, _tenant: str, placement: PlacementRequest) -> PlacementRequest:
    """Limit the time of a placement request to the service's own limit."""
    if placement.time_limit_ns is None:
        return placement
    most_ns = round((service.settings.max_solve_s - service.settings.solve_grace_s) * 1e9)
    return placement.model_copy(update={"time_limit_ns": max(1, min(placement.time_limit_ns, most_ns))})


def _with_agents(service: Service, tenant: str, topology_import: TopologyImport) -> TopologyImport:
    """Return an import with the living agents among its sources, where it asks for them."""
    if not topology_import.agents:
        return topology_import
    living = living_topology(service.agents.everybody(tenant), service.stores.of(tenant).newest_topologies())
    source = ImportSource(text=living.text(), format="agents", name="the living agents")
    return topology_import.model_copy(update={"sources": (*topology_import.sources, source)})


def _stored(service: Service, tenant: str, topology_import: TopologyImport, answer: bytes) -> bytes:
    """Store the topology of an import, and return the answer with its hash."""
    if not topology_import.store:
        return answer
    imported = TopologyImported.model_validate_json(answer)
    address = service.stores.of(tenant).put(imported.topology)
    return imported.model_copy(update={"hash": address}).model_dump_json().encode()


BEFORE: dict[str, Callable[[Service, str, Any], Any]] = {"place": _within_limit, "import-topology": _with_agents}
"""Functions that prepare a request: they add the service's limits, or data that only the service has."""
AFTER: dict[str, Callable[[Service, str, Any, bytes], bytes]] = {"import-topology": _stored}
"""Functions that process an answer in the service."""


def _inline(service: Service, tenant: str, name: str, document: Document) -> Document:
    """Return a request with its stored documents inline, within the limits of the service."""
    inline = service.stores.of(tenant).resolve(document)
    if inline is not document:
        service.sizes.check(inline)
    prepare = BEFORE.get(name)
    return inline if prepare is None else prepare(service, tenant, inline)


async def answer(request: Request, service: Service, tenant: str, name: str, document: Document) -> bytes:
    """Return the answer to a question as JSON.

    Raises PenstockError for a refusal, TaskFailed where a child ends without an answer.
    """
    question = QUESTIONS[name]
    inline = await run_sync(_inline, service, tenant, name, document)
    if question.is_quick:
        return json_of(question.answer, await run_sync(question.here, inline, limiter=service.heavy))
    result = await result_of(request, service, tenant, name, inline)
    if name in AFTER:
        result = await run_sync(AFTER[name], service, tenant, document, result, limiter=service.heavy)
    return result


def _add(name: str, question: Question) -> None:
    """Add the route of a question."""
    body = Depends(reader(question.request))  # in no annotation: those are texts, which see no names of this function
    streams = not question.is_quick and name not in AFTER

    async def ask(request: Request, caller: Solver, service: Access, document: Any = body) -> Response:
        if streams and wants_events(request):
            inline = await run_sync(_inline, service, caller.tenant, name, document)
            return streamed(service, caller.tenant, name, inline)
        return json_response(await answer(request, service, caller.tenant, name, document))

    stream = "" if question.event is None else STREAMED.format(question.event[0])
    ask.__name__ = name.replace("-", "_")
    ask.__doc__ = "\n\n".join(part for part in (question.summary, question.about, stream) if part)
    content = {"content": STREAM} if streams else {}
    router.add_api_route(
        question.path,
        ask,
        methods=["POST"],
        route_class_override=OnceRoute if name in AFTER else APIRoute,
        tags=[question.tag],
        responses={
            200: {"model": question.answer, **content},
            **problems(404, 409, 413, 415, 422, *(() if question.is_quick else (503, 504))),
        },
        openapi_extra=takes(question.request, question.example()),
    )


STREAMED = (
    "With `Accept: text/event-stream` each `{}` is an event of that name as soon as it is known, the answer is the "
    "event `result`, and the last event is `end` or `problem`."
)
for _name, _question in QUESTIONS.items():
    _add(_name, _question)
