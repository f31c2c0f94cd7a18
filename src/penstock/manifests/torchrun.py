"""``torchrun``: one script for every node; each starts the number of ranks that the plan has there.

A node gets its number (a static rendezvous). The alternative, c10d, finds the first node by comparing addresses and
uses the host's own name for itself as the rendezvous: both fail where other hosts do not resolve that name.
"""

from __future__ import annotations

import shlex
from collections import Counter

from penstock.manifests.job import BUNDLE, File, Job
from penstock.manifests.names import refuse_hosts
from penstock.manifests.shell import INDENT, comments, continued, find_bundle, preparation, rank_command

SCRIPT = "torchrun.sh"
SHOWN = 8
HERE = '$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)'


def make(job: Job) -> list[File]:
    """Make the script and the bundle."""
    return [File(SCRIPT, script(job), is_executable=True), job.bundle_file()]


def script(job: Job) -> str:
    """Return the text of the script. Raises UnsupportedRequest for unequal counts on any nodes."""
    if not job.any_nodes:
        refuse_hosts(job.layout.names, job.to)
    lines = ["#!/usr/bin/env bash"]
    lines += comments(job.facts())
    lines += comments(["Run this on every node. MASTER_ADDR is an address of the first one."])
    lines += ["set -euo pipefail", "", *find_bundle(HERE, f"keep {BUNDLE} next to this script"), *preparation(job), ""]
    lines += [*(_any_place(job) if job.any_nodes else _own_place(job)), ""]
    # torchrun would print a long warning that it sets this.
    lines += ["export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}"]
    lines += continued(
        f'exec torchrun --nnodes={len(job.layout.nodes)} --node-rank="$place" --nproc-per-node="$count"',
        '--master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT"',
        f"--no-python {rank_command(job)}",
    )
    return "\n".join(lines) + "\n"


def _any_place(job: Job) -> list[str]:
    """Return lines that take the node's number from Slurm, or from the caller of the script."""
    counts = {group.num_ranks for group in job.layout.groups}
    if len(counts) > 1:
        raise job.refuse("different numbers of ranks on nodes that are not named", "nodes=named (--nodes named)")
    last = len(job.layout.nodes) - 1
    return [
        "export MASTER_ADDR=${MASTER_ADDR:?say in MASTER_ADDR the address of node 0, the same on all nodes}",
        f"export MASTER_PORT=${{MASTER_PORT:-{job.port}}}",
        f"place=${{NODE_RANK:-${{SLURM_NODEID:?say in NODE_RANK which node this is, from 0 to {last}}}}}",
        f"count={counts.pop()}",
    ]


def _own_place(job: Job) -> list[str]:
    """Return lines that find the node's number by its name."""
    names = job.layout.names
    lines = [
        f"export MASTER_ADDR=${{MASTER_ADDR:-{shlex.quote(names[0])}}}",
        f"export MASTER_PORT=${{MASTER_PORT:-{job.port}}}",
        "node=${SLURMD_NODENAME:-${NODE_NAME:-$(hostname)}}",
        "case $node in",
    ]
    shorts = Counter(name.partition(".")[0] for name in names)
    for place, node in enumerate(job.layout.nodes):
        short = node.name.partition(".")[0]
        forms = [node.name, *([short, f"{short}.*"] if shorts[short] == 1 else [f"{node.name}.*"])]
        lines.append(f"{INDENT}{' | '.join(dict.fromkeys(forms))}) place={place} count={len(node.ranks)} ;;")
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    lines.append(f'{INDENT}*) echo "the plan has no node $node; it runs on {shown}" >&2; exit 65 ;;')
    return [*lines, "esac"]
