"""Soak of training: kills ranks, agents and the service at random moments, and checks that training continues.

A service and two agents train a toy with checkpoints; the plan has a stage on each agent's device. Victims are chosen
by a seed; an agent stays away for a moment, or for so long that the service plans again without it. The
soak checks that nothing hangs, no process is left without its parent, no checkpoint is lost, every step has its loss,
and the losses equal the losses of one undisturbed process.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from penstock.schemas.errors import RunFailed, Unreachable
from soaking.processes import Processes, command_of, marked, refuse_orphans

if TYPE_CHECKING:
    from penstock.client import Client
    from penstock.schemas.api.jobs import RunOut

LIMIT_S = 300.0
"""Longest time without training after a death, in seconds."""

AGENT_TIMEOUT_S = 4.0
SETTINGS = {"PENSTOCK_AGENT_TIMEOUT_S": str(AGENT_TIMEOUT_S), "PENSTOCK_WARM_UP": "false"}
CHECKPOINT_EVERY = 20
STEPS = 1_000_000
SEED = 7
BATCH = 16
TOLERANCE = 1e-5

JOB = f"""
import time
import torch
from torch import nn
from penstock.executor.run.job import SimpleJob

class Toy(SimpleJob):
    def layers(self):
        return [(f"block{{i}}", lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh())) for i in range(4)]

    def batch(self, step, rows):
        time.sleep(0.004 if rows.start == 0 else 0)  # a step takes a while, so that deaths find many
        made = torch.Generator().manual_seed(step)
        samples = torch.randn({BATCH}, 8, generator=made)[rows.start : rows.stop]
        return {{"x": samples}}, samples.flip(1)

    def loss(self, outputs, targets):
        return ((outputs["x"] - targets) ** 2).sum(), targets.numel()

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)

job = Toy("toy", batch_size={BATCH})
"""


@dataclass
class Deaths:
    """The processes that were killed, and the times that training took to continue."""

    killed: dict[str, int] = field(default_factory=dict)
    resumed_s: dict[str, list[float]] = field(default_factory=dict)


class Cluster:
    """A service and agents as processes of this one, which can be killed and started again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = 0
        self.processes = Processes(directory)

    @property
    def url(self) -> str:
        """The URL of the service; the same after each restart."""
        return f"http://127.0.0.1:{self.port}"

    def start(self, name: str) -> None:
        """Start the ``service``, or an agent."""
        command = [sys.executable, "-P", "-m", "penstock.cli.main"]
        if name == "service":
            command += ["serve", "--port", str(self.port), "--database", str(self.directory / "soak.sqlite")]
        else:
            command += ["agent", "--server", self.url, "--name", name, "--cpu-devices", "1"]
            command += ["--job", "toy=soak_job:job", "--directory", str(self.directory)]
        self.processes.start(name, command, SETTINGS if name == "service" else {})
        if name == "service" and not self.port:
            self.port = self._port()

    def stop(self) -> None:
        """Send SIGTERM, agents first; kill the processes that are left after a while."""
        self.processes.stop(last=["service"])

    def _port(self) -> int:
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            text = self.processes.log("service").read_text(errors="replace")
            if match := re.search(r"listening on http://[^:]+:(\d+)", text):
                return int(match[1])
            time.sleep(0.05)
        raise Unreachable(f"the service did not listen within {LIMIT_S:g} s")


class Soak:
    """One soak: ``kills`` deaths, chosen by ``seed``; at most ``most_at_once`` before training has gone on."""

    def __init__(self, directory: Path, kills: int, seed: int, say: Callable[[str], None], most_at_once: int) -> None:
        self._kills, self._random, self._say = kills, random.Random(seed), say
        self._most_at_once = most_at_once
        self._cluster = Cluster(directory)
        self._checkpoints = directory / "checkpoints"
        self._newest = 0
        self._away: dict[str, float] = {}
        self.deaths = Deaths()

    def run(self) -> None:
        """Raise RunFailed where the soak finds a fault."""
        from penstock.client import Client

        self._cluster.directory.joinpath("soak_job.py").write_text(JOB)
        try:
            for name in ("service", "node0", "node1"):
                self._cluster.start(name)
            with contextlib.closing(Client(self._cluster.url)) as client:
                run = self._begin(client)
                self._wait_for_progress(client, run, "start", time.monotonic())
                while sum(self.deaths.killed.values()) < self._kills:
                    self._some_deaths(client, run)
                run_out = self._finish(client, run)
        finally:
            self._cluster.stop()
        refuse_orphans()
        self._refuse_other_losses(run_out)

    def _begin(self, client: Client) -> str:
        from penstock.examples.tiny import tiny_plan_file
        from penstock.schemas.api.run_options import RunOptions
        from penstock.schemas.plan import PlanFile, PlanQuestion

        until = time.monotonic() + LIMIT_S
        while sum(agent.alive for agent in _patiently(client.agents)) < 2:
            if time.monotonic() > until:
                raise Unreachable(f"the agents did not come within {LIMIT_S:g} s")
            time.sleep(0.1)
        options = RunOptions(checkpoint_directory=str(self._checkpoints), checkpoint_every=CHECKPOINT_EVERY)
        file = PlanFile.parse(tiny_plan_file())
        _patiently(lambda: client.verify(PlanQuestion(plan=file)))  # which loads, and may compile, the judge
        run = client.runs.create(
            file,
            "toy",
            steps=STEPS,
            seed=SEED,
            trace_steps=0,
            options=options,
            max_restarts=10 * self._kills + 10,
            wait=False,
        )
        return run.id

    def _some_deaths(self, client: Client, run: str) -> None:
        """Kill a few processes at random moments, some while training is still recovering; then wait until it has."""
        number = min(self._random.randint(1, self._most_at_once), self._kills - sum(self.deaths.killed.values()))
        kinds = []
        for _ in range(number):
            time.sleep(self._random.uniform(0.0, 3.0))
            self._return(now=False)
            kinds.append(self._kill_one())
        self._wait_for_progress(client, run, " + ".join(sorted(kinds)), time.monotonic())
        self._refuse_lost_checkpoints()
        refuse_orphans()

    def _kill_one(self) -> str:
        kind = self._random.choices(("rank", "agent", "node", "service"), (6, 2, 1, 2))[0]
        ranks = self._ranks()
        agents = [name for name in ("node0", "node1") if self._cluster.processes.pid(name) is not None]
        if kind == "rank" and ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._random.choice(ranks), signal.SIGKILL)
        elif kind in ("agent", "node") and len(agents) == 2:
            name = self._random.choice(agents)
            self._cluster.processes.kill(name)
            away_s = self._random.uniform(0.0, 1.0) if kind == "agent" else 3 * AGENT_TIMEOUT_S
            self._away[name] = time.monotonic() + away_s
        else:
            kind = "service"
            self._cluster.processes.kill("service")
            time.sleep(self._random.uniform(0.0, 1.0))
            self._cluster.start("service")
        self.deaths.killed[kind] = self.deaths.killed.get(kind, 0) + 1
        return kind

    def _return(self, *, now: bool) -> None:
        """Start the agents again that were away for long enough."""
        for name, until in list(self._away.items()):
            if now or time.monotonic() > until:
                del self._away[name]
                self._cluster.start(name)

    def _wait_for_progress(self, client: Client, run: str, what: str, since: float) -> None:
        """Wait until new steps have been trained; a run that ends or stands still has failed."""
        goal: int | None = None
        while True:
            self._return(now=False)
            self._cluster.processes.refuse_dead()
            state = _patiently(lambda: client.runs.get(run))
            if state.error is not None or state.state in ("succeeded", "cancelled"):
                raise RunFailed(f"after {what}: the run {state.state}: {state.error and state.error.detail}")
            goal = goal or state.steps_done + 2 * CHECKPOINT_EVERY
            if state.state == "running" and state.steps_done >= goal:
                break
            if time.monotonic() - since > LIMIT_S:
                raise RunFailed(f"after {what}: no step within {LIMIT_S:g} s; the run is {state.state}")
            time.sleep(0.1)
        took_s = time.monotonic() - since
        self.deaths.resumed_s.setdefault(what, []).append(took_s)
        done = sum(self.deaths.killed.values())
        self._say(f"{done:4d} deaths; after {what}: training after {took_s:5.1f} s, generation {state.generation}")

    def _finish(self, client: Client, run: str) -> RunOut:
        """Cancel: the ranks save and end; then all steps up to the newest checkpoint have their losses."""
        self._return(now=True)
        self._refuse_lost_checkpoints()
        _patiently(lambda: client.runs.cancel(run))
        until = time.monotonic() + LIMIT_S
        while self._ranks():
            if time.monotonic() > until:
                raise RunFailed(f"ranks are left {LIMIT_S:g} s after the run was cancelled")
            time.sleep(0.1)
        return _patiently(lambda: client.runs.get(run))

    # Checks

    def _refuse_lost_checkpoints(self) -> None:
        from penstock.executor.checkpoints.checkpoint import newest

        checkpoint = newest(self._checkpoints)
        step = 0 if checkpoint is None else checkpoint.next_step(1)
        if step < self._newest:
            raise RunFailed(f"the newest checkpoint is of step {step}; there was one of step {self._newest}")
        self._newest = step

    def _ranks(self) -> list[int]:
        return [pid for pid in marked() if "penstock.executor.run.rank_main" in command_of(pid)]

    def _refuse_other_losses(self, run: RunOut) -> None:
        losses = {step: float(loss) for step, loss in enumerate(run.losses) if loss is not None}
        expected = _losses_of_one_process(self._cluster.directory, len(run.losses))
        apart = max(abs(loss - expected[step]) / abs(expected[step]) for step, loss in losses.items())
        missing = len(expected) - len(losses)
        self._say(
            f"{len(losses)} losses, {missing} unknown, at most {apart:.2g} apart from one process that was left alone"
        )
        if apart > TOLERANCE:
            raise RunFailed(f"the losses are {apart:.2g} apart from those of one process; {TOLERANCE:g} is rounding")
        if missing > CHECKPOINT_EVERY * sum(self.deaths.killed.values()):
            raise RunFailed(f"{missing} losses of {len(expected)} never arrived")


def _losses_of_one_process(directory: Path, steps: int) -> list[float]:
    """Return the losses of the same training by hand: the layers in a row, one process, the whole batch at once."""
    import torch

    from penstock.executor.run.chain import Chain
    from penstock.executor.run.job import load_job

    torch.set_num_threads(1)
    job = load_job("soak_job:job", str(directory))
    layers = Chain(job).build_layers(range(len(job.layers())), seed=SEED)
    model = torch.nn.Sequential(*(layers[i] for i in sorted(layers)))
    optimizer = job.optimizer(model.parameters())
    losses = []
    for step in range(steps):
        inputs, targets = job.batch(step, range(BATCH))
        loss, terms = job.loss({"x": model(inputs["x"])}, targets)
        optimizer.zero_grad()
        (loss / terms).backward()
        optimizer.step()
        losses.append(loss.item() / terms)
    return losses


T = TypeVar("T")


def _patiently(call: Callable[[], T]) -> T:
    """Return the result of ``call``, tried again while the service is away."""
    until = time.monotonic() + LIMIT_S
    while True:
        try:
            return call()
        except Unreachable:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def run(directory: Path, kills: int, seed: int, say: Callable[[str], None], most_at_once: int) -> None:
    """Run one soak, and pass its results to ``say``. Raises RunFailed."""
    soak = Soak(directory, kills, seed, say, most_at_once)
    soak.run()
    for what, times in sorted(soak.deaths.resumed_s.items()):
        say(f"after {what}: median {statistics.median(times):.1f} s, longest {max(times):.1f} s of {len(times)}")
    say(f"killed: {soak.deaths.killed}; no hang, no orphan, no lost checkpoint, the same losses")
