"""Dependencies that give endpoints the service and the principal of a request.

An endpoint declares the scope that it needs by the type of a parameter: ``caller: Solver`` is the Principal, and a
request whose key lacks ``solve`` never reaches it. Where that parameter precedes the body in the signature, the request
is refused before its body is read. An endpoint without such a parameter is open to everybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from penstock.service.problems import problems
from penstock.service.security.authenticator import require
from penstock.service.security.principals import EVERYBODY, Principal, Scope
from penstock.service.services import Service
from penstock.service.settings import is_loopback


def service_of(request: Request) -> Service:
    """Return the service of the app that answers."""
    service: Service = request.app.state.service
    return service


class Needs:
    """A dependency that returns the Principal of a request whose key has ``scope``."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    async def __call__(self, request: Request) -> Principal:
        """Return the principal of the request. Raises Unauthenticated, Forbidden, QuotaExceeded."""
        principal = await service_of(request).authenticator.principal(request)
        require(principal, self.scope)
        return principal


@cache
def needs(scope: Scope) -> Needs:
    """Return the dependency for a scope."""
    return Needs(scope)


async def scraper(request: Request) -> Principal:
    """Return a principal that may read metrics: an admin, or anyone on loopback where the settings allow it."""
    address = request.client.host if request.client is not None else ""
    if service_of(request).settings.metrics_on_loopback and is_loopback(address):
        return EVERYBODY
    return await needs("admin")(request)


async def _service(request: Request) -> Service:
    """Return the service; asynchronous, as FastAPI calls other dependencies in a thread."""
    return service_of(request)


Access = Annotated[Service, Depends(_service)]
Reader = Annotated[Principal, Depends(needs("read"))]
Solver = Annotated[Principal, Depends(needs("solve"))]
Runner = Annotated[Principal, Depends(needs("run"))]
NodeAgent = Annotated[Principal, Depends(needs("agent"))]
Admin = Annotated[Principal, Depends(needs("admin"))]
Scraper = Annotated[Principal, Depends(scraper)]


def scope_of(route: APIRoute) -> Scope | None:
    """Return the scope that a route needs, or None where no key is needed."""
    for call in _calls(route.dependant):
        if isinstance(call, Needs):
            return call.scope
        if call is scraper:
            return "admin"
    return None


def every_route(routes: Iterable[Any]) -> Iterator[APIRoute]:
    """Yield the routes of an app, including its routers' routes."""
    for route in routes:
        if isinstance(route, APIRoute):
            yield route
        elif (router := getattr(route, "original_router", None)) is not None:
            yield from every_route(router.routes)


def describe_keys(schema: dict[str, Any], routes: Iterable[Any]) -> None:
    """Add to an OpenAPI document which key each route needs."""
    scheme = {"type": "http", "scheme": "bearer", "description": "a key of `penstock keys create`"}
    schema["components"].setdefault("securitySchemes", {})["key"] = scheme
    for route in every_route(routes):
        scope = scope_of(route) if route.include_in_schema else None
        for method in (route.methods or ()) if scope is not None else ():
            operation = schema["paths"][route.path_format][method.lower()]
            operation["security"] = [{"key": []}]
            operation["description"] = (
                f"{operation.get('description', '')}\n\nNeeds a key with scope `{scope}`.".strip()
            )
            for status, response in problems(401, 403, 429).items():
                operation["responses"].setdefault(str(status), response)


def _calls(dependant: Dependant) -> Iterator[Any]:
    for one in dependant.dependencies:
        yield one.call
        yield from _calls(one)


__all__ = [
    "Access",
    "Admin",
    "Needs",
    "NodeAgent",
    "Principal",
    "Reader",
    "Runner",
    "Scraper",
    "Solver",
    "describe_keys",
    "every_route",
    "needs",
    "scope_of",
    "service_of",
]
