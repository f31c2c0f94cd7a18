"""``ray``: a script that reserves the plan's nodes as a placement group and starts its ranks there."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.manifests.job import File, Job
from penstock.manifests.names import legal

SCRIPT = "ray_job.py"


def make(job: Job) -> list[File]:
    """Make the script, which is the same for every plan, its input (nodes and the ranks' command), and the bundle."""
    text = (Path(__file__).parent / SCRIPT).read_text(encoding="utf-8")
    directory = [] if job.settings.directory is None else ["--directory", job.settings.directory]
    launch = {
        "name": legal(job.asked_name, 63),
        "plan": job.plan_hash,
        "any_nodes": job.any_nodes,
        "port": job.settings.port,
        "command": job.penstock(),
        # Ray's bundle index is the position of a node in the plan: no rank has to look for it.
        "options": [*directory, *(word for word in job.rank_options() if word != "--any-nodes")],
        "environment": job.variables,
        "nodes": [
            {
                "name": node.name,
                "ranks": node.ranks,
                "stages": node.stages,
                "resources": {"CPU": len(node.ranks), **({"GPU": node.num_gpus} if node.num_gpus else {})},
            }
            for node in job.layout.nodes
        ],
    }
    return [
        File(SCRIPT, text),
        File("launch.json", json.dumps(launch, indent=1, ensure_ascii=False) + "\n"),
        job.bundle_file(),
    ]
