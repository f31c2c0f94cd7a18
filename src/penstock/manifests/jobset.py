"""``jobset`` and ``kueue``: a JobSet (jobset.x-k8s.io/v1alpha2), and one that Kueue admits and places by topology."""

from __future__ import annotations

from penstock.manifests import pods
from penstock.manifests.additions import Manifest
from penstock.manifests.job import File, Job
from penstock.manifests.plan_nodes import Group

KUEUE = "kueue.x-k8s.io"
NUMBER = "JOB_COMPLETION_INDEX"
"""The environment variable with the index of an indexed job's pod."""


def make(job: Job) -> list[File]:
    """Make a JobSet; nodes with equal numbers of ranks form one indexed job of the set."""
    groups = pods.group_names(job)
    first = next(iter(groups))
    jobs = [_replicated(job, name, group, first) for name, group in groups.items()]
    return pods.written(job, _jobset(job, jobs))


def make_kueue(job: Job) -> list[File]:
    """Make a JobSet for which Kueue chooses the nodes: in slices, so that neighbouring stages share a switch.

    Raises UnsupportedRequest where nodes differ in their numbers of ranks, or a pod would not fill its node.
    """
    assert job.settings.queue is not None
    group = pods.only_group(job)
    if not job.layout.fills_nodes or (group.num_gpus == 0 and job.settings.cpus_per_task is None):
        raise job.refuse(
            "pods on parts of nodes: Kueue counts resources, and would put two pods onto one node",
            "--set cpus_per_task=… so that a pod fills its node, or `--to jobset`",
        )
    replicated = _replicated(job, pods.CONTAINER, group, pods.CONTAINER, annotations=_topology(job))
    queued = {f"{KUEUE}/queue-name": job.settings.queue}
    return pods.written(job, _jobset(job, [replicated], suspend=True, labels=queued))


def _topology(job: Job) -> dict[str, str]:
    """Return the pods' topology request: slices where each switch has equally many nodes, else as near as possible."""
    level, nodes = job.settings.topology_level, len(job.layout.nodes)
    if level is None:
        return {f"{KUEUE}/podset-unconstrained-topology": "true"}
    size = job.layout.slice_size
    if size == nodes:
        return {f"{KUEUE}/podset-required-topology": level}
    if size is None or size == 1:
        return {f"{KUEUE}/podset-preferred-topology": level}
    return {f"{KUEUE}/podset-slice-required-topology": level, f"{KUEUE}/podset-slice-size": str(size)}


def _jobset(job: Job, jobs: list[Manifest], *, suspend: bool = False, labels: dict[str, str] | None = None) -> Manifest:
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": pods.metadata(job, labels=labels),
        "spec": {
            **({"suspend": True} if suspend else {}),
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": job.settings.restarts or 0},
            "replicatedJobs": jobs,
        },
    }


def _replicated(job: Job, name: str, group: Group, first: str, annotations: dict[str, str] | None = None) -> Manifest:
    """Return one indexed job: torchrun's rendezvous is at the first pod of the ``first`` job."""
    rendezvous = {"MASTER_ADDR": f"{pods.name_of(job)}-{first}-0-0.{pods.name_of(job)}", "MASTER_PORT": str(job.port)}
    command = pods.command(job, *pods.launcher(job, group, NUMBER))
    return {
        "name": name,
        "replicas": 1,
        "template": {
            "spec": {
                "completionMode": "Indexed",
                "completions": len(group.nodes),
                "parallelism": len(group.nodes),
                "backoffLimit": 0,
                "template": pods.pod_template(job, group, command, variables=rendezvous, annotations=annotations),
            }
        },
    }
