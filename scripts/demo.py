"""The main job from end to end, on this machine's CPU: run by ``scripts/demo``.

It starts a service and two agents with two CPU devices each, measures a small GPT on them, and POSTs profile and
topology. It plans four stages with a bound, runs the plan through the agents on four ranks, and compares the run with a
single process.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from background import Background, background

from penstock.schemas.errors import PenstockError, RunFailed, Unreachable

if TYPE_CHECKING:
    from penstock.cli.show import Screen
    from penstock.client import Client
    from penstock.schemas.api.jobs import RunOut
    from penstock.schemas.plan import PlanFile
    from penstock.schemas.profile import ModelProfile
    from penstock.schemas.topology import ClusterTopology
    from penstock.schemas.trace import Trace

MODEL = "examples.gpt:job"
MICRO_BATCHES = 32
STEPS = 6
START_LIMIT_S = 60.0


class Log:
    """The messages of the demo, with the seconds since the start."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        """Print one step, or its result."""
        self.screen.say(f"[{time.monotonic() - self._started:5.1f} s] {text}")
        self.screen.out.file.flush()

    def quote(self, text: str) -> None:
        """Print text that a command would print."""
        for line in text.splitlines():
            self.screen.say(f"          {line}".rstrip())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration in ``out/demo/`` (or the directory given); returns the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "directory", nargs="?", type=Path, default="out/demo", help="where results and logs go (out/demo)"
    )
    directory = parser.parse_args(arguments).directory.absolute()
    from penstock.cli.show import Screen

    log = Log(Screen.of())
    try:
        _prepare(directory)
        with background(directory / "logs") as processes:
            _demonstrate(log, directory, processes)
    except KeyboardInterrupt:
        print("penstock: interrupted; nothing is left running", file=sys.stderr)
        return 130
    except PenstockError as error:
        print(f"penstock: {error}\n  logs: {directory / 'logs'}", file=sys.stderr)
        return error.exit_code
    log.say(f"done; see {directory / 'report.html'}")
    return 0


def _prepare(directory: Path) -> None:
    """Create an empty ``logs`` directory; remove the database and results of an earlier run."""
    shutil.rmtree(directory / "logs", ignore_errors=True)
    (directory / "logs").mkdir(parents=True)
    for old in (*directory.glob("penstock.sqlite*"), *directory.glob("*.json"), *directory.glob("*.html")):
        old.unlink()


def _demonstrate(log: Log, directory: Path, processes: Background) -> None:
    client = _start(log, directory, processes)
    profile, topology = _measure(log, concurrency=4, nodes=2)
    profile.write(directory / "profile.json")
    topology.write(directory / "topology.json")
    file = _plan(log, client, profile, topology, stages=4)
    file.write(directory / "plan.json")
    _show(log, file)
    run = _run(log, client, processes, file, check=True)
    _compare(log, file, run)
    _leave_results(log, directory, file, client.runs.trace(run.id))
    _two_ranks(log, client, processes)
    client.close()


def _start(log: Log, directory: Path, processes: Background) -> Client:
    from penstock.client import Client

    command = [sys.executable, "-P", "-m", "penstock.cli.main"]
    log.say("starting the service on SQLite")
    database = str(directory / "penstock.sqlite")
    processes.start("service", [*command, "serve", "--port", "0", "--database", database])
    server = processes.wait_for("service", r"listening on (http://[^\s\"]+)", START_LIMIT_S)
    for name in ("host0", "host1"):
        log.say(f"starting agent {name} with two CPU devices for {server}")
        options = ["--server", server, "--name", name, "--cpu-devices", "2", "--job", f"gpt={MODEL}"]
        processes.start(name, [*command, "agent", *options, "--directory", str(directory)])
    client = Client(server)
    _wait_for_agents(client, processes)
    return client


def _wait_for_agents(client: Client, processes: Background) -> None:
    until = time.monotonic() + START_LIMIT_S
    while sum(agent.alive for agent in client.agents()) < 2:
        processes.check()
        if time.monotonic() > until:
            raise Unreachable(f"the agents did not reach the service within {START_LIMIT_S:g} s")
        time.sleep(0.1)


def _measure(log: Log, *, concurrency: int, nodes: int) -> tuple[ModelProfile, ClusterTopology]:
    """Measure the GPT and the links, with ``concurrency`` devices busy at once."""
    from penstock.executor.devices import machine_memory_bytes
    from penstock.executor.links.link_probe import measure_links, measured_cluster
    from penstock.executor.profiling.profiler import measure_profile
    from penstock.executor.run.job import load_job

    size = load_job(MODEL).batch_size // MICRO_BATCHES
    log.say(f"measuring {MODEL} at {size} samples with {concurrency} devices busy at once")
    profile = measure_profile(
        MODEL, "cpu", (size,), concurrency, device_kind="cpu", progress=lambda text: log.say(f"  {text}")
    )
    link = measure_links(concurrency, progress=lambda text: log.say(f"  {text}"))
    topology = measured_cluster(
        link,
        nodes=nodes,
        devices_per_node=concurrency // nodes,
        memory_bytes=machine_memory_bytes() // concurrency,
        name=f"{nodes} x {concurrency // nodes} CPU devices of this machine",
        node_names="host{}",
    )
    return profile, topology


def _plan(log: Log, client: Client, profile: ModelProfile, topology: ClusterTopology, *, stages: int) -> PlanFile:
    """Return the best plan of ``stages`` stages, one device each."""
    from penstock.executor.run.job import load_job
    from penstock.schemas.request import PlanRequest

    batch = load_job(MODEL).batch_size
    log.say(f"sending profile and topology, and asking the service for a plan with {stages} stages")
    request = PlanRequest(
        profile=client.profiles.create(profile).hash,
        topology=client.topologies.create(topology).hash,
        global_batch_size=batch,
        micro_batch_sizes=(batch // MICRO_BATCHES,),
        planner="gpipe",
        schedule="early-backward",
        options={"stages": stages},
    )
    job = client.plans.create(request)
    if job.result is None or job.result.plan is None:
        raise RunFailed(f"the service found no plan: {job.result.sentence if job.result else job.state}")
    log.say(f"{job.result.status} after {job.result.seconds:.2f} s: {job.result.sentence}")
    return client.plans.file(job.id)


def _show(log: Log, file: PlanFile) -> None:
    """Show the plan with its bound, and its timeline."""
    from penstock.cli.show import prediction_lines
    from penstock.planning.judge import judge
    from penstock.report.drawing.timeline_text import render_timeline
    from penstock.report.gists import some
    from penstock.schemas.amounts import ranges

    judgement = judge(file)
    plan = judgement.plan
    assert judgement.timeline is not None
    for number, stage in enumerate(plan.pipelines[0].stages):
        log.quote(f"stage {number}: layers {ranges(stage.layers)} on {some(stage.devices)}")
    log.quote("\n".join(prediction_lines(plan)))
    width = min(log.screen.out.width, 130) - 11
    log.quote(render_timeline(judgement.problem, judgement.timeline, width=width, colour=log.screen.colour))


def _run(log: Log, client: Client, processes: Background, file: PlanFile, *, check: bool) -> RunOut:
    """Train through the agents, and print each step."""
    ranks = len({device for stage in file.plan.pipelines[0].stages for device in stage.devices})
    batches = file.plan.num_micro_batches
    log.say(f"running it through the agents: {ranks} ranks, {batches} micro-batches, {STEPS} steps")
    shown = 0

    def show_steps(run: RunOut) -> None:
        nonlocal shown
        processes.check()
        for step in range(shown, len(run.losses)):
            loss = run.losses[step]
            log.say(f"  step {step + 1} of {run.steps}: loss {'unknown' if loss is None else f'{loss:.6f}'}")
        shown = max(shown, len(run.losses))

    run = client.runs.create(file, "gpt", steps=STEPS, check=check, on_change=show_steps)
    if run.state != "succeeded":
        raise RunFailed(f"the run was {run.state}")
    return run


def _compare(log: Log, file: PlanFile, run: RunOut) -> None:
    """Compare predicted with measured times, and the gradients with one process."""
    log.say("comparing")
    for line in _measured(file, run):
        log.quote(line)
    if run.gradient_check is not None:
        log.quote(f"gradients  {run.gradient_check:.3g} apart from a single process, relative to the largest")


def _measured(file: PlanFile, run: RunOut) -> list[str]:
    from penstock.calibration.comparing import compared

    assert file.plan.prediction is not None
    predicted = file.plan.prediction.time_per_global_batch_ns
    measured = run.measured_time_per_global_batch_ns
    if not measured:
        raise RunFailed("the run reported no step time")
    return compared(predicted, measured, run.hardware).lines()


def _leave_results(log: Log, directory: Path, file: PlanFile, trace: Trace) -> None:
    """Write the trace, the Chrome trace and the report."""
    from penstock.report.plan_files import page, write_comparison

    trace.write(directory / "trace.json")
    write_comparison(file, trace, directory / "chrome-trace.json")
    (directory / "report.html").write_text(page(file, trace), encoding="utf-8")
    log.say(f"written: plan.json, trace.json, chrome-trace.json and report.html in {directory}")


def _two_ranks(log: Log, client: Client, processes: Background) -> None:
    """Plan and run two stages on two ranks, a core each."""
    profile, topology = _measure(log, concurrency=2, nodes=1)
    file = _plan(log, client, profile, topology, stages=2)
    run = _run(log, client, processes, file, check=False)
    for line in _measured(file, run):
        log.quote(line)


if __name__ == "__main__":
    sys.exit(main())
