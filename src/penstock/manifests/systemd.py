"""``systemd``: one service, the same on every node of a plan, for clusters without a scheduler."""

from __future__ import annotations

from penstock.manifests import torchrun
from penstock.manifests.job import File, Job
from penstock.manifests.names import legal

FOLDER = "/etc/penstock"
RESTART_S = 10
STOP_S = 120
"""Seconds that ranks have for a checkpoint after the request to end."""


def make(job: Job) -> list[File]:
    """Make the unit, the script that it starts, and the bundle; the last two are in a folder of the job's name."""
    name = legal(job.asked_name, 63)
    return [File(f"{name}.service", _unit(job, name)), *torchrun.make(job)]


def _unit(job: Job, name: str) -> str:
    restarts = job.settings.restarts
    lines = [
        f"# Plan {job.plan_hash}. On every node: this file to /etc/systemd/system,",
        f"# {torchrun.SCRIPT} and job.json to {FOLDER}/{name},",
        *(_rendezvous_line(name) if job.any_nodes else []),
        f"# then: systemctl daemon-reload && systemctl start {name}",
        "[Unit]",
        f"Description=Penstock job {name}",
        "Wants=network-online.target",
        "After=network-online.target",
        *([] if not restarts else ["StartLimitIntervalSec=infinity", f"StartLimitBurst={restarts + 1}"]),
        "",
        "[Service]",
        "Type=exec",
        "User=penstock",
        f"WorkingDirectory={FOLDER}/{name}",
        f"EnvironmentFile=-{FOLDER}/{name}/environment",
        f"ExecStart=/bin/bash {FOLDER}/{name}/{torchrun.SCRIPT}",
        *(["Restart=no"] if not restarts else ["Restart=on-failure", f"RestartSec={RESTART_S}"]),
        "# To torchrun alone: it tells its ranks, which save and end.",
        "KillMode=mixed",
        f"TimeoutStopSec={STOP_S}",
        "LimitMEMLOCK=infinity",
        "LimitNOFILE=65536",
        "NoNewPrivileges=yes",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"


def _rendezvous_line(name: str) -> list[str]:
    return [f"# MASTER_ADDR=… (of node 0) and NODE_RANK=… (of this one, from 0) to {FOLDER}/{name}/environment,"]
