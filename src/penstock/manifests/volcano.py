"""``volcano``: a Job (batch.volcano.sh/v1alpha1) that is scheduled as a gang, its pods in partitions by the network."""

from __future__ import annotations

from penstock.manifests import pods
from penstock.manifests.additions import Manifest
from penstock.manifests.job import File, Job
from penstock.manifests.plan_nodes import Group

NUMBER = "VC_TASK_INDEX"
"""The variable that the plugin ``env`` sets."""


def make(job: Job) -> list[File]:
    """Make a Job; nodes with equal numbers of ranks form one task."""
    groups = pods.group_names(job)
    first, restarts = next(iter(groups)), job.settings.restarts
    spec: Manifest = {
        "schedulerName": "volcano",
        **({"queue": job.settings.queue} if job.settings.queue else {}),
        "minAvailable": len(job.layout.nodes),
        # Volcano counts the restart that it is about to make, and gives up when it reaches this number.
        **({"maxRetry": restarts + 1} if restarts else {}),
        "plugins": {"env": [], "svc": []},
        "policies": [{"events": ["PodFailed", "PodEvicted"], "action": "RestartJob" if restarts else "AbortJob"}],
        **_network(job),
        "tasks": [_task(job, name, group, first) for name, group in groups.items()],
    }
    manifest = {
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "metadata": pods.metadata(job),
        "spec": spec,
    }
    return pods.written(job, manifest)


def _network(job: Job) -> Manifest:
    """Return the constraint of the whole job to one HyperNode, where its tier differs from the partitions' tier."""
    tier = job.settings.highest_tier
    if tier is None or _has_partitions(job):
        return {}
    return {"networkTopology": {"mode": "hard", "highestTierAllowed": tier}}


def _has_partitions(job: Job) -> bool:
    size = job.layout.slice_size
    return len(job.layout.groups) == 1 and size is not None and 1 < size < len(job.layout.nodes)


def _task(job: Job, name: str, group: Group, first: str) -> Manifest:
    rendezvous = {"MASTER_ADDR": f"{pods.name_of(job)}-{first}-0.{pods.name_of(job)}", "MASTER_PORT": str(job.port)}
    command = pods.command(job, *pods.launcher(job, group, NUMBER))
    task: Manifest = {
        "name": name,
        "replicas": len(group.nodes),
        "template": pods.pod_template(job, group, command, variables=rendezvous),
    }
    if _has_partitions(job):
        size = job.layout.slice_size
        assert size is not None
        task["partitionPolicy"] = {"totalPartitions": len(group.nodes) // size, "partitionSize": size}
        if job.settings.highest_tier is not None:
            network = {"mode": "hard", "highestTierAllowed": job.settings.highest_tier}
            task["partitionPolicy"]["networkTopology"] = network
    return task
