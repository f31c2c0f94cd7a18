"""How an endpoint gets at the service, and at who is asking."""

from __future__ import annotations

from functools import cache
from typing import Annotated

from fastapi import Depends, Request

from penstock.service.security.principals import EVERYBODY, Principal, Scope
from penstock.service.services import Service


def service_of(request: Request) -> Service:
    """The service of the app that answers."""
    service: Service = request.app.state.service
    return service


class Needs:
    """A dependency that gives the Principal of a request whose key opens ``scope``; None: any valid key."""

    def __init__(self, scope: Scope | None) -> None:
        self.scope = scope

    async def __call__(self, request: Request) -> Principal:
        return EVERYBODY


@cache
def needs(scope: Scope | None) -> Needs:
    """The dependency for a scope; one object each, so that a request is looked at once."""
    return Needs(scope)


Access = Annotated[Service, Depends(service_of)]
Caller = Annotated[Principal, Depends(needs(None))]
Reader = Annotated[Principal, Depends(needs("read"))]
Solver = Annotated[Principal, Depends(needs("solve"))]
Runner = Annotated[Principal, Depends(needs("run"))]
NodeAgent = Annotated[Principal, Depends(needs("agent"))]
Admin = Annotated[Principal, Depends(needs("admin"))]

__all__ = [
    "Access",
    "Admin",
    "Caller",
    "Needs",
    "NodeAgent",
    "Principal",
    "Reader",
    "Runner",
    "Solver",
    "needs",
    "service_of",
]
