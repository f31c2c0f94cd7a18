"""Answers that a child process works out, while the client waits; whoever hangs up ends it."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from fastapi import Request, Response

from penstock.service.asking import json_of, messages, unless_gone
from penstock.service.routes.bodies import json_response
from penstock.service.services import Service


async def told(service: Service, task: dict[str, Any], limit_s: float, kind: str) -> list[Any]:
    """What a child said of one kind."""
    async with service.children, aclosing(messages(service.forkserver, task, limit_s)) as said:
        return [message[kind] async for message in said if message["kind"] == kind]


async def result_of(request: Request, service: Service, task: dict[str, Any]) -> Any:
    """The result of a child, as plain data; None when the client has hung up."""
    found = await unless_gone(request.receive, lambda: told(service, task, service.settings.max_solve_s, "result"))
    return found[-1] if found else None


async def answered(request: Request, service: Service, task: dict[str, Any]) -> Response:
    """The result of a child, as it is sent."""
    return json_response(json_of(await result_of(request, service, task)))
