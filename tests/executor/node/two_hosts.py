"""Two hosts on this machine: network namespaces joined by a shaped wire; ``lacks`` tells what the kernel cannot."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

RATE_BITS_PER_S = 100_000_000
DELAY_NS = 1_000_000
LOOPBACK = ("127.0.0.1", "127.0.0.2")


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
        """What a process on a host writes to its standard output."""
        return subprocess.run(
            [*self._on(host), *command], check=True, capture_output=True, text=True, timeout=limit_s
        ).stdout

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
        """1 ms and 100 Mbit/s in each direction, as far as the kernel can."""
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


def _ip(*arguments: str) -> str:
    return _problem(["ip", *arguments])


def _tc(namespace: str, *arguments: str) -> str:
    return _problem(["ip", "netns", "exec", namespace, "tc", *arguments])


def _problem(command: Sequence[str]) -> str:
    """What went wrong, in the command's words; empty when all is well."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1] if done.returncode else ""
