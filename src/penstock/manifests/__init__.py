"""Manifests that start a plan's ranks: ``make(file, "sbatch", settings)``. A new target is a line in ``TARGETS``.

Every target starts ``penstock rank job.json``, which finds its stage by host and local rank: the order in
which a scheduler lists nodes or numbers ranks is never relied on.

May import: `schemas`, `importers`, `planning`.
Start reading at this file, then `slurm.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from penstock.manifests import jobset, kubeflow, pods, ray, slurm, systemd, torchrun, volcano
from penstock.manifests.job import BUNDLE, OF_BUNDLES, OF_RANKS, File, Job, job_of
from penstock.schemas.errors import InvalidDocument, NotFound, UnsupportedRequest
from penstock.schemas.ranks.launch import LaunchSettings

if TYPE_CHECKING:
    from penstock.schemas.plan import PlanFile

Nodes = Literal["named", "any"]

_RANKS = frozenset((*OF_RANKS, *OF_BUNDLES))
_SHELL = _RANKS | {"port", "setup"}
_SLURM = _SHELL | {
    "partition",
    "account",
    "qos",
    "constraint",
    "time_limit",
    "cpus_per_task",
    "sbatch_options",
    "srun_options",
}
_ON_ANY = frozenset({"switches", "segment"})
_PODS = _RANKS | {
    "image",
    "namespace",
    "gpu_resource",
    "cpus_per_task",
    "claim",
    "mount",
    "bundle_path",
    "labels",
    "annotations",
    "pod",
    "container",
}


@dataclass(frozen=True, slots=True)
class Target:
    """A scheduler or launcher that starts ranks.

    Attributes
    ----------
    then
        The next command to type, given the first file and its folder.
    takes
        Settings that have an effect.
    needs
        Settings that are required.
    nodes
        The nodes that it can run on, its default first.
    steps
        The number of steps where the settings have no number.
    only
        The name of its file, where there is always exactly one.
    """

    help: str
    then: str
    make: Callable[[Job], list[File]]
    takes: frozenset[str]
    needs: tuple[str, ...] = ("model", "steps")
    nodes: tuple[Nodes, ...] = ("named", "any")
    steps: int | None = None
    only: str = ""


def _bundle(job: Job) -> list[File]:
    return [job.bundle_file()]


_POD_NEEDS = ("model", "steps", "image")
_SUBMIT = "cd {folder} && sbatch job.sbatch"
_CREATE = "kubectl create -f {first}"

TARGETS: dict[str, Target] = {
    "bundle": Target(
        "what `penstock rank` needs: any launcher can start ranks from it",
        "srun or torchrun --no-python penstock rank {first} …, one process per device",
        _bundle,
        frozenset(OF_BUNDLES),
        (),
        ("named",),
        only=BUNDLE,
    ),
    "sbatch": Target("Slurm: srun starts a task per rank", _SUBMIT, slurm.make, _SLURM | _ON_ANY),
    "sbatch-torchrun": Target(
        "Slurm: srun starts torchrun once per node", _SUBMIT, slurm.make_torchrun, _SLURM | _ON_ANY
    ),
    "hostfile": Target(
        "one line per rank with its node, for SLURM_HOSTFILE",
        "inside the allocation SLURM_HOSTFILE={first} srun --distribution=arbitrary …",
        slurm.make_hostfile,
        frozenset(),
        (),
        ("named",),
        steps=1,
        only=slurm.HOSTFILE,
    ),
    "torchrun": Target(
        "a script to run on every node",
        "bash {first} on every node; keep the files together",
        torchrun.make,
        _SHELL,
    ),
    "systemd": Target(
        "a service, the same on every node",
        "{first} says in its first lines where the files go",
        systemd.make,
        _SHELL | {"restarts"},
    ),
    "trainjob": Target(
        "Kubeflow Trainer: TrainJob", _CREATE, kubeflow.make_trainjob, _PODS | {"runtime"}, _POD_NEEDS, only=pods.FILE
    ),
    "pytorchjob": Target(
        "Kubeflow Training Operator: PyTorchJob",
        _CREATE,
        kubeflow.make_pytorchjob,
        _PODS | {"restarts"},
        _POD_NEEDS,
        only=pods.FILE,
    ),
    "jobset": Target(
        "Kubernetes: JobSet", _CREATE, jobset.make, _PODS | {"port", "restarts"}, _POD_NEEDS, only=pods.FILE
    ),
    "kueue": Target(
        "Kubernetes: JobSet that Kueue places by topology, stages near each other as slices",
        _CREATE,
        jobset.make_kueue,
        _PODS | {"port", "restarts", "queue", "topology_level"},
        (*_POD_NEEDS, "queue"),
        ("any",),
        only=pods.FILE,
    ),
    "volcano": Target(
        "Volcano: Job, stages near each other as partitions",
        _CREATE,
        volcano.make,
        _PODS | {"port", "restarts", "queue", "highest_tier"},
        _POD_NEEDS,
        only=pods.FILE,
    ),
    "ray": Target(
        "Ray: a script with a placement group",
        "cd {folder} && ray job submit --working-dir . -- python ray_job.py",
        ray.make,
        _RANKS | {"port"},
    ),
}


def make(file: PlanFile, to: str, settings: LaunchSettings) -> list[File]:
    """Return the files of one target; several files belong in one folder.

    Raises NotFound for an unknown target, InvalidDocument naming settings that are missing or without effect,
    UnsupportedRequest for a plan that the target cannot express, InvalidPlan for a plan that cannot be run.
    """
    target = TARGETS.get(to)
    if target is None:
        raise NotFound(f"there is no target {to!r}; the targets are {', '.join(TARGETS)}")
    any_nodes = check(to, target, settings)
    return target.make(job_of(file, to, settings, any_nodes, target.steps))


def check(to: str, target: Target, settings: LaunchSettings) -> bool:
    """Return whether the job can run on any nodes. Raises InvalidDocument or UnsupportedRequest as ``make`` does."""
    refuse_settings(to, settings, target.takes)
    missing = [name for name in target.needs if getattr(settings, name) is None]
    if missing:
        raise InvalidDocument(
            f"{to} needs {' and '.join(f'`{name}`' for name in missing)}: "
            + "; ".join(f"{name}: {LaunchSettings.model_fields[name].description}" for name in missing),
            remedy=f"{' '.join(f'--set {name}=…' for name in missing)}; over HTTP "
            f"{''.join(f'&{name}=…' for name in missing)} in the query",
        )
    nodes = settings.nodes or target.nodes[0]
    if nodes not in target.nodes:
        raise UnsupportedRequest(
            f"{to} runs on {target.nodes[0]} nodes only: it chooses them itself",
            remedy=f"nodes={target.nodes[0]} (--nodes {target.nodes[0]})",
        )
    on_any = _ON_ANY & settings.model_fields_set
    if nodes == "named" and on_any:
        raise InvalidDocument(
            f"{', '.join(sorted(on_any))} would have no effect on named nodes", remedy="nodes=any (--nodes any)"
        )
    return nodes == "any"


def refuse_settings(to: str, settings: LaunchSettings, takes: frozenset[str]) -> None:
    """Raise InvalidDocument naming settings that would have no effect."""
    idle = sorted(settings.model_fields_set - takes)
    if idle:
        accepted = f"it takes {', '.join(sorted(takes))}" if takes else "it takes none"
        raise InvalidDocument(f"{', '.join(idle)} would have no effect on {to}; {accepted}", remedy="leave it out")


__all__ = ["BUNDLE", "TARGETS", "File", "LaunchSettings", "Target", "check", "make", "refuse_settings"]
