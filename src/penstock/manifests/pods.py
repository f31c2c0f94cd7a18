"""Parts that all Kubernetes targets share: names, labels, the bundle's ConfigMap, and pods of one node each.

A pod is one node's ranks: torchrun starts them, and each finds its stage by ``NODE_NAME`` and local rank.
torchrun gets the pod's number (a static rendezvous): by itself it compares addresses to find the
first pod, which fails where the name of a pod that has just started is not resolvable yet.
On any nodes, ``NODE_NAME`` is the pod's own name, so that pods take the plan's ranks in the order of their numbers.
"""

from __future__ import annotations

import base64
import gzip
from typing import Any

import yaml

from penstock.manifests.additions import Manifest, container_additions, merged, pod_additions
from penstock.manifests.job import BUNDLE, File, Job
from penstock.manifests.names import legal, refuse_kubernetes_nodes
from penstock.manifests.plan_nodes import Group
from penstock.schemas.amounts import amount
from penstock.schemas.errors import InvalidDocument, UnsupportedRequest

FILE = "job.yaml"
LONGEST_NAME = 40
"""The longest job name; controllers append to it, and pod names are labels of at most 63 characters."""
LARGEST_CONFIG_MAP_BYTES = 1_000_000
"""A little less than Kubernetes accepts (1 MiB), because names and labels count as well."""
LARGEST_PLAIN_BYTES = 200_000
"""A bundle above this size is compressed; a smaller one stays readable."""
CONFIGURATION = "/etc/penstock"
UNPACKED = "/tmp/penstock-job.json"
CONTAINER = "node"
NODE_NAME = "NODE_NAME"
GRACE_S = 120
"""Seconds that ranks have for a checkpoint after the request to end."""


class _Written(yaml.SafeDumper):
    """A YAML dumper that repeats equal values instead of writing anchors and aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def name_of(job: Job) -> str:
    """Return the job's name, legal in Kubernetes, with space for the controllers' suffixes."""
    return legal(job.asked_name, LONGEST_NAME)


def metadata(job: Job, *, labels: dict[str, str] | None = None, name: str | None = None) -> Manifest:
    """Return name, namespace, labels, and the plan's hash as an annotation."""
    manifest: Manifest = {"name": name or name_of(job)}
    if job.settings.namespace is not None:
        manifest["namespace"] = job.settings.namespace
    notes = {**asked_annotations(job), "penstock/plan": job.plan_hash}
    return manifest | {"labels": pod_labels(job) | (labels or {}), "annotations": notes}


def own_labels(job: Job) -> dict[str, str]:
    """Return the labels by which the job's objects and pods are found."""
    return {"app.kubernetes.io/name": "penstock", "app.kubernetes.io/instance": name_of(job)}


def pod_labels(job: Job) -> dict[str, str]:
    """Return the requested labels and the job's own."""
    return dict(assignment.split("=", 1) for assignment in job.settings.labels) | own_labels(job)


def asked_annotations(job: Job) -> dict[str, str]:
    """Return the requested annotations."""
    return dict(assignment.split("=", 1) for assignment in job.settings.annotations)


def written(job: Job, *manifests: Manifest) -> list[File]:
    """Return one YAML file: the ConfigMap, unless the bundle is stored elsewhere, and the manifests."""
    documents = [*([] if job.settings.bundle_path else [config_map(job)]), *manifests]
    text = yaml.dump_all(documents, Dumper=_Written, sort_keys=False, allow_unicode=True, width=120)
    return [File(FILE, text)]


def config_map(job: Job) -> Manifest:
    """Return the bundle's ConfigMap, compressed when it is large. Raises UnsupportedRequest when still too large."""
    manifest: Manifest = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job, name=_config_map_name(job)),
    }
    if not _is_compressed(job):
        return manifest | {"immutable": True, "data": {BUNDLE: job.bundle}}
    packed = gzip.compress(job.bundle.encode(), mtime=0)
    if len(packed) > LARGEST_CONFIG_MAP_BYTES:
        raise UnsupportedRequest(
            f"the compressed bundle has {amount(len(packed))}, and a ConfigMap holds at most "
            f"{amount(LARGEST_CONFIG_MAP_BYTES)}",
            remedy="`penstock export PLAN --to bundle -o …` to a path that the pods can read, and --set bundle_path=…",
        )
    return manifest | {"immutable": True, "binaryData": {f"{BUNDLE}.gz": base64.b64encode(packed).decode()}}


def command(job: Job, launcher: list[str], place: str | None = None) -> list[str]:
    """Return the container's command: ``launcher`` (torchrun and its options) and the rank's command.

    ``place``: the pod's number among all, as a shell expression, where ``launcher`` does not contain it.
    """
    path = job.settings.bundle_path or f"{CONFIGURATION}/{BUNDLE}"
    before = [] if place is None else [f"export PET_NODE_RANK={_literal(place)}"]
    if _is_compressed(job):
        path = UNPACKED
        before.append(f'gzip -dc "{CONFIGURATION}/{BUNDLE}.gz" > "{UNPACKED}"')
    shell = ["/bin/sh", "-c", " && ".join([*before, 'exec "$@"']), "sh"] if before else []
    directory = [] if job.settings.directory is None else ["--directory", job.settings.directory]
    rank = [*job.penstock(), "rank", path, *directory, *job.rank_options()]
    return [*shell, *launcher, "--no-python", *(_literal(word) for word in rank)]


def environment(job: Job, more: dict[str, str]) -> list[Manifest]:
    """Return the variable by which ranks find their place, and the requested ones."""
    added = container_additions(job.settings.container).get("env") or []
    if NODE_NAME in job.variables or any(isinstance(one, dict) and one.get("name") == NODE_NAME for one in added):
        raise InvalidDocument(
            f"the variable {NODE_NAME} cannot be set: Penstock sets it for every rank", remedy=f"leave {NODE_NAME} out"
        )
    path = "metadata.name" if job.any_nodes else "spec.nodeName"
    node_name = [{"name": NODE_NAME, "valueFrom": {"fieldRef": {"fieldPath": path}}}]
    variables = {name: _literal(value) for name, value in job.variables.items()}
    return node_name + [{"name": name, "value": value} for name, value in (more | variables).items()]


def resources(job: Job, group: Group) -> Manifest:
    """Return the devices of a node as limits and its CPUs as requests."""
    cpus = job.settings.cpus_per_task
    manifest = {"limits": {job.settings.gpu_resource: group.num_gpus}} if group.num_gpus else {}
    return manifest | ({"requests": {"cpu": cpus * group.num_ranks}} if cpus is not None else {})


def volumes(job: Job) -> list[Manifest]:
    """Return the volumes: shared memory, the bundle, and the claim for data and checkpoints."""
    result: list[Manifest] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    if job.settings.bundle_path is None:
        result.append({"name": "job", "configMap": {"name": _config_map_name(job)}})
    if job.settings.claim is not None:
        result.append({"name": "data", "persistentVolumeClaim": {"claimName": job.settings.claim}})
    return result


def mounts(job: Job) -> list[Manifest]:
    """Return the places where the volumes are mounted."""
    result: list[Manifest] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    if job.settings.bundle_path is None:
        result.append({"name": "job", "mountPath": CONFIGURATION, "readOnly": True})
    if job.settings.claim is not None:
        result.append({"name": "data", "mountPath": job.settings.mount})
    return result


def launcher(job: Job, group: Group, number: str) -> tuple[list[str], str | None]:
    """Return torchrun for one pod of a group, and the pod's place as ``command`` takes it.

    ``number``: the variable that holds the pod's number in its group. The first pod of the first group is at
    ``MASTER_ADDR``.
    """
    words = ["torchrun", f"--nnodes={len(job.layout.nodes)}", f"--nproc-per-node={group.num_ranks}"]
    rendezvous = ["--master-addr=$(MASTER_ADDR)", "--master-port=$(MASTER_PORT)"]
    groups = job.layout.groups
    before = sum(len(other.nodes) for other in groups[: groups.index(group)])
    if before == 0:
        return [*words, f"--node-rank=$({number})", *rendezvous], None
    return [*words, *rendezvous], f"$(({before} + {number}))"


def group_names(job: Job) -> dict[str, Group]:
    """Return the groups of nodes by the name of the task or job that they become."""
    groups = job.layout.groups
    if len(groups) == 1:
        return {CONTAINER: groups[0]}
    return {f"{CONTAINER}{group.num_ranks}x{group.num_gpus}": group for group in groups}


def affinity(job: Job, group: Group) -> Manifest:
    """Return the affinity: one pod of the job per node, on the plan's own nodes unless any nodes are allowed.

    Nodes are selected by name, not by the label kubernetes.io/hostname, which may differ or be too long.
    """
    apart = {"labelSelector": {"matchLabels": own_labels(job)}, "topologyKey": "kubernetes.io/hostname"}
    manifest: Manifest = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
    if job.any_nodes:
        return manifest
    refuse_kubernetes_nodes((node.name for node in group.nodes), job.to)
    fields = [{"key": "metadata.name", "operator": "In", "values": [node.name]} for node in group.nodes]
    terms = {"nodeSelectorTerms": [{"matchFields": [field]} for field in fields]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}} | manifest


def container(job: Job, group: Group, name: str, command: list[str], variables: dict[str, str]) -> Manifest:
    """Return the container of a pod, with its additions. Raises InvalidDocument for additions that are not allowed."""
    manifest: Manifest = {
        "name": name,
        "image": job.settings.image,
        "command": command,
        "env": environment(job, variables),
        "volumeMounts": mounts(job),
        "resources": resources(job, group),
    }
    manifest = merged(manifest, container_additions(job.settings.container))
    return {key: value for key, value in manifest.items() if value}


def pod_spec(job: Job, group: Group) -> Manifest:
    """Return the pod spec for each node of a group, without its container, with its additions.

    Raises UnsupportedRequest for invalid Kubernetes node names, InvalidDocument for additions that are not allowed.
    """
    spec = {"terminationGracePeriodSeconds": GRACE_S, "affinity": affinity(job, group), "volumes": volumes(job)}
    return dict(merged(spec, pod_additions(job.settings.pod)))


def pod_template(
    job: Job,
    group: Group,
    command: list[str],
    *,
    name: str = CONTAINER,
    variables: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
) -> Manifest:
    """Return the template of such pods. ``name``: of the container. Raises as ``pod_spec`` and ``container`` do."""
    notes = asked_annotations(job) | (annotations or {})
    containers = [container(job, group, name, command, variables or {})]
    return {
        "metadata": {"labels": pod_labels(job)} | ({"annotations": notes} if notes else {}),
        "spec": {"restartPolicy": "Never"} | pod_spec(job, group) | {"containers": containers},
    }


def only_group(job: Job) -> Group:
    """Return the one group of nodes. Raises UnsupportedRequest where nodes differ, which the target cannot express."""
    groups = job.layout.groups
    if len(groups) > 1:
        counts = ", ".join(f"{node.name} has {group.num_ranks}" for group in groups for node in group.nodes[:1])
        raise job.refuse(f"different numbers of ranks on different nodes ({counts})", "`--to jobset` or `--to volcano`")
    return groups[0]


def _is_compressed(job: Job) -> bool:
    return job.settings.bundle_path is None and len(job.bundle.encode()) > LARGEST_PLAIN_BYTES


def _config_map_name(job: Job) -> str:
    return f"{name_of(job)}-bundle"


def _literal(text: str) -> str:
    """Escape ``$(NAME)``, which Kubernetes replaces in commands and values, by doubling its dollar sign."""
    return text.replace("$(", "$$(")
