"""``torchrun``: one script for every node; each starts as many ranks as the plan has there."""

from __future__ import annotations

import shlex

from penstock.manifests.job import File, Job
from penstock.manifests.names import legal, refuse_hosts
from penstock.manifests.shell import INDENT, comments, continued, exports, find_bundle, rank_command

SCRIPT = "torchrun.sh"
HERE = '$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)'


def make(job: Job) -> list[File]:
    """The script and the bundle."""
    return [File(SCRIPT, script(job), is_executable=True), job.bundle_file()]


def script(job: Job) -> str:
    """The text of the script. Raises UnsupportedRequest for unequal counts on any nodes."""
    if not job.any_nodes:
        refuse_hosts(job.layout.names, job.to)
    lines = ["#!/usr/bin/env bash"]
    lines += comments(job.facts() if not job.any_nodes else job.facts()[:1])
    lines += comments(["Run this on every node, with MASTER_ADDR where the first node is not the one below."])
    lines += ["set -euo pipefail", "", *find_bundle(HERE), *exports(job), "", *_meeting_place(job), *_count(job), ""]
    lines += continued(
        f'exec torchrun --nnodes={len(job.layout.nodes)} --nproc-per-node="$count"',
        f'--rdzv-backend=c10d --rdzv-id={legal(job.asked_name, 63)} --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"',
        f"--no-python {rank_command(job)}",
    )
    return "\n".join(lines) + "\n"


def _meeting_place(job: Job) -> list[str]:
    first = (
        "${MASTER_ADDR:?say in MASTER_ADDR the address of one of the nodes, the same on all}"
        if job.any_nodes
        else f"${{MASTER_ADDR:-{shlex.quote(job.layout.names[0])}}}"
    )
    return [f"export MASTER_ADDR={first}", f"export MASTER_PORT=${{MASTER_PORT:-{job.port}}}"]


def _count(job: Job) -> list[str]:
    groups = job.layout.groups
    if len({group.num_ranks for group in groups}) == 1:
        return [f"count={groups[0].num_ranks}"]
    if job.any_nodes:
        raise job.refuse("different numbers of ranks on nodes that are not named", "--nodes named, or `--to sbatch`")
    lines = ["node=${SLURMD_NODENAME:-${NODE_NAME:-$(hostname)}}", "case $node in"]
    for group in groups:
        names = " | ".join(f"{node.name} | {node.name}.*" for node in group.nodes)
        lines.append(f"{INDENT}{names}) count={group.num_ranks} ;;")
    lines.append(
        f'{INDENT}*) echo "the plan has no node $node; it runs on {", ".join(job.layout.names)}" >&2; exit 65 ;;'
    )
    return [*lines, "esac"]
