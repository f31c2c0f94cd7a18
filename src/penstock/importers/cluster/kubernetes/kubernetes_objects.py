"""Objects of a Kubernetes API as ``kubectl get … -o json`` or ``-o yaml`` prints them: nodes and related objects.

A text may be one object, a List, a NodeList, or several YAML documents of these. Only the fields that readers use are
read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from penstock.importers.cluster.kubernetes.level_paths import MOST_LEVELS
from penstock.importers.cluster.structured import read_documents, report_invalid, shortened
from penstock.importers.lines import Faults

MOST_LABEL_CHARACTERS = 63
"""The most characters of a label's value; the API server refuses more."""
MOST_NAME_CHARACTERS = 253
Text = Annotated[str, StringConstraints(min_length=1, max_length=MOST_NAME_CHARACTERS)]
ObjectName = Annotated[
    str, StringConstraints(max_length=MOST_NAME_CHARACTERS, pattern=r"^[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?$")
]
Labels = dict[str, str]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Metadata(_Part):
    name: ObjectName
    labels: Labels | None = None
    deletionTimestamp: Any = None  # noqa: N815


class Taint(_Part):
    """A taint; ``NoSchedule`` and ``NoExecute`` keep pods away that do not tolerate it."""

    key: str
    value: str | None = None
    effect: str = ""


class Condition(_Part):
    """A condition of a node; ``Ready`` has to be ``True``."""

    type: str
    status: str
    reason: str | None = None


class _NodeSpec(_Part):
    unschedulable: bool | None = None
    taints: tuple[Taint, ...] | None = None


class _NodeStatus(_Part):
    capacity: dict[str, str | int] | None = None
    allocatable: dict[str, str | int] | None = None
    conditions: tuple[Condition, ...] | None = None


class Node(_Part):
    """``kind: Node``."""

    metadata: _Metadata
    spec: _NodeSpec = _NodeSpec()
    status: _NodeStatus = _NodeStatus()

    @property
    def labels(self) -> Labels:
        return self.metadata.labels or {}


class _Resources(_Part):
    limits: dict[str, Any] | None = None


class _Container(_Part):
    resources: _Resources | None = None


class _PodSpec(_Part):
    nodeName: str | None = None  # noqa: N815
    containers: tuple[_Container, ...] = ()


class _PodStatus(_Part):
    phase: str = ""


class Pod(_Part):
    """``kind: Pod``: what is taken of a node's devices."""

    metadata: _Metadata
    spec: _PodSpec = _PodSpec()
    status: _PodStatus = _PodStatus()


class _Level(_Part):
    nodeLabel: Text  # noqa: N815


class _TopologySpec(_Part):
    levels: Annotated[tuple[_Level, ...], Field(min_length=1, max_length=MOST_LEVELS)]


class Topology(_Part):
    """Kueue's ``kind: Topology``: the labels that name a node's places, outermost first."""

    metadata: _Metadata
    spec: _TopologySpec


class _Exact(_Part):
    name: ObjectName


class _Regex(_Part):
    pattern: Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class Requirement(_Part):
    """One of a label selector's ``matchExpressions``."""

    key: Text
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] | None = None


class LabelSelector(_Part):
    """A label selector: all of it has to hold."""

    matchLabels: Labels | None = None  # noqa: N815
    matchExpressions: tuple[Requirement, ...] | None = None  # noqa: N815


class Selector(_Part):
    """A selector of a HyperNode's member; exactly one of the three is set."""

    exactMatch: _Exact | None = None  # noqa: N815
    regexMatch: _Regex | None = None  # noqa: N815
    labelMatch: LabelSelector | None = None  # noqa: N815


class Member(_Part):
    """A part of a HyperNode: nodes, or HyperNodes."""

    type: Literal["Node", "HyperNode"]
    selector: Selector


class _HyperNodeSpec(_Part):
    tier: Annotated[int, Field(ge=0, le=1000)]
    tierName: str | None = None  # noqa: N815
    members: tuple[Member, ...] | None = None


class HyperNode(_Part):
    """Volcano's ``kind: HyperNode``."""

    metadata: _Metadata
    spec: _HyperNodeSpec


Kind = Node | Pod | Topology | HyperNode
_KINDS: dict[str, tuple[str, type[Kind]]] = {
    "Node": ("v1", Node),
    "Pod": ("v1", Pod),
    "Topology": ("kueue.x-k8s.io/", Topology),
    "HyperNode": ("topology.volcano.sh/", HyperNode),
}


@dataclass(slots=True)
class Objects:
    """The objects of a text that readers use, by what they are, each with its pointer; ``others`` counts the rest."""

    nodes: dict[str, Node] = field(default_factory=dict)
    pods: dict[str, Pod] = field(default_factory=dict)
    topologies: dict[str, Topology] = field(default_factory=dict)
    hypernodes: dict[str, HyperNode] = field(default_factory=dict)
    others: dict[str, int] = field(default_factory=dict)

    def add(self, pointer: str, entry: Kind) -> None:
        """Add an object to the others of its kind."""
        match entry:
            case Node():
                self.nodes[pointer] = entry
            case Pod():
                self.pods[pointer] = entry
            case Topology():
                self.topologies[pointer] = entry
            case HyperNode():
                self.hypernodes[pointer] = entry

    @property
    def kinds_found(self) -> str:
        """The kinds of objects in the text, for messages: ``3 Pod, 1 Service``."""
        counts = {
            "Node": len(self.nodes),
            "Pod": len(self.pods),
            "Topology": len(self.topologies),
            "HyperNode": len(self.hypernodes),
        } | self.others
        return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "no object"


def read_objects(text: str, faults: Faults) -> Objects:
    """Return all objects of a text. Adds a fault for values that are no object or have fields of a wrong form.

    Raises InvalidDocument where the text is neither JSON nor YAML.
    """
    objects = Objects()
    documents = read_documents(text, faults)
    for number, document in enumerate(documents):
        start = f"document {number + 1}" if len(documents) > 1 else ""
        for pointer, value in _flat(document, start, faults):
            _read_object(pointer, value, objects, faults)
    _refuse_doubles(objects, faults)
    return objects


def _flat(document: Any, pointer: str, faults: Faults) -> Iterator[tuple[str, dict[str, Any]]]:
    if not isinstance(document, dict):
        hint = "; print objects with `kubectl get … -o json`" if isinstance(document, str) else ""
        faults.add(None, f"{shortened(document)} is no Kubernetes object{hint}", at=pointer)
    elif str(document.get("kind", "")).endswith("List") or "items" in document:
        items = document.get("items")
        if not isinstance(items, list):
            faults.add(None, f"`items` has to be a list of objects, not {shortened(items)}", at=_join(pointer, "items"))
            return
        for number, item in enumerate(items):
            at = _join(pointer, f"items/{number}")
            if not isinstance(item, dict):
                faults.add(None, f"{shortened(item)} is no Kubernetes object", at=at)
            else:
                # Typed lists as an API server sends them leave kind and apiVersion of their items out.
                kind = str(document.get("kind", "")).removesuffix("List")
                yield at, {"kind": kind, "apiVersion": document.get("apiVersion")} | item
    else:
        yield pointer, document


def _read_object(pointer: str, value: dict[str, Any], objects: Objects, faults: Faults) -> None:
    kind = str(value.get("kind") or "")
    version, model = _KINDS.get(kind, ("", None))
    if model is None or not str(value.get("apiVersion") or "v1").startswith(version):
        name = kind if kind.isidentifier() else "object without a kind"
        objects.others[name] = objects.others.get(name, 0) + 1
        return
    try:
        objects.add(pointer, model.model_validate(value))
    except ValidationError as error:
        report_invalid(error, pointer, faults)


def _refuse_doubles(objects: Objects, faults: Faults) -> None:
    for kind, entries in (("node", objects.nodes), ("HyperNode", objects.hypernodes)):
        first: dict[str, str] = {}
        for pointer, one in entries.items():
            name = one.metadata.name
            if name in first:
                before = first[name] or "the first document"
                faults.add(None, f"the {kind} {name!r} stands already at {before}; give it once", at=pointer)
            first.setdefault(name, pointer)


def check_labels(objects: Objects, faults: Faults) -> None:
    """Add a fault for each label of a node that no API server would have taken."""
    for pointer, node in objects.nodes.items():
        for key, value in node.labels.items():
            if len(value) > MOST_LABEL_CHARACTERS:
                faults.add(
                    None,
                    f"the value of {key!r}, {value[:20]!r}…, has {len(value)} characters: a label has at most "
                    f"{MOST_LABEL_CHARACTERS}, so no Kubernetes gave this; shorten or hash it on all nodes alike",
                    at=_join(pointer, "metadata/labels"),
                )


def _join(pointer: str, rest: str) -> str:
    return "/".join(part for part in (pointer, rest) if part)
