"""How an endpoint gets at the service."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from penstock.service.services import Service


def service_of(request: Request) -> Service:
    """The service of the app that answers."""
    service: Service = request.app.state.service
    return service


Access = Annotated[Service, Depends(service_of)]
