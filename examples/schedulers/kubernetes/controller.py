"""A control loop that places gated jobs of Kubernetes: ``python controller.py --penstock http://penstock:8642 …``.

Pods ask for it with a scheduling gate and annotations (``job.yaml`` in this folder):

    spec.schedulingGates: [{name: penstock.dev/placement}]
    metadata.annotations: penstock.dev/profile (a hash that the service keeps), penstock.dev/global-batch-size

Pods of one Job or JobSet are one job, one pod per node. When all of them are there, the service is asked for that
number of the free nodes; the plan goes into a ConfigMap ``<job>-plan``, each pod gets a ``nodeSelector`` for its node,
and its gate is removed. Where nothing fits now, the pods stay gated and are asked for again.

The decision is written to the ConfigMap before the first gate falls, so a controller that dies in between goes on with
it; pods of the same name whose Job is another one wait until Kubernetes has removed it with its Job. A patch names the
pod's resourceVersion: whoever else changed it first wins, and it is tried again.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import json
import logging
import os
import ssl
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

GATE = "penstock.dev/placement"
PROFILE, BATCH = "penstock.dev/profile", "penstock.dev/global-batch-size"
SET_LABELS = ("jobset.sigs.k8s.io/jobset-name", "batch.kubernetes.io/job-name")
HOST = "kubernetes.io/hostname"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MERGE = {"Content-Type": "application/merge-patch+json"}
MOST_BYTES = 1_000_000
"""A ConfigMap holds a MiB; a larger plan is compressed, as plan.json.gz."""

log = logging.getLogger("penstock.kubernetes")


@dataclass
class Group:
    """The pods of one job, in the order of their names."""

    namespace: str
    name: str
    pods: list[dict[str, Any]] = field(default_factory=list)

    @property
    def gated(self) -> list[dict[str, Any]]:
        """The pods that wait for a place."""
        return [pod for pod in self.pods if _is_gated(pod)]

    @property
    def wanted(self) -> int:
        """The number of pods that the complete job has."""
        return _number(self.pods[0], "penstock.dev/pods", str(len(self.pods)))


class Controller:
    """The loop that queries Kubernetes, through ``cluster``, and Penstock. ``resource`` names pods' accelerators."""

    def __init__(
        self, cluster: httpx.Client, penstock: httpx.Client, topology: str, resource: str = "nvidia.com/gpu"
    ) -> None:
        self.cluster, self.penstock, self.topology, self.resource = cluster, penstock, topology, resource
        self._nodes: frozenset[str] | None = None

    def once(self) -> int:
        """Make one pass over all pods; return how many gates were removed."""
        pods = self._get("/api/v1/pods")["items"]
        removed = 0
        for group in groups(pods):
            try:
                removed += self._placed(group, pods)
            except ValueError as error:
                log.warning("%s: %s", group.name, error)
            except httpx.HTTPStatusError as error:
                log.warning("%s: %s: %s", group.name, error, error.response.text[:200])
        return removed

    def _placed(self, group: Group, pods: list[dict[str, Any]]) -> int:
        if len(group.pods) < group.wanted:
            log.info("%s: %d of %d pods are there", group.name, len(group.pods), group.wanted)
            return 0
        free, decision = self._free(pods, group), self._decision(group)
        if decision is None:
            nodes = self._decide(group, free)
        elif not _is_of(decision, group):
            log.info("%s waits until %s-plan of another job of its name is gone", group.name, group.name)
            return 0
        else:
            nodes = json.loads(decision["data"]["nodes"])
        removed = 0
        for pod, node in self._pods_with_nodes(group, nodes):
            if node not in free:
                log.warning(
                    "%s waits: %s, its node by the plan, is not free; a new job gets a new plan", _name(pod), node
                )
            elif self._release(pod, node):
                pod["spec"]["nodeName"] = node
                removed += 1
        return removed

    def _get(self, path: str) -> dict[str, Any]:
        answer = self.cluster.get(path)
        answer.raise_for_status()
        document: dict[str, Any] = answer.json()
        return document

    def _free(self, pods: Iterable[dict[str, Any]], group: Group) -> list[str]:
        """Return the topology's nodes that take the group's pods, and have no pod with accelerators, now or soon."""
        busy = {_node_of(pod) for pod in pods if self._takes(pod) and not _has_ended(pod)}
        tolerations = group.pods[0]["spec"].get("tolerations") or ()
        usable = [
            _name(node)
            for node in self._get("/api/v1/nodes")["items"]
            if self._offers(node) and _is_usable(node) and _is_tolerated(node, tolerations)
        ]
        strange = [name for name in usable if self._topology_nodes and name not in self._topology_nodes]
        if strange:
            log.warning("%d nodes are not in the topology, %s …: import it again", len(strange), strange[0])
        return [name for name in usable if name not in busy and name not in strange]

    @property
    def _topology_nodes(self) -> frozenset[str]:
        """Nodes that the topology names; empty where it only counts them."""
        if self._nodes is None:
            answer = self.penstock.get(f"/v1/topologies/{self.topology}")
            answer.raise_for_status()
            self._nodes = frozenset(node["name"] for node in answer.json().get("nodes") or ())
        return self._nodes

    def _offers(self, node: dict[str, Any]) -> bool:
        return int(node["status"].get("allocatable", {}).get(self.resource, 0)) > 0

    def _takes(self, pod: dict[str, Any]) -> bool:
        limits = (each.get("resources", {}).get("limits", {}) for each in pod["spec"].get("containers", ()))
        return any(int(limit.get(self.resource, 0)) > 0 for limit in limits)

    def _decision(self, group: Group) -> dict[str, Any] | None:
        """Return a stored decision of the group, which may be carried out in part."""
        answer = self.cluster.get(f"/api/v1/namespaces/{group.namespace}/configmaps/{group.name}-plan")
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        answer.raise_for_status()
        document: dict[str, Any] = answer.json()
        return document

    def _decide(self, group: Group, free: list[str]) -> list[str]:
        """Return nodes for all pods of the group, or none; the decision is stored first."""
        first, count = group.pods[0], len(group.pods)
        if len(free) < count:
            log.info("%s: %d nodes are free, %d are wanted", group.name, len(free), count)
            return []
        job = {
            "name": group.name,
            "profile": _annotation(first, PROFILE),
            "global_batch_size": _number(first, BATCH),
            "nodes": {"min": count, "max": count},
        }
        answer = self.penstock.post("/v1/placements", json={"topology": self.topology, "free": free, "jobs": [job]})
        if answer.status_code != 200:
            log.warning("%s: Penstock answers %d: %s", group.name, answer.status_code, answer.text[:500])
            return []
        choice = answer.json()["choices"][0]
        for sentence in choice["why"]:
            log.info("%s: %s", group.name, sentence)
        if choice["status"] != "placed" or len(choice["nodes"]) < count:
            return []
        self._write_down(group, choice)
        nodes: list[str] = choice["nodes"]
        return nodes

    def _write_down(self, group: Group, choice: dict[str, Any]) -> None:
        plan = json.dumps(choice["plan_file"], separators=(",", ":")).encode()
        packed = base64.b64encode(gzip.compress(plan)).decode()
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": f"{group.name}-plan",
                "ownerReferences": _owners(group.pods[0]),
            },
            "data": {
                "nodes": json.dumps(choice["nodes"]),
                "why": "\n".join(choice["why"]),
                **({"plan.json": plan.decode()} if len(plan) < MOST_BYTES else {}),
            },
            "binaryData": {} if len(plan) < MOST_BYTES else {"plan.json.gz": packed},
        }
        self.cluster.post(f"/api/v1/namespaces/{group.namespace}/configmaps", json=body).raise_for_status()

    def _pods_with_nodes(self, group: Group, nodes: list[str]) -> list[tuple[dict[str, Any], str]]:
        """Return each gated pod with a node that none of the others has."""
        occupied = {_node_of(pod) for pod in group.pods if not _is_gated(pod)}
        return list(zip(group.gated, [node for node in nodes if node not in occupied], strict=False))

    def _release(self, pod: dict[str, Any], node: str) -> bool:
        gates = [gate for gate in pod["spec"]["schedulingGates"] if gate["name"] != GATE]
        patch = {
            "metadata": {"resourceVersion": pod["metadata"]["resourceVersion"]},
            "spec": {"nodeSelector": {HOST: node}, "schedulingGates": gates},
        }
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{_name(pod)}"
        answer = self.cluster.patch(path, content=json.dumps(patch), headers=MERGE)
        if answer.status_code in (404, 409):
            log.info("%s has changed meanwhile; it is looked at again", _name(pod))
            return False
        answer.raise_for_status()
        log.info("%s goes to %s", _name(pod), node)
        return True


def groups(pods: Iterable[dict[str, Any]]) -> list[Group]:
    """Return jobs with a gated pod, the oldest first; pods that have ended do not count."""
    by_name: dict[tuple[str, str], Group] = {}
    for pod in sorted(pods, key=lambda pod: (pod["metadata"].get("creationTimestamp", ""), _name(pod))):
        labels = pod["metadata"].get("labels", {})
        name = next((labels[label] for label in SET_LABELS if label in labels), _name(pod))
        if not _has_ended(pod) and PROFILE in pod["metadata"].get("annotations", {}):
            namespace = pod["metadata"]["namespace"]
            by_name.setdefault((namespace, name), Group(namespace, name)).pods.append(pod)
    return [group for group in by_name.values() if group.gated]


def _name(thing: dict[str, Any]) -> str:
    name: str = thing["metadata"]["name"]
    return name


def _annotation(pod: dict[str, Any], key: str, default: str = "") -> str:
    value: str = pod["metadata"].get("annotations", {}).get(key, default)
    return value


def _number(pod: dict[str, Any], key: str, default: str = "") -> int:
    text = _annotation(pod, key, default)
    if not text.isdecimal():
        raise ValueError(f"the annotation {key} of {_name(pod)} is not a number: {text!r}")
    return int(text)


def _owners(pod: dict[str, Any]) -> list[dict[str, str]]:
    """Return the owners that a pod's decision is deleted with: its Job, or the pod itself."""
    owners = pod["metadata"].get("ownerReferences") or [{"apiVersion": "v1", "kind": "Pod", **pod["metadata"]}]
    return [{key: owner[key] for key in ("apiVersion", "kind", "name", "uid")} for owner in owners]


def _is_of(decision: dict[str, Any], group: Group) -> bool:
    """Return whether a decision was made for these pods, and not for others of the same name."""
    owners = {owner["uid"] for owner in decision["metadata"].get("ownerReferences", ())}
    return any(owner["uid"] in owners for pod in group.pods for owner in _owners(pod))


def _is_gated(pod: dict[str, Any]) -> bool:
    return any(gate["name"] == GATE for gate in pod["spec"].get("schedulingGates") or ())


def _has_ended(pod: dict[str, Any]) -> bool:
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def _node_of(pod: dict[str, Any]) -> str | None:
    """Return the node where a pod runs, or will run when the scheduler has seen its selector."""
    return pod["spec"].get("nodeName") or (pod["spec"].get("nodeSelector") or {}).get(HOST)


def _is_usable(node: dict[str, Any]) -> bool:
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in node["status"].get("conditions", ()))
    return ready and not node["spec"].get("unschedulable", False)


def _is_tolerated(node: dict[str, Any], tolerations: Collection[dict[str, Any]]) -> bool:
    """Return whether no taint of a node keeps pods with these tolerations away."""
    taints = [taint for taint in node["spec"].get("taints") or () if taint["effect"] != "PreferNoSchedule"]
    return all(any(_tolerates(each, taint) for each in tolerations) for taint in taints)


def _tolerates(toleration: dict[str, Any], taint: dict[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    return (toleration.get("key"), toleration.get("value", "")) == (taint["key"], taint.get("value", ""))


def _in_cluster() -> httpx.Client:
    """Return the API of the cluster that this pod runs in, by its service account."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    trusted = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    return httpx.Client(base_url=f"https://{host}:{port}", verify=trusted, auth=_with_token)


def _with_token(request: httpx.Request) -> httpx.Request:
    """Add the service account's token, read each time: the kubelet renews it."""
    request.headers["Authorization"] = f"Bearer {(ACCOUNT / 'token').read_text(encoding='ascii')}"
    return request


def main() -> None:
    """Make passes again and again; errors are logged, and the pass is tried again."""
    parser = argparse.ArgumentParser(description="Places gated jobs by Penstock.")
    parser.add_argument("--penstock", required=True, help="the service, http://host:port; its key is PENSTOCK_API_KEY")
    parser.add_argument("--topology", required=True, help="hash of the cluster's topology, which the service keeps")
    parser.add_argument("--kubernetes", help="an API server without authentication, as kubectl proxy; else this pod's")
    parser.add_argument("--resource", default="nvidia.com/gpu")
    parser.add_argument("--pause-s", type=float, default=5.0)
    parser.add_argument("--passes", type=int, default=0, help="number of passes before the end; 0: never end")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    key = os.environ.get("PENSTOCK_API_KEY")
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    with (
        httpx.Client(base_url=options.kubernetes) if options.kubernetes else _in_cluster() as cluster,
        httpx.Client(base_url=options.penstock, headers=headers, timeout=600) as penstock,
    ):
        controller = Controller(cluster, penstock, options.topology, options.resource)
        passes = 0
        while options.passes == 0 or passes < options.passes:
            passes += 1
            try:
                controller.once()
            except httpx.HTTPError as error:
                log.warning("%s", error)
            if options.passes == 0 or passes < options.passes:
                time.sleep(options.pause_s)


if __name__ == "__main__":
    main()
