"""``/docs``: the API for people, made from the OpenAPI document; nothing is loaded from other sites."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

from penstock.service.http import readable_api
from penstock.service.pages.templating import PageRoute, page

router = APIRouter(tags=["pages"], include_in_schema=False, route_class=PageRoute, default_response_class=HTMLResponse)


@router.get("/docs")
def docs(request: Request) -> Response:
    """Show all routes with their parameters and answers, and examples that can be sent unchanged."""
    url = str(request.base_url).rstrip("/")
    return page(request, "reference.html", groups=readable_api.groups(request.app.openapi(), url))
