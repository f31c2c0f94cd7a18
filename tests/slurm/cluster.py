"""A real Slurm in a temporary directory: munge, the controller, and several node daemons on this one host.

Daemons run in the foreground as children of the tests, on ports that are kept for them, with configuration, keys,
spools and logs of their own. Nodes share the host's name: in a job ``SLURMD_NODENAME`` says which one a task is on.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
from ports import keep_port

LIMIT_S = 90.0
STEPS_END_S = 10.0
"""Longest time that killed steps may take to end, in seconds."""
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch")
PACKAGES = "slurm-wlm munge"
DEVICES_PER_NODE = 2


def why_not() -> str | None:
    """Return why Slurm cannot run here; None where it can."""
    if os.geteuid() != 0:
        return "Slurm's daemons start tasks as other users, which needs root"
    missing = [name for name in NEEDED if shutil.which(name) is None]
    return f"install Debian's {PACKAGES}: there is no {', '.join(missing)}" if missing else None


class Slurm:
    """Nodes ``n0``, ``n1``, … with two CPUs and two devices each; ``leaves``: which of them share a switch."""

    def __init__(self, directory: Path, leaves: tuple[tuple[str, ...], ...]) -> None:
        self.directory = directory
        self.nodes = [node for leaf in leaves for node in leaf]
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))
        }
        self.environment["SLURM_CONF"] = str(directory / "slurm.conf")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._open = ExitStack()
        self._write(leaves)
        try:
            self._start("munged", "--foreground", "--force", *self._munge("key", "socket", "pid", "log", "seed"))
            self.until("munge answers", lambda: (directory / "munge.socket").exists())
            self._start("slurmctld", "-D")
            for node in self.nodes:
                self._start("slurmd", "-D", "-N", node)
            self.until("all nodes are idle", self._are_idle)
        except BaseException:
            self.close()
            raise

    def run(self, *command: str, folder: Path | None = None) -> str:
        """Return the output of a command."""
        done = subprocess.run(
            command, env=self.environment, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}\n{self._ends()}"
        return done.stdout

    def submit(self, script: Path, *options: str) -> str:
        """Submit a job from the script's folder, and return its number."""
        return self.run("sbatch", "--parsable", *options, str(script), folder=script.parent).strip()

    def finished(self, job: str) -> int:
        """Return the exit code of a job, when it has ended."""
        self.until(f"job {job} ends", lambda: self._field(job, "JobState") not in {"PENDING", "RUNNING", "COMPLETING"})
        self.until(f"nodes of job {job} are idle", self._are_idle)
        code, _, number = self._field(job, "ExitCode").partition(":")
        return int(code) or int(number)

    def until(self, what: str, holds: Callable[[], bool]) -> None:
        """Wait; AssertionError with the ends of the daemons' logs when it takes too long."""
        give_up_at = time.monotonic() + LIMIT_S
        while not holds():
            dead = [process.args for process in self._processes if process.poll() is not None]
            assert not dead, f"ended while waiting until {what}: {dead}\n{self._ends()}"
            assert time.monotonic() < give_up_at, f"waited too long until {what}\n{self._ends()}"
            time.sleep(0.1)

    def close(self) -> None:
        """End all jobs and daemons. Steps are killed: scancel would give tasks of a test that failed ``KillWait``."""
        for process in (left := self.left_over()):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, STEPS_END_S)
        for daemon in reversed(self._processes):
            daemon.terminate()
        for daemon in reversed(self._processes):
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._open.close()

    def left_over(self) -> list[psutil.Process]:
        """Return this Slurm's processes beside its daemons: steps, by their logs, and tasks, by their environment."""
        daemons = {process.pid for process in self._processes}
        return [process for process in psutil.process_iter() if process.pid not in daemons and self._has(process)]

    def _has(self, process: psutil.Process) -> bool:
        try:
            if process.name().startswith("slurmstepd"):
                return any(file.path.startswith(f"{self.directory}/") for file in process.open_files())
            mine = process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]
            return mine and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            return False

    def _write(self, leaves: tuple[tuple[str, ...], ...]) -> None:
        here, host = self.directory, socket.gethostname().partition(".")[0]
        controller, *ports = (keep_port(self._open) for _ in ["", *self.nodes])
        (here / "munge.key").write_bytes(os.urandom(1024))
        (here / "munge.key").chmod(0o400)
        (here / "state").mkdir()
        devices = [here / f"device{i}" for i in range(DEVICES_PER_NODE)]
        for device in devices:
            device.touch()
        lines = [
            *("ClusterName=tests", f"SlurmctldHost={host}(127.0.0.1)", f"SlurmctldPort={controller}"),
            *("AuthType=auth/munge", "CryptoType=crypto/munge", f"AuthInfo=socket={here}/munge.socket"),
            *(
                "SlurmUser=root",
                "SlurmdUser=root",
                f"StateSaveLocation={here}/state",
                f"SlurmdSpoolDir={here}/spool-%n",
            ),
            *(f"SlurmctldPidFile={here}/slurmctld.pid", f"SlurmdPidFile={here}/slurmd-%n.pid"),
            *(f"SlurmctldLogFile={here}/slurmctld.log", f"SlurmdLogFile={here}/slurmd-%n.log"),
            *("ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "SwitchType=switch/none", "MpiDefault=none"),
            *("SelectType=select/cons_tres", "TopologyPlugin=topology/tree", "ReturnToService=2", "KillWait=30"),
            *("SchedulerParameters=batch_sched_delay=0,sched_min_interval=0", "SlurmdParameters=config_overrides"),
            "GresTypes=gpu",
        ]
        for node, port in zip(self.nodes, ports, strict=True):
            place = f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
            lines.append(f"{place} CPUs=2 RealMemory=1000 Gres=gpu:{DEVICES_PER_NODE}")
        lines.append("PartitionName=main Nodes=ALL Default=YES State=UP")
        (here / "slurm.conf").write_text("\n".join(lines) + "\n")
        gres = [f"NodeName={node} Name=gpu File={here}/device[0-{DEVICES_PER_NODE - 1}]" for node in self.nodes]
        (here / "gres.conf").write_text("\n".join(gres) + "\n")
        switches = [f"SwitchName=leaf{i} Nodes={','.join(leaf)}" for i, leaf in enumerate(leaves)]
        switches.append(f"SwitchName=spine Switches=leaf[0-{len(leaves) - 1}]")
        (here / "topology.conf").write_text("\n".join(switches) + "\n")

    def _munge(self, *files: str) -> list[str]:
        options = {"key": "key-file", "socket": "socket", "pid": "pid-file", "log": "log-file", "seed": "seed-file"}
        return [f"--{options[name]}={self.directory}/munge.{name}" for name in files]

    def _start(self, *command: str) -> None:
        log = self._open.enter_context((self.directory / f"{command[0]}-{len(self._processes)}.out").open("wb"))
        self._processes.append(
            subprocess.Popen(command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        )

    def _are_idle(self) -> bool:
        states = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%T"], env=self.environment, capture_output=True, text=True
        )
        return states.stdout.split() == ["idle"] * len(self.nodes)

    def _field(self, job: str, name: str) -> str:
        words = [word.partition("=") for word in self.run("scontrol", "--oneliner", "show", "job", job).split()]
        return next(value for key, _, value in words if key == name)

    def _ends(self) -> str:
        ends = []
        for log in sorted([*self.directory.glob("*.log"), *self.directory.glob("*.out")]):
            ends += [f"-- {log.name}", *log.read_text(errors="replace").splitlines()[-8:]]
        return "\n".join(ends)
