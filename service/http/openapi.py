"""The OpenAPI document: every route with its errors, in one shape, and examples that can be sent as they are."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from penstock.questions.naming import describe_names
from penstock.schemas.api.jobs import ProblemDetails
from penstock.service.http.requests.access import describe_keys
from penstock.service.http.requests.bodies import BODY_MODELS
from penstock.service.http.requests.once import describe_idempotency
from penstock.service.problems import MEDIA_TYPE

ANY_PROBLEM = {
    "description": "any error: problem details (RFC 9457)",
    "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}},
}


def install(app: FastAPI) -> None:
    """Have the app describe itself this way; the document is built once."""
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        components = schema.setdefault("components", {}).setdefault("schemas", {})
        models: list[type[BaseModel]] = [ProblemDetails, *BODY_MODELS.values()]
        _, extra = models_json_schema(
            [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
        )
        schema["components"]["schemas"] = extra["$defs"] | components
        describe_names(schema["components"]["schemas"], BODY_MODELS.values())
        for path in schema["paths"].values():
            for operation in path.values():
                _describe_problems(operation)
        describe_idempotency(schema, app.routes)
        if not app.state.service.authenticator.is_open:
            describe_keys(schema, app.routes)
        app.openapi_schema = schema
    return app.openapi_schema


def _describe_problems(operation: dict[str, Any]) -> None:
    """Replace FastAPI's own 422 by ours, and add a default for all other errors."""
    responses = operation["responses"]
    if responses.get("422", {}).get("description") == "Validation Error":
        responses["422"] = ANY_PROBLEM | {"description": "the parameters are not valid"}
    responses.setdefault("default", ANY_PROBLEM)
