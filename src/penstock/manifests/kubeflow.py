"""``trainjob`` (trainer.kubeflow.org/v1alpha1) and ``pytorchjob`` (kubeflow.org/v1): both configure torchrun."""

from __future__ import annotations

from penstock.manifests import pods
from penstock.manifests.additions import Manifest, container_additions, pod_additions, refuse_others
from penstock.manifests.job import File, Job

LAUNCHER = ["torchrun"]
"""Both controllers set the numbers of nodes and processes, and the rendezvous, in ``PET_…`` variables."""

TRAINJOB_PODS = frozenset(
    (
        "imagePullSecrets",
        "initContainers",
        "nodeSelector",
        "schedulingGates",
        "securityContext",
        "serviceAccountName",
        "terminationGracePeriodSeconds",
        "tolerations",
        "volumes",
    )
)
TRAINJOB_CONTAINERS = frozenset(("env", "resources", "securityContext", "volumeMounts"))
"""The fields of its runtime's pods and containers that a TrainJob can set."""


def make_trainjob(job: Job) -> list[File]:
    """Make a TrainJob of a torch runtime. Raises UnsupportedRequest where nodes differ in their numbers of ranks."""
    group = pods.only_group(job)
    for setting, additions, possible in (
        ("pod", pod_additions(job.settings.pod), TRAINJOB_PODS),
        ("container", container_additions(job.settings.container), TRAINJOB_CONTAINERS),
    ):
        refuse_others(additions, setting, possible, job.to)
    container = pods.container(job, group, pods.CONTAINER, pods.command(job, LAUNCHER), {})
    trainer: Manifest = {
        "numNodes": len(group.nodes),
        "numProcPerNode": group.num_ranks,
        **{key: container[key] for key in ("image", "command", "env")},
    }
    if "resources" in container:
        trainer["resourcesPerNode"] = container["resources"]
    patch = {key: container[key] for key in ("name", "volumeMounts", "securityContext") if key in container}
    notes = pods.asked_annotations(job)
    patched = {
        "metadata": {"labels": pods.pod_labels(job)} | ({"annotations": notes} if notes else {}),
        "spec": pods.pod_spec(job, group) | {"containers": [patch]},
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
    """Make a PyTorchJob; its master is the first node. Raises UnsupportedRequest where nodes differ in rank counts.

    A restart of the whole job restarts each pod's container: the controller's limit counts all of these restarts.
    """
    group = pods.only_group(job)
    template = pods.pod_template(job, group, pods.command(job, LAUNCHER), name="pytorch")
    del template["spec"]["restartPolicy"]
    nodes, restarts = len(group.nodes), job.settings.restarts or 0
    replicas = {"Master": 1, "Worker": nodes - 1}
    manifest = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": pods.metadata(job),
        "spec": {
            "nprocPerNode": str(group.num_ranks),
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": restarts and restarts * nodes + 1},
            "pytorchReplicaSpecs": {
                role: {
                    "replicas": number,
                    "restartPolicy": "OnFailure" if restarts else "Never",
                    "template": template,
                }
                for role, number in replicas.items()
                if number
            },
        },
    }
    return pods.written(job, manifest)
