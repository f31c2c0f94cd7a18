"""Two hosts on this machine: network namespaces joined by a shaped wire; ``lacks`` tells what the kernel cannot."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

LIMIT_S = 240.0
PENSTOCK = [sys.executable, "-P", "-m", "penstock.cli.main"]

RATE_BITS_PER_S = 100_000_000
DELAY_NS = 1_000_000
LOOPBACK = ("127.0.0.1", "127.0.0.2")

JOB = """
import time
from pathlib import Path

import torch
from torch import nn
from penstock.executor.run.job import SimpleJob

class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.Tanh())

class Last(Block):
    def forward(self, x):
        while Path(__file__).with_name("hang").exists():
            time.sleep(0.01)
        return super().forward(x)

class Toy(SimpleJob):
    def layers(self):
        return [*((f"block{i}", Block) for i in range(3)), ("block3", Last)]
    def batch(self, step, rows):
        time.sleep(0.02)
        made = torch.Generator().manual_seed(step)
        samples = torch.randn(16, 8, generator=made)[rows.start : rows.stop]
        return {"x": samples}, samples.flip(1)
    def loss(self, outputs, targets):
        return ((outputs["x"] - targets) ** 2).sum(), targets.numel()
    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.05)

job = Toy("toy", batch_size=16)
"""
"""Four layers, as the tiny plan has, trained slowly, for little CPU.

The last one hangs while there is a file ``hang`` beside the job.
"""


class TwoHosts:
    """``addresses`` of both, ``start`` and ``run`` for processes on either. ``close`` takes all of it away.

    Without namespaces (no root, no ``ip``) both are this host, by two addresses of its loopback.
    """

    def __init__(self) -> None:
        self.lacks: list[str] = []
        self.is_shaped = self.is_delayed = False
        self._names = [f"penstock-{os.getpid()}-{i}" for i in (0, 1)]
        self._links = [f"pst{os.getpid() % 10**7}{end}" for end in "ab"]
        self._processes: list[subprocess.Popen[Any]] = []
        problem = self._join()
        self.addresses = LOOPBACK if problem else ("10.77.0.1", "10.77.0.2")
        if problem:
            self.lacks.append(f"no network namespaces ({problem}): both hosts are this one")
            self._names = []
        else:
            self._shape()

    def start(self, host: int, command: Sequence[str], **more: Any) -> subprocess.Popen[Any]:
        """Start a process on host 0 or 1."""
        self._processes.append(subprocess.Popen([*self._on(host), *command], start_new_session=True, **more))
        return self._processes[-1]

    def run(self, host: int, command: Sequence[str], limit_s: float) -> str:
        """Run a process on a host, and return its standard output."""
        return subprocess.run(
            [*self._on(host), *command], check=True, capture_output=True, text=True, timeout=limit_s
        ).stdout

    @property
    def has_namespaces(self) -> bool:
        """Return whether the hosts are apart."""
        return bool(self._names)

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """Take the wire away, at both ends, while the block runs."""
        self._set_wire("down")
        try:
            yield
        finally:
            self._set_wire("up")

    def cut(self, seconds: float) -> None:
        """Take the wire away for so long."""
        with self.cut_off():
            time.sleep(seconds)

    def _set_wire(self, state: str) -> None:
        for name, link in zip(self._names, self._links, strict=True):
            assert _ip("-n", name, "link", "set", link, state) == ""

    def close(self) -> None:
        """End all processes and take the namespaces away."""
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        for name in self._names:
            _ip("netns", "del", name)

    def _on(self, host: int) -> list[str]:
        return ["ip", "netns", "exec", self._names[host]] if self._names else []

    def _join(self) -> str:
        """Make the namespaces and the wire between them; the first problem, or nothing."""
        (a, b), (left, right) = self._names, self._links
        steps = [("netns", "add", a), ("netns", "add", b), ("link", "add", left, "type", "veth", "peer", "name", right)]
        for i, (name, link) in enumerate(zip((a, b), (left, right), strict=True)):
            steps += [
                ("link", "set", link, "netns", name),
                ("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", link),
                ("-n", name, "link", "set", link, "up"),
                ("-n", name, "link", "set", "lo", "up"),
            ]
        problem = next((text for text in (_ip(*step) for step in steps) if text), "")
        if problem:
            for name in (a, b):
                _ip("netns", "del", name)
        return problem

    def _shape(self) -> None:
        """Limit each direction to 1 ms and 100 Mbit/s, where the kernel can."""
        rate = f"{RATE_BITS_PER_S}bit"
        problems = {"delay": "", "rate": ""}
        for name, link in zip(self._names, self._links, strict=True):
            device = ("qdisc", "add", "dev", link)
            bucket = ("tbf", "rate", rate, "burst", "16kb", "latency", "100ms")
            problems["rate"] = problems["rate"] or _tc(name, *device, "root", "handle", "1:", *bucket)
            behind = ("parent", "1:1", "handle", "10:") if not problems["rate"] else ("root",)
            problems["delay"] = problems["delay"] or _tc(
                name, *device, *behind, "netem", "delay", f"{DELAY_NS // 1000}us"
            )
        self.is_shaped, self.is_delayed = not problems["rate"], not problems["delay"]
        self.lacks += [f"this kernel gives a wire no {what} ({why})" for what, why in problems.items() if why]


class Fleet:
    """A service on host 0, and on each host an agent with one CPU device, whose model ``toy`` is ``JOB``.

    ``directory``: of the job, and of the logs. ``settings``: variables of the service's and the agents' environment.
    """

    def __init__(self, hosts: TwoHosts, directory: Path, settings: Mapping[str, str] | None = None) -> None:
        self.hosts, self.directory, settings = hosts, directory, settings or {}
        (directory / "toy_job.py").write_text(JOB)
        variables = {name: value for name, value in settings.items() if name in _OF_THE_SERVICE}
        variables |= {"PENSTOCK_ALLOW_UNAUTHENTICATED": "1", "PENSTOCK_WARM_UP": "false"}
        service = [*PENSTOCK, "serve", "--host", hosts.addresses[0], "--port", "0", "--database", str(directory / "db")]
        self._start(0, "service", service, variables)
        self.url = wait_for(directory / "service.log", r"listening on (http://[^\s\"]+)")
        others = {name: value for name, value in settings.items() if name not in _OF_THE_SERVICE}
        others["PENSTOCK_AGENT_OUTPUT_DIRECTORIES"] = "/"
        self._agents = []
        for host, address in enumerate(hosts.addresses):
            agent = [*PENSTOCK, "agent", "--server", self.url, "--name", f"node{host}", "--cpu-devices", "1"]
            agent += ["--job", "toy=toy_job:job", "--directory", str(directory), "--interface", address]
            self._agents.append(self._start(host, f"node{host}", agent, others))

    def ranks(self, *hosts: int) -> list[psutil.Process]:
        """Return the processes of ranks on these hosts; on both where none is given."""
        agents = [psutil.Process(self._agents[host].pid) for host in hosts or (0, 1)]
        return [
            child
            for agent in agents
            for child in agent.children()
            if "penstock.executor.run.rank_main" in child.cmdline()
        ]

    def _start(self, host: int, name: str, command: Sequence[str], settings: Mapping[str, str]) -> Any:
        with (self.directory / f"{name}.log").open("wb") as log:
            return self.hosts.start(host, command, env=os.environ | settings, stdout=log, stderr=log)


_OF_THE_SERVICE = ("PENSTOCK_AGENT_TIMEOUT_S", "PENSTOCK_AGENT_HOLD_S")


def wait_for(log: Path, pattern: str) -> str:
    """Return the pattern's group, once a file has it."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        if match := re.search(pattern, log.read_text()):
            return match[1]
        time.sleep(0.05)
    raise AssertionError(f"no {pattern!r} in {log.read_text()}")


def _ip(*arguments: str) -> str:
    return _problem(["ip", *arguments])


def _tc(namespace: str, *arguments: str) -> str:
    return _problem(["ip", "netns", "exec", namespace, "tc", *arguments])


def _problem(command: Sequence[str]) -> str:
    """Run a command; return its error message, or an empty text."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1] if done.returncode else ""
