"""Old forms of requests, each with the version in which it is removed. They answer as the new form does.

Until 0.1 one URL stood for jobs and plans, and some verbs were the last segment of a path.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from anyio.to_thread import run_sync
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from starlette.convertors import Convertor, register_url_convertor

from penstock.service.http.requests.access import every_route, scope_of, service_of
from penstock.service.http.requests.once import Handle, OnceRoute
from penstock.service.security.authenticator import require


class OldForm(NamedTuple):
    """A former ``path``; ``{id:job}`` matches the id of a job but no hash."""

    method: str
    path: str
    new_path: str
    goes_in: str = "0.2.0"


OLD_FORMS = (
    OldForm("GET", "/v1/plans", "/v1/jobs"),
    OldForm("GET", "/v1/plans/{id:job}", "/v1/jobs/{id}"),
    OldForm("DELETE", "/v1/plans/{id:job}", "/v1/jobs/{id}"),
    OldForm("GET", "/v1/plans/{id:job}/events", "/v1/jobs/{id}/events"),
    OldForm("GET", "/v1/plans/{id:job}/incumbent", "/v1/jobs/{id}/incumbent"),
    OldForm("GET", "/v1/plans/{id:job}/plan", "/v1/jobs/{id}/plan-file"),
    OldForm("POST", "/v1/plans/{id:job}/cancel", "/v1/jobs/{id}:cancel"),
    OldForm("POST", "/v1/plans/{id:job}/finish", "/v1/jobs/{id}:finish"),
    OldForm("POST", "/v1/plans/{id:job}/retry", "/v1/jobs/{id}:retry"),
    OldForm("GET", "/v1/plans/{hash:job}/programs", "/v1/plans/{hash}/programs"),
    OldForm("GET", "/v1/plans/{hash:job}/programs/{rank}", "/v1/plans/{hash}/programs/{rank}"),
    OldForm("GET", "/v1/plans/{hash:job}/explain", "/v1/plans/{hash}:explain"),
    OldForm("GET", "/v1/plans/{hash:job}/export", "/v1/plans/{hash}:export"),
    OldForm("GET", "/v1/plans/{hash}/plan", "/v1/plans/{hash}/plan-file"),
    OldForm("GET", "/v1/plans/{hash}/explain", "/v1/plans/{hash}:explain"),
    OldForm("GET", "/v1/plans/{hash}/export", "/v1/plans/{hash}:export"),
    OldForm("POST", "/v1/sweeps/{id}/cancel", "/v1/sweeps/{id}:cancel"),
    OldForm("POST", "/v1/sweeps/{id}/finish", "/v1/sweeps/{id}:finish"),
    OldForm("POST", "/v1/runs/{id}/cancel", "/v1/runs/{id}:cancel"),
    OldForm("POST", "/v1/agents/{id}/sync", "/v1/agents/{id}:sync"),
)


def router_of(routers: Iterable[APIRouter]) -> APIRouter:
    """Return the old forms of the routes of some routers; include it before them."""
    register_url_convertor("job", _JobId())
    every = every_route(route for router in routers for route in router.routes)
    routes = {(method, one.path): one for one in every for method in one.methods or ()}
    old = APIRouter(include_in_schema=False)
    for form in OLD_FORMS:
        new = routes[form.method, form.new_path]
        old.add_api_route(
            form.path,
            new.endpoint,
            methods=[form.method],
            status_code=new.status_code,
            response_model=new.response_model,
            response_class=new.response_class,
            route_class_override=_OfJob if "{hash:job}" in form.path else OnceRoute,
        )
    return old


class _JobId(Convertor[str]):
    """A job's id in a path: unlike hashes it has no colon."""

    regex = "[^/:]+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


class _OfJob(APIRoute):
    """A plan's route, called with the id of the job that the plan came from."""

    def get_route_handler(self) -> Handle:
        """Return the route's handler, called with the hash of the job's plan in place of the job's id."""
        handle: Handle = super().get_route_handler()

        async def of_plan(request: Request) -> Response:
            service = service_of(request)
            caller = await service.authenticator.principal(request)
            if (scope := scope_of(self)) is not None:
                require(caller, scope)
            planning = service.planning.of(caller.tenant)
            address = await run_sync(planning.plan_hash, request.path_params["hash"])
            request.scope["path_params"] = request.path_params | {"hash": address}
            return await handle(request)

        return of_plan
