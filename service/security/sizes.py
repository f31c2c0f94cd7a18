"""Limits of one request apart from its bytes: layers, devices, micro-batches, seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from penstock.schemas.api.layouts import LayoutJob
from penstock.schemas.document import Document
from penstock.schemas.errors import Fault, UnsupportedRequest
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import Choices, Training
from penstock.schemas.topology import ClusterTopology
from penstock.service.settings import Settings


class Sizes:
    """The limits of a service."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def check(self, document: BaseModel) -> None:
        """Raise UnsupportedRequest, with a fault for each size that is beyond a limit, in all that a document holds."""
        faults = tuple(self._faults(document, ""))
        if faults:
            raise UnsupportedRequest(
                "the request exceeds the limits of this service",
                faults=faults,
                remedy="reduce the request, or have the operator raise the setting",
            )

    def _faults(self, document: BaseModel, pointer: str) -> Iterator[Fault]:
        match document:
            case ModelProfile():
                yield from self._fault(f"{pointer}/layers", len(document.layers), "layers", "max_layers")
            case ClusterTopology():
                yield from self._fault(f"{pointer}/{_form(document)}", _devices(document), "devices", "max_devices")
            case Choices():
                yield from self._of_request(document, pointer)
        if not isinstance(document, ModelProfile | ClusterTopology):
            for name in type(document).model_fields:
                for step, inner in _inner(getattr(document, name)):
                    yield from self._faults(inner, f"{pointer}/{name}{step}")

    def _of_request(self, request: Choices, pointer: str) -> Iterator[Fault]:
        batch = request.global_batch_size if isinstance(request, Training | LayoutJob) else None
        most = (batch or 0) // min(request.micro_batch_sizes or (1,))
        yield from self._fault(f"{pointer}/global_batch_size", most, "micro-batches", "max_micro_batches")
        limit_ns = request.termination.time_limit_ns
        if limit_ns is not None:
            at = f"{pointer}/termination/time_limit_ns"
            yield from self._fault(at, limit_ns / 1e9, "seconds", "max_solve_s")

    def _fault(self, pointer: str, number: float, what: str, setting: str) -> Iterator[Fault]:
        most = getattr(self._settings, setting)
        if number > most:
            yield Fault(pointer, f"{number:g} {what} exceed the limit of {most:g} ({setting})", "beyond-limit")


def _inner(value: Any) -> Iterator[tuple[str, BaseModel]]:
    if isinstance(value, BaseModel):
        yield "", value
    elif isinstance(value, tuple):
        yield from ((f"/{number}", one) for number, one in enumerate(value) if isinstance(one, Document | Training))


def _form(topology: ClusterTopology) -> str:
    return "nodes" if topology.uniform is None else "uniform"


def _devices(topology: ClusterTopology) -> int:
    if topology.uniform is not None:
        return topology.uniform.nodes * topology.uniform.devices_per_node
    return sum(len(node.devices) for node in topology.nodes)
