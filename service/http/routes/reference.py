"""``/docs``: the API for people, made from the OpenAPI document; nothing is fetched from elsewhere."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

from penstock.service.http import reference
from penstock.service.pages.layout import PageRoute, page

router = APIRouter(tags=["pages"], include_in_schema=False, route_class=PageRoute, default_response_class=HTMLResponse)


@router.get("/docs")
def docs(request: Request) -> Response:
    """All routes, with what they take and give, and examples that can be sent as they are."""
    url = str(request.base_url).rstrip("/")
    return page(request, "reference.html", groups=reference.groups(request.app.openapi(), url))
