"""NVIDIA topograph's graph: instances, each with the switches above it, closest first.

.. [1] ``{"instances": [{"id": …, "network_layers": [leaf, spine, …], "labels": {…}}]}``, written by the engine
   ``graph``; earlier releases say the NVLink domain as ``attributes.nvlink`` or ``nvlink_domain``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from penstock.importers.cluster.facts import NodeFacts, Place, SourceFacts
from penstock.importers.cluster.kubernetes.kubernetes_levels import NVLINK_LABELS
from penstock.importers.cluster.kubernetes.level_paths import MOST_LEVELS, Path, Step, make_switches, shared_values
from penstock.importers.cluster.structured import read_documents, report_invalid
from penstock.importers.lines import Faults

_Name = Annotated[str, StringConstraints(min_length=1, max_length=253)]


class _Attributes(BaseModel):
    nvlink: str | None = None


class _Instance(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    id: Annotated[str, StringConstraints(max_length=253, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]*$")]
    network_layers: Annotated[tuple[_Name, ...], Field(max_length=MOST_LEVELS)] | None = None
    labels: dict[str, str] | None = None
    nvlink_domain: str | None = None
    attributes: _Attributes | None = None


def read_topograph(text: str, source: str = "graph.json") -> SourceFacts:
    """Read the instances of topograph's graph and the switches above them.

    Raises InvalidDocument with all faults by pointer; among them an instance that stands twice, a switch with two
    parents and a switch above itself.
    """
    faults = Faults(f"topograph's graph {source!r}")
    documents = read_documents(text, faults)
    instances = _instances(documents, faults)
    paths = _paths({name: one.network_layers or () for name, (_, one) in instances.items()})
    places = {name: Place(source, pointer=pointer) for name, (pointer, _) in instances.items()}
    _check_layers(instances, paths, faults)
    faults.stop()
    domains = {name: path for name, (_, one) in instances.items() if (path := _domain(one))}
    switches = make_switches(paths, places)
    nvlink = make_switches(domains, places, is_nvlink=True, names_in_use=[switch.name for switch in switches])
    return SourceFacts(
        format="topograph",
        source=source,
        nodes={name: NodeFacts(name=name, place=places[name]) for name in instances},
        switches=switches + nvlink,
        assumptions=("the ids of topograph's instances are the names of nodes",),
    )


def _instances(documents: list[Any], faults: Faults) -> dict[str, tuple[str, _Instance]]:
    """Return the instances by id, each with its pointer."""
    listed = documents[0].get("instances") if documents and isinstance(documents[0], dict) else None
    if not isinstance(listed, list) or len(documents) > 1:
        faults.add(None, "it has to be one object with a list of `instances`, as topograph's engine `graph` writes")
        faults.stop()
        return {}
    if not listed:
        faults.add(None, "there is no instance in it", at="instances")
    instances: dict[str, tuple[str, _Instance]] = {}
    for number, value in enumerate(listed):
        pointer = f"instances/{number}"
        try:
            one = _Instance.model_validate(value)
        except ValidationError as error:
            report_invalid(error, pointer, faults)
            continue
        if one.id in instances:
            before = instances[one.id][0]
            faults.add(None, f"the instance {one.id!r} stands already at {before}; give it once", at=pointer)
        instances.setdefault(one.id, (pointer, one))
    return instances


def _paths(layers: Mapping[str, tuple[str, ...]]) -> dict[str, Path]:
    """Return each instance's switches, outermost first. A switch's tier is its largest distance from any instance."""
    tiers: dict[str, int] = {}
    for above in layers.values():
        for tier, switch in enumerate(above):
            tiers[switch] = max(tier, tiers.get(switch, 0))
    return {
        name: tuple(Step("fabric", tiers[switch], switch) for switch in reversed(above))
        for name, above in layers.items()
    }


def _domain(one: _Instance) -> Path:
    labels = one.labels or {}
    for keys in NVLINK_LABELS:
        if values := [(key, labels[key]) for key in keys if labels.get(key)]:
            return tuple(Step(key, len(values) - 1 - depth, value) for depth, (key, value) in enumerate(values))
    old = one.nvlink_domain or (one.attributes.nvlink if one.attributes else None)
    return (Step("nvlink domain", 0, old),) if old else ()


def _check_layers(instances: Mapping[str, tuple[str, _Instance]], paths: Mapping[str, Path], faults: Faults) -> None:
    for name, (pointer, one) in instances.items():
        layers = one.network_layers or ()
        if len(set(layers)) < len(layers):
            way = " under ".join(layers)
            faults.add(None, f"a switch stands above itself: {name} under {way}", at=f"{pointer}/network_layers")
    if faults.entries:
        return
    for step, above in shared_values(paths.values()).items():
        parents = sorted(path[-1].value if path else "no switch" for path in above)
        if len(set(parents)) > 1:
            at = next(f"{instances[name][0]}/network_layers" for name, path in paths.items() if step in path)
            faults.add(
                None, f"the switch {step.value!r} stands under {' and '.join(parents)}; it has one parent", at=at
            )
