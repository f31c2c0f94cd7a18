"""Accelerators of a Kubernetes node, from its capacity and the labels of its vendor's feature discovery.

.. [1] NVIDIA GPU feature discovery: ``nvidia.com/gpu.product``, ``.memory`` (MiB), ``.count``, ``.replicas``; a product
   ends in ``-MIG-<profile>`` under the strategy ``single`` and in ``-SHARED`` where devices are shared in time.
.. [2] AMD's node labeller: ``amd.com/gpu.product-name``, ``amd.com/gpu.vram``.
.. [3] Karpenter: ``karpenter.k8s.aws/instance-gpu-name``, ``instance-gpu-memory`` (MiB); GKE: ``gke-accelerator``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from penstock.importers.cluster.facts import DeviceFacts
from penstock.importers.cluster.kubernetes.kubernetes_objects import Labels, Node, Pod
from penstock.importers.cluster.structured import shortened
from penstock.importers.lines import Faults

RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")
_MIG = re.compile(r"nvidia\.com/mig-[0-9]+[cg]\.[0-9]+gb(?:\..*)?")
_PARTITIONED = re.compile(r"-MIG-|-SHARED$")
_PRODUCTS = (
    "nvidia.com/gpu.product",
    "amd.com/gpu.product-name",
    "beta.amd.com/gpu.product-name",
    "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
)
MOST_DEVICES = 1024
"""The most devices of a node; more is a mistake, or an attack."""
_DIGITS = re.compile(r"[0-9]{1,9}")
_MIB = 2**20
_VRAM = re.compile(r"([0-9]{1,6})([MGT])i?")
_VRAM_BYTES = {"M": 2**20, "G": 2**30, "T": 2**40}


class Devices(NamedTuple):
    """A node's devices, and why they cannot be used (empty: they can)."""

    devices: tuple[DeviceFacts, ...]
    why_not_usable: str = ""


def read_devices(node: Node, pointer: str, faults: Faults) -> Devices:
    """Return the accelerators by a node's capacity and labels; empty for a node without any."""
    capacity = _counts(node.status.capacity, f"{pointer}/status/capacity".lstrip("/"), faults)
    allocatable = _counts(node.status.allocatable, f"{pointer}/status/allocatable".lstrip("/"), faults)
    at = f"{pointer}/metadata/labels".lstrip("/")
    labelled = _label_number(node.labels, "nvidia.com/gpu.count", at, faults)
    replicas = _label_number(node.labels, "nvidia.com/gpu.replicas", at, faults) or 1
    product = next((node.labels[key] for key in _PRODUCTS if node.labels.get(key)), None)
    is_partition = replicas > 1 or bool(product and _PARTITIONED.search(product))
    whole = {name: count for name, count in capacity.items() if name in RESOURCES}
    parts = sum(count for name, count in capacity.items() if name not in RESOURCES)
    total = sum(whole.values())
    devices = _make(total or (0 if parts else labelled or 0), product, _memory(node.labels, at, faults), is_partition)
    devices += tuple(DeviceFacts(index=len(devices) + i, product=product, is_partition=True) for i in range(parts))
    if len(whole) > 1:
        return Devices(
            devices, f"it has devices of two vendors ({' and '.join(sorted(whole))}), and labels for one kind"
        )
    if not total and not parts and labelled:
        return Devices(
            devices, f"its device plugin offers none of the {labelled} devices that nvidia.com/gpu.count names"
        )
    for name, count in capacity.items():
        if node.status.allocatable is not None and allocatable.get(name, 0) < count:
            sick = count - allocatable.get(name, 0)
            return Devices(devices, f"{sick} of its {count} {name} are not allocatable, and the API does not say which")
    if labelled is not None and not is_partition and 0 < labelled < whole.get("nvidia.com/gpu", 0):
        other = whole["nvidia.com/gpu"] - labelled
        return Devices(
            devices, f"its labels describe {labelled} devices as {product}, and {other} more are of some other kind"
        )
    return Devices(devices)


def busy_devices(pods: Mapping[str, Pod]) -> dict[str, int]:
    """Count the devices that the pods of a text hold, by node; pods that have ended hold no device."""
    busy: dict[str, int] = {}
    for pod in pods.values():
        if pod.spec.nodeName is None or pod.status.phase in ("Succeeded", "Failed"):
            continue
        limits = [box.resources.limits or {} for box in pod.spec.containers if box.resources]
        count = sum(_number(value) or 0 for limit in limits for name, value in limit.items() if _is_count(name, value))
        busy[pod.spec.nodeName] = busy.get(pod.spec.nodeName, 0) + count
    return busy


@lru_cache(maxsize=256)
def _make(count: int, product: str | None, memory_bytes: int | None, is_partition: bool) -> tuple[DeviceFacts, ...]:
    return tuple(
        DeviceFacts(index=index, product=product, memory_bytes=memory_bytes, is_partition=is_partition)
        for index in range(count)
    )


def _is_device(name: str) -> bool:
    return name.removesuffix(".shared") in RESOURCES or _MIG.fullmatch(name) is not None


def _is_count(name: str, value: object) -> bool:
    return _is_device(name) and isinstance(value, str | int) and _number(value) is not None


def _number(value: str | int) -> int | None:
    """Return a number of devices; None for another value, or one beyond MOST_DEVICES."""
    if isinstance(value, str):
        value = int(value) if _DIGITS.fullmatch(value) else -1
    return value if 0 <= value <= MOST_DEVICES else None


def _counts(resources: Mapping[str, str | int] | None, at: str, faults: Faults) -> dict[str, int]:
    """Count devices by resource; a shared one (``nvidia.com/gpu.shared``) counts as partitions, as MIG profiles do."""
    counts = {}
    for name, value in (resources or {}).items():
        if not _is_device(name):
            continue
        count = _number(value)
        if count is None:
            problem = f"{name} has to be a number of devices up to {MOST_DEVICES}; it is {shortened(value)}"
            faults.add(None, problem, at=at)
        elif count:
            counts[name] = count
    return counts


def _label_number(labels: Labels, key: str, at: str, faults: Faults) -> int | None:
    value = labels.get(key)
    if value is None:
        return None
    if not _DIGITS.fullmatch(value):
        faults.add(None, f"{key} has to be a whole number; it is {value!r}", at=at)
        return None
    return int(value)


def _memory(labels: Labels, at: str, faults: Faults) -> int | None:
    mib = _label_number(labels, "nvidia.com/gpu.memory", at, faults)
    if mib is not None:
        return mib * _MIB or None
    karpenter = _label_number(labels, "karpenter.k8s.aws/instance-gpu-memory", at, faults)
    if karpenter:
        return karpenter * _MIB
    vram = labels.get("amd.com/gpu.vram") or labels.get("beta.amd.com/gpu.vram")
    if vram is None:
        return None
    match = _VRAM.fullmatch(vram)
    if match is None or (match[2] == "T" and len(match[1]) > 2):
        faults.add(None, f"amd.com/gpu.vram has to be a size such as 192G; it is {vram!r}", at=at)
        return None
    return int(match[1]) * _VRAM_BYTES[match[2]]
