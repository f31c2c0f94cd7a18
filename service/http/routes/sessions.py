"""Browsers sign in with a key and out again; in between they send a cookie that no script can read."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import parse_qs

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import RedirectResponse

from penstock.schemas.amounts import exact
from penstock.schemas.errors import PenstockError
from penstock.service.http.requests.access import Access
from penstock.service.pages.templating import page
from penstock.service.problems import TooLarge
from penstock.service.security.sessions import COOKIE

MAX_FORM_BYTES = 8192

router = APIRouter(tags=["pages"], include_in_schema=False)


async def form_of(request: Request) -> dict[str, str]:
    """Return the fields of a small form. Raises TooLarge."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_FORM_BYTES:
            raise TooLarge(f"the form is larger than {exact(MAX_FORM_BYTES)}")
    return {name: values[-1] for name, values in parse_qs(body.decode("utf-8", "replace")).items()}


Form = Annotated[dict[str, str], Depends(form_of)]


@router.get("/sign-in")
async def form(request: Request, service: Access, next: Annotated[str, Query(max_length=2048)] = "/") -> Response:
    """Show the form; where the service needs no key, the page says so."""
    return page(request, "sign_in.html", next=_local(next), is_open=service.authenticator.is_open, error=None)


@router.post("/sign-in")
async def sign_in(request: Request, fields: Form, service: Access) -> Response:
    """Turn a key into a session, and continue to the page that was requested."""
    target = _local(fields.get("next", "/"))
    address = request.client.host if request.client is not None else ""
    try:
        key = await service.authenticator.key(fields.get("key", "").strip(), address)
    except PenstockError as error:
        is_open = service.authenticator.is_open
        return page(request, "sign_in.html", error.status, next=target, is_open=is_open, error=error)
    answer = RedirectResponse(target, 303, {"Cache-Control": "no-store"})
    answer.set_cookie(
        COOKIE,
        service.authenticator.sessions.token(key),
        max_age=service.authenticator.sessions.lifetime_s,
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
    return answer


@router.post("/sign-out")
async def sign_out() -> Response:
    """Forget the session in this browser."""
    answer = RedirectResponse("/sign-in", 303, {"Cache-Control": "no-store"})
    answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return answer


def _local(target: str) -> str:
    """Return a path of this service; for any other address the start page."""
    is_path = target.startswith("/") and not target.startswith(("//", "/\\")) and target.isprintable()
    return target if is_path else "/"
