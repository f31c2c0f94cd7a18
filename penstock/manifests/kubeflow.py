"""``trainjob`` (trainer.kubeflow.org/v1alpha1) and ``pytorchjob`` (kubeflow.org/v1): both instruct torchrun."""

from __future__ import annotations

from penstock.manifests import pods
from penstock.manifests.job import File, Job
from penstock.manifests.pods import Manifest

LAUNCHER = ["torchrun"]
"""Both controllers say numbers of nodes and processes, and the meeting place, in ``PET_…`` variables."""


def make_trainjob(job: Job) -> list[File]:
    """A TrainJob of a torch runtime. Raises UnsupportedRequest where nodes differ in their numbers of ranks."""
    group = pods.only_group(job)
    trainer: Manifest = {
        "numNodes": len(group.nodes),
        "numProcPerNode": group.num_ranks,
        "image": job.settings.image,
        "command": pods.command(job, LAUNCHER),
        "env": pods.environment(job, {}),
    }
    if asked := pods.resources(job, group):
        trainer["resourcesPerNode"] = asked
    patched = {
        "metadata": {"labels": pods.own_labels(job)},
        "spec": {
            "terminationGracePeriodSeconds": pods.GRACE_S,
            "affinity": pods.affinity(job, group),
            "volumes": pods.volumes(job),
            "containers": [{"name": pods.CONTAINER, "volumeMounts": pods.mounts(job)}],
        },
    }
    replicated = {"name": "node", "template": {"spec": {"template": patched}}}
    manifest = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": pods.metadata(job),
        "spec": {
            "runtimeRef": {"name": job.settings.runtime},
            "trainer": trainer,
            "runtimePatches": [
                {
                    "manager": "penstock/export",
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}},
                }
            ],
        },
    }
    return pods.written(job, manifest)


def make_pytorchjob(job: Job) -> list[File]:
    """A PyTorchJob: the first node is its master. Raises UnsupportedRequest where nodes differ in numbers of ranks."""
    group = pods.only_group(job)
    template = pods.pod_template(job, group, LAUNCHER, container="pytorch")
    del template["spec"]["restartPolicy"]
    replicas = {"Master": 1, "Worker": len(group.nodes) - 1}
    manifest = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": pods.metadata(job),
        "spec": {
            "nprocPerNode": str(group.num_ranks),
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": job.settings.restarts or 0},
            "pytorchReplicaSpecs": {
                role: {"replicas": number, "restartPolicy": "Never", "template": template}
                for role, number in replicas.items()
                if number
            },
        },
    }
    return pods.written(job, manifest)
