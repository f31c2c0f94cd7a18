"""Lists of what requests may name: models, clusters, planners, schedules, kinds of devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from penstock.examples import catalogue
from penstock.examples.shapes import SHAPES
from penstock.facts.device_table import DEVICES
from penstock.schemas.amounts import three_digits
from penstock.schemas.api.listing import Listable, ListAnswer, Listed, ListRequest
from penstock.schemas.api.terms import NO_TERMS, Terms
from penstock.schemas.topology import ClusterTopology
from penstock.shapes.parameters import total
from penstock.solvers.planners.catalogue import PLANNERS
from penstock.solvers.schedules.catalogue import SCHEDULES


def answer(question: ListRequest, _terms: Terms = NO_TERMS) -> ListAnswer:
    """List the names of a kind, each with a few words."""
    return ListAnswer(what=question.what, items=tuple(LISTS[question.what]()), note=NOTES.get(question.what, ""))


def _models() -> Iterator[Listed]:
    for name in catalogue.profile_names():
        if name in SHAPES:
            shape = SHAPES[name]
            about = f"{total(shape) / 1e9:,.2f} billion parameters in {shape.layers} layers"
        else:
            about = f"{len(catalogue.read(name).layers)} layers, with a profile"
        yield Listed(name=name, about=about)


def _clusters() -> Iterator[Listed]:
    for name in catalogue.cluster_names():
        yield Listed(name=name, about=_devices(catalogue.cluster(name)))


def _devices(topology: ClusterTopology) -> str:
    """Return the devices and nodes of a cluster: ``8 A100 and 8 V100 in 4 nodes``."""
    nodes = len(topology.nodes) if topology.uniform is None else topology.uniform.nodes
    return f"{topology.devices_in_words()} in {nodes} node{'s' if nodes > 1 else ''}"


def _planners() -> Iterator[Listed]:
    return (Listed(name=planner.name, about=planner.help) for planner in PLANNERS.values())


def _schedules() -> Iterator[Listed]:
    return (Listed(name=row.name, about=row.help) for row in SCHEDULES.values())


def _kinds() -> Iterator[Listed]:
    for kind, facts in DEVICES.items():
        peaks = ", ".join(f"{three_digits(peak / 1e12)} {dtype}" for dtype, peak in facts.peak_flops_per_s.items())
        memory = f"memory {facts.memory_bandwidth_bytes_per_s / 1e9:,.0f} GB/s"
        yield Listed(name=kind, about=f"peaks in Tflop/s: {peaks}; {memory}")


LISTS: dict[Listable, Callable[[], Iterator[Listed]]] = {
    "models": _models,
    "clusters": _clusters,
    "planners": _planners,
    "schedules": _schedules,
    "devices": _kinds,
}
NOTES: dict[Listable, str] = {
    "models": "a config.json of Hugging Face, or a profile of yours, takes the place of a name",
    "clusters": "also NODESxDEVICESxKIND, such as 8x8xH100, and DEVICESxKIND, such as 16xA100",
    "schedules": "auto: those that the planner tries",
}
