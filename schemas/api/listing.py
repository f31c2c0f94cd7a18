"""The names that requests may use: of models, clusters, planners, schedules and kinds of devices."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from penstock.schemas.document import Document, Part
from penstock.schemas.quantities import Name

Listable = Literal["models", "clusters", "planners", "schedules", "devices"]


class ListRequest(Document):
    """A kind of name."""

    kind: ClassVar[str] = "list request"

    what: Listable


class Listed(Part):
    """A name, and its meaning in a few words."""

    name: Name
    about: str


class ListAnswer(Part):
    """Names in the order in which they are looked for."""

    what: Listable
    items: tuple[Listed, ...]
    note: str = Field(default="", description="names that no list can hold, such as NODESxDEVICESxKIND")
