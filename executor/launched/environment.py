"""The launcher's variables in the environment of the processes that it starts. Loads no torch.

======== ============================================================== ===============================================
launcher its variables                                                  the store at which ranks meet
======== ============================================================== ===============================================
torchrun TORCHELASTIC_RUN_ID, RANK, LOCAL_RANK, WORLD_SIZE, MASTER_*    its agent's
srun     SLURM_STEP_ID, SLURM_PROCID, SLURM_LOCALID, SLURMD_NODENAME, … process 0 of the node MASTER_ADDR, or of the
                                                                        first node; port MASTER_PORT, or by the job
by hand  RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_RANK if any  process 0
======== ============================================================== ===============================================

The node's name is the value of ``--node``, SLURMD_NODENAME, NODE_NAME (Kubernetes' downward API) or the host's name.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.schemas.errors import InvalidDocument, UnsupportedRequest

Launcher = Literal["torchrun", "srun", "by hand"]
Expand = Callable[[str], Sequence[str]]

FIRST_PORT, PORTS = 20_000, 12_000
"""Ports for jobs of Slurm: below the range from which the kernel assigns ports."""

_BY_HAND = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One of the processes that a launcher has started.

    ``process`` of ``processes``: the launcher's number; ``local_rank``: its number on ``node``. The store is at
    ``host:port``; ``opens_store``: this process opens it. ``job_id``: Slurm's job id, if Slurm started it.
    """

    launcher: Launcher
    process: int
    processes: int
    local_rank: int
    node: str
    host: str
    port: int
    opens_store: bool
    job_id: str | None = None

    def __str__(self) -> str:
        return f"process {self.process} of {self.processes} (number {self.local_rank} on {self.node})"


def read_launch(environ: Mapping[str, str], expand: Expand, node: str | None = None) -> Launch:
    """Read how this process was started. ``expand``: from a hostlist to names; ``node``: its node's name in the plan.

    Raises UnsupportedRequest where no launcher has started it, InvalidDocument for inconsistent variables.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        return _started_by_hand(environ, node, "torchrun")
    if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:
        return _started_by_srun(environ, expand, node)
    if all(name in environ for name in _BY_HAND):
        return _started_by_hand(environ, node, "by hand")
    if "SLURM_JOB_ID" in environ:
        raise UnsupportedRequest(
            f"this is the batch script of Slurm's job {environ['SLURM_JOB_ID']}, not one of its tasks",
            remedy="srun penstock rank …, which starts one process per task",
        )
    missing = ", ".join(name for name in _BY_HAND if name not in environ)
    raise UnsupportedRequest(
        f"no launcher has started this process: SLURM_STEP_ID (srun) and TORCHELASTIC_RUN_ID (torchrun) are not set; "
        f"processes started by hand also need {missing}",
        remedy="start `srun penstock rank …` or `torchrun --no-python … penstock rank …`; or, for ranks on this "
        "machine "
        "only, `penstock run`",
    )


def _started_by_srun(environ: Mapping[str, str], expand: Expand, node: str | None) -> Launch:
    node_name = environ.get("SLURMD_NODENAME") or _host_name()
    nodes = list(expand(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or node_name))
    process, local_rank = _count(environ, "SLURM_PROCID"), _count(environ, "SLURM_LOCALID")
    step_tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    host = environ.get("MASTER_ADDR") or nodes[0]
    at_a_node = host in nodes
    job_id = environ.get("SLURM_JOB_ID", "0")
    port = _port(environ) if "MASTER_PORT" in environ else FIRST_PORT + _count(environ, "SLURM_JOB_ID") % PORTS
    return Launch(
        launcher="srun",
        process=process,
        processes=_count(environ, step_tasks),
        local_rank=local_rank,
        node=node or node_name,
        host=host,
        port=port,
        opens_store=(node_name == host and local_rank == 0) if at_a_node else process == 0,
        job_id=job_id,
    )


def _started_by_hand(environ: Mapping[str, str], node: str | None, launcher: Launcher) -> Launch:
    has_store = launcher == "torchrun" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    process, processes = _count(environ, "RANK"), _count(environ, "WORLD_SIZE")
    if not process < processes:
        raise InvalidDocument(f"RANK {process} has to be below WORLD_SIZE {processes}; ranks are numbered from 0")
    return Launch(
        launcher=launcher,
        process=process,
        processes=processes,
        local_rank=_count(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else 0,
        node=node or environ.get("SLURMD_NODENAME") or environ.get("NODE_NAME") or _host_name(),
        host=_text(environ, "MASTER_ADDR"),
        port=_port(environ),
        opens_store=process == 0 and not has_store,
        job_id=environ.get("SLURM_JOB_ID"),
    )


def _host_name() -> str:
    return socket.gethostname()


def _text(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "")
    if not value:
        raise InvalidDocument(f"{name} is not set; the launcher has to set it")
    return value


def _count(environ: Mapping[str, str], name: str) -> int:
    text = _text(environ, name)
    if not (text.isascii() and text.isdecimal()):
        raise InvalidDocument(f"{name} is {text!r}; the launcher has to set it to a whole number")
    return int(text)


def _port(environ: Mapping[str, str]) -> int:
    port = _count(environ, "MASTER_PORT")
    if not 0 < port < 1 << 16:
        raise InvalidDocument(f"MASTER_PORT is {port}; a port is between 1 and 65535")
    return port
