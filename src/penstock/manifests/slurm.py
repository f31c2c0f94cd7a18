"""``sbatch``, ``sbatch-torchrun`` and ``hostfile``: jobs of Slurm.

Slurm sorts the nodes of ``--nodelist``, so a rank's number does not determine its stage: `penstock rank` looks up
host and local rank. The hostfile makes the numbers agree with the plan as well, and gives each node its own count.
"""

from __future__ import annotations

import shlex

from penstock.importers.cluster.hostlist import fold
from penstock.manifests import torchrun
from penstock.manifests.job import BUNDLE, File, Job
from penstock.manifests.names import legal, refuse_hosts
from penstock.manifests.shell import comments, continued, find_bundle, preparation, rank_command

HOSTFILE = "hostfile"
SCRIPT = "job.sbatch"
SUBMITTED_FROM = "$SLURM_SUBMIT_DIR"
FIRST_PORT, NUM_PORTS = 20_000, 12_000
WARNING_S = 120
"""Seconds before the time limit at which a job gets a signal, so that it can write a checkpoint."""


def make(job: Job) -> list[File]:
    """Make a script in which srun starts one task per rank, the hostfile where nodes are named, and the bundle."""
    files = [File(SCRIPT, _script(job, _srun(job)), is_executable=True)]
    if not job.any_nodes:
        files.append(File(HOSTFILE, hosts(job)))
    return [*files, job.bundle_file()]


def make_torchrun(job: Job) -> list[File]:
    """Make a script in which srun starts torchrun once per node, torchrun's script, and the bundle."""
    files = torchrun.make(job)
    return [File(SCRIPT, _script(job, _srun_torchrun(job), tasks_are_nodes=True), is_executable=True), *files]


def make_hostfile(job: Job) -> list[File]:
    """Make the hostfile alone."""
    refuse_hosts(job.layout.names, job.to)
    return [File(HOSTFILE, hosts(job))]


def hosts(job: Job) -> str:
    """Return one line per rank, in the order of ranks: its node."""
    return "".join(f"{name}\n" for name in job.layout.hosts_by_rank())


def _script(job: Job, launch: list[str], *, tasks_are_nodes: bool = False) -> str:
    if not job.any_nodes:
        refuse_hosts(job.layout.names, job.to)
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(job, tasks_are_nodes))]
    lines += ["", *comments(job.facts())]
    advice = f"keep {BUNDLE} next to {SCRIPT}, and submit it from their folder"
    lines += ["set -euo pipefail", "", *find_bundle(SUBMITTED_FROM, advice), *preparation(job), "", *launch]
    return "\n".join(lines) + "\n"


def _options(job: Job, tasks_are_nodes: bool) -> list[str]:
    settings, layout = job.settings, job.layout
    name = legal(job.asked_name, 63)
    options = [f"--job-name={name}", f"--output={name}-%j.log", f"--nodes={len(layout.nodes)}"]
    counts = {len(node.ranks) for node in layout.nodes}
    if tasks_are_nodes:
        options.append("--ntasks-per-node=1")
    elif len(counts) == 1:
        options.append(f"--ntasks-per-node={max(counts)}")
    else:
        options.append(f"--ntasks={layout.num_ranks}")
    if not job.any_nodes:
        options.append(f"--nodelist={fold(layout.names)}")
    gpus = [node.num_gpus for node in layout.nodes]
    if any(gpus):
        options.append(f"--gpus-per-node={gpus[0]}" if len(set(gpus)) == 1 else f"--gpus={sum(gpus)}")
    if layout.fills_nodes:
        # An exclusive node includes its CPUs and GPUs, but only the memory that was requested: 0 requests all.
        options += ["--exclusive", "--mem=0"]
    for flag, value in (
        ("partition", settings.partition),
        ("account", settings.account),
        ("qos", settings.qos),
        ("constraint", settings.constraint),
        ("time", settings.time_limit),
        ("cpus-per-task", _cpus_per_task(job, tasks_are_nodes)),
        ("switches", settings.switches),
        ("segment", settings.segment),
    ):
        options += [] if value is None else [f"--{flag}={value}"]
    if settings.checkpoint is not None:
        options += ["--requeue", "--open-mode=append", f"--signal=TERM@{WARNING_S}"]
    return [*options, *settings.sbatch_options]  # sbatch takes the last of several


def _srun(job: Job) -> list[str]:
    counts = {len(node.ranks) for node in job.layout.nodes}
    if job.any_nodes and len(counts) > 1:
        raise job.refuse("different numbers of ranks on nodes that are not named", "nodes=named (--nodes named)")
    lines = [] if job.settings.port is None else [f"export MASTER_PORT={job.settings.port}"]
    how = f"srun --ntasks={job.layout.num_ranks} --kill-on-bad-exit=1 {_cpus(job, False)}"
    if not job.any_nodes:
        lines += [f'export SLURM_HOSTFILE="$here/{HOSTFILE}"', "unset SLURM_NTASKS_PER_NODE"]
        how += " --distribution=arbitrary"
    return lines + continued(how, *_srun_options(job), rank_command(job))


def _srun_torchrun(job: Job) -> list[str]:
    """Return lines that start torchrun by srun; the first node is the plan's, or on any nodes Slurm's first."""
    first = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)' if job.any_nodes else job.layout.names[0]
    return [
        f"first={first}",
        'MASTER_ADDR=$(scontrol --oneliner show node "$first" | sed -n "s/.* NodeAddr=\\([^ ]*\\) .*/\\1/p")',
        f"MASTER_PORT={_port(job)}",
        "PENSTOCK_BUNDLE=$bundle",
        "export MASTER_ADDR MASTER_PORT PENSTOCK_BUNDLE",
        *continued(
            f"srun --ntasks={len(job.layout.nodes)} --ntasks-per-node=1 --kill-on-bad-exit=1 {_cpus(job, True)}",
            *_srun_options(job),
            f'bash "$here/{torchrun.SCRIPT}"',
        ),
    ]


def _port(job: Job) -> str:
    """Return a port that concurrent jobs on a node do not share."""
    return str(job.settings.port) if job.settings.port else f"$(({FIRST_PORT} + SLURM_JOB_ID % {NUM_PORTS}))"


def _srun_options(job: Job) -> list[str]:
    """Return the requested srun options, on a line of their own."""
    return [shlex.join(job.settings.srun_options)] if job.settings.srun_options else []


def _cpus_per_task(job: Job, tasks_are_nodes: bool) -> int | None:
    """Return the CPUs of a task, which is a rank or all ranks of a node."""
    cpus = job.settings.cpus_per_task
    return cpus and cpus * (max(len(node.ranks) for node in job.layout.nodes) if tasks_are_nodes else 1)


def _cpus(job: Job, tasks_are_nodes: bool) -> str:
    """Return the option for srun, which does not inherit ``--cpus-per-task`` and would bind a task to one CPU."""
    cpus = _cpus_per_task(job, tasks_are_nodes)
    return "--cpu-bind=none" if cpus is None else f"--cpus-per-task={cpus}"
