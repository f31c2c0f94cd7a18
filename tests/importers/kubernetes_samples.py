"""Kubernetes objects as an API server sends them, for tests of their readers."""

from __future__ import annotations

import json
from typing import Any

Object = dict[str, Any]


def node(name: str, *, gpus: int = 8, labels: dict[str, str] | None = None, **changes: Any) -> Object:
    """Return a node of H100s with GPU feature discovery. ``changes``: changes of ``spec`` and ``status``."""
    discovered_labels = {
        "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
        "nvidia.com/gpu.memory": "81559",
        "nvidia.com/gpu.count": str(gpus),
    }
    status = {
        "capacity": {"cpu": "192", "memory": "2113481996Ki", "nvidia.com/gpu": str(gpus)},
        "allocatable": {"cpu": "191", "nvidia.com/gpu": str(gpus)},
        "conditions": [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": "True"}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "uid": "0-0", "labels": (discovered_labels if gpus else {}) | (labels or {})},
        "spec": changes.get("spec", {"podCIDR": "10.0.0.0/24"}),
        "status": status | changes.get("status", {}),
    }


def pod(name: str, on: str | None, gpus: int, phase: str = "Running") -> Object:
    """Return a pod that holds devices of a node."""
    box = {"name": "main", "resources": {"limits": {"nvidia.com/gpu": str(gpus), "cpu": "4"}}}
    spec: Object = {"containers": [box, {"name": "side"}]} | ({"nodeName": on} if on else {})
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec, "status": {"phase": phase}}


def kueue_topology(name: str, *labels: str) -> Object:
    """Return Kueue's object that names a site's labels, outermost first."""
    levels = [{"nodeLabel": label} for label in labels]
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "Topology",
        "metadata": {"name": name},
        "spec": {"levels": levels},
    }


def hypernode(name: str, tier: int, *members: Object, tier_name: str | None = None) -> Object:
    """Return Volcano's object for a group of nodes or of other HyperNodes."""
    spec = {"tier": tier, "members": list(members)} | ({"tierName": tier_name} if tier_name else {})
    return {
        "apiVersion": "topology.volcano.sh/v1alpha1",
        "kind": "HyperNode",
        "metadata": {"name": name},
        "spec": spec,
    }


def member(kind: str, **selector: Any) -> Object:
    """Return a HyperNode's member: ``exact``, ``regex`` or ``labels``."""
    forms = {
        "exact": lambda name: {"exactMatch": {"name": name}},
        "regex": lambda pattern: {"regexMatch": {"pattern": pattern}},
        "labels": lambda match: {"labelMatch": match},
    }
    chosen: Object = {}
    for form, value in selector.items():
        chosen |= forms[form](value)
    return {"type": kind, "selector": chosen}


def listed(*objects: Any) -> str:
    """Return the output of `kubectl get … -o json`."""
    return json.dumps({"apiVersion": "v1", "items": list(objects), "kind": "List", "metadata": {}}, indent=4)


def instance(name: str, *layers: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "network_layers": list(layers)} | more


def graph(*instances: Any) -> str:
    return json.dumps({"instances": list(instances)})
