"""What the pages with lists show: jobs, runs, agents, the cluster, and the service's own health."""

from __future__ import annotations

from importlib.metadata import version
from platform import python_version
from typing import Any, get_args

from penstock.calibration.comparing import compared, measured_note
from penstock.report.drawing.figure import fetched_figure
from penstock.schemas.amounts import duration, number
from penstock.schemas.api.jobs import JobState, RunOut
from penstock.schemas.errors import PenstockError
from penstock.schemas.quantities import Loss
from penstock.schemas.topology import ClusterTopology
from penstock.service.db.tables import ACTIVE
from penstock.service.pages.form import EXAMPLES
from penstock.service.pages.sources import Sources
from penstock.service.readiness import readiness
from penstock.service.runs.run_rows import LIVE

NEWEST = 10
PAGE = 50
SWEEPS = 20
MAX_LINKS = 200
MAX_STEPS = 200
MAX_POINTS = 2000
PARTS = ("fastapi", "sqlalchemy", "numpy", "ortools")


def home(sources: Sources) -> dict[str, Any]:
    """The newest of everything."""
    jobs = sources.jobs(None, NEWEST)
    return {
        "examples": EXAMPLES,
        "jobs": jobs,
        "words": sources.words(jobs),
        "runs": sources.runs(None, NEWEST),
        "agents": sources.agents(),
    }


def jobs(sources: Sources, cursor: str | None, state: JobState | None) -> dict[str, Any]:
    """A page of jobs."""
    found = sources.jobs(cursor, PAGE, state)
    return {
        "jobs": found,
        "words": sources.words(found),
        "states": get_args(JobState),
        "shown": state,
        "first": cursor,
        "next": found[-1].id if len(found) == PAGE else None,
    }


def job(sources: Sources, job_id: str) -> dict[str, Any]:
    """A job with its events so far."""
    found = sources.job(job_id)
    events = sources.events(job_id)
    return {
        "job": found,
        "asked": sources.asked(found.request_hash),
        "active": found.state in ACTIVE,
        "events": events,
        "found_how": found.result.why if found.result else (),
        "first_event": events[0].at if events else found.created_at,
    }


def sweeps(sources: Sources, cursor: str | None) -> dict[str, Any]:
    """A page of sweeps."""
    found = sources.sweeps(cursor, SWEEPS)
    models = {one.id: sources.swept_model(one.id) for one in found}
    return {"sweeps": found, "models": models, "next": found[-1].id if len(found) == SWEEPS else None}


def runs(sources: Sources, cursor: str | None) -> dict[str, Any]:
    """A page of runs."""
    found = sources.runs(cursor, PAGE)
    return {"runs": found, "first": cursor, "next": found[-1].id if len(found) == PAGE else None}


def run(sources: Sources, run_id: str) -> dict[str, Any]:
    """A run with its events, and its last steps as a table."""
    found = sources.run(run_id)
    plan = sources.store.plan(found.plan_hash)
    first = max(0, found.steps_done - MAX_STEPS)
    times = dict(enumerate(found.step_times_ns))
    losses = dict(enumerate(found.losses))
    return {
        "run": found,
        "active": found.state in LIVE,
        "figures": _figures(found),
        "note": measured_note(found.hardware),
        "losses": _thinned(found.losses),
        "times": _thinned(found.step_times_ns),
        "evaluations": [[each.step, each.loss] for each in found.evaluations if isinstance(each.loss, float)],
        "steps": [(step, losses.get(step), times.get(step)) for step in range(first, found.steps_done)],
        "events": sources.run_events(run_id),
        "ranks": len({name for pipeline in plan.pipelines for stage in pipeline.stages for name in stage.devices}),
        "timeline": fetched_figure(f"/runs/{run_id}/timeline") if sources.trace(run_id) is not None else None,
    }


def agents(sources: Sources) -> dict[str, Any]:
    """All agents, those that are alive first."""
    return {"agents": sorted(sources.agents(), key=lambda agent: (not agent.alive, agent.id))}


def cluster(sources: Sources) -> dict[str, Any]:
    """The devices of living agents, and what is known of their links."""
    topology = sources.living()
    if topology is None:
        return {"topology": None}
    nodes = topology.expanded().nodes
    links = _links(topology)
    return {
        "topology": topology,
        "nodes": nodes,
        "devices": sum(len(node.devices) for node in nodes),
        "memory": sum(device.memory_bytes for node in nodes for device in node.devices),
        "links": links[:MAX_LINKS],
        "num_links": len(links),
    }


def health(sources: Sources) -> dict[str, Any]:
    """Whether the service is ready, who works, and what is installed."""
    problem: PenstockError | None = None
    try:
        readiness(sources.service)
    except PenstockError as error:
        problem = error
    counts = sources.job_counts()
    workers = sources.workers()
    alive = [agent for agent in sources.agents() if agent.alive]
    return {
        "problem": problem,
        "workers": workers,
        "figures": [
            ("jobs that wait", counts.get("queued", 0)),
            ("jobs under way", counts.get("running", 0)),
            ("solves at a time", sum(worker.slots for worker in workers)),
            ("agents alive", len(alive)),
            ("up for", duration(sources.up_s() * 1e9)),
            ("database", sources.service.database.engine.dialect.name),
        ],
        "versions": [("Penstock", version("penstock")), ("Python", python_version())]
        + [(name, version(name)) for name in PARTS],
    }


def _figures(run: RunOut) -> list[tuple[str, Any]]:
    predicted, measured = run.predicted_time_per_global_batch_ns, run.measured_time_per_global_batch_ns
    figures: list[tuple[str, Any]] = [("steps done", f"{run.steps_done} of {run.steps}")]
    if run.losses and run.losses[-1] is not None:
        figures.append(("loss of the last step", number(run.losses[-1], ".4g")))
    figures.append(("predicted, per global batch", duration(predicted)))
    if measured and (run.hardware or run.state == "succeeded"):
        figures += compared(predicted, measured, run.hardware).figures()
    elif measured is not None:  # what ranks compute on is known once they are done
        figures.append(("measured (median)", duration(measured)))
    if run.gradient_check is not None:
        figures.append(("gradients differ from one process by", f"{run.gradient_check:.1e}"))
    if run.collectives_differ is not None:
        figures.append(("first collective not as predicted", run.collectives_differ))
    elif run.collectives:
        figures.append(("collectives as predicted", sum(run.collectives.values())))
    if run.max_restarts:
        figures.append(("restarts", f"{run.restarts} of {run.max_restarts}"))
    if run.checkpoint_step is not None:
        figures.append(("newest checkpoint", f"step {run.checkpoint_step}"))
    return figures


def _thinned(values: tuple[Loss | None, ...]) -> list[list[Any]]:
    """Every k-th step with its value, so that a page stays small; what is unknown or not finite is left out."""
    every = -(-len(values) // MAX_POINTS) or 1
    return [[step, value] for step, value in enumerate(values) if isinstance(value, int | float) and step % every == 0]


def _links(topology: ClusterTopology) -> list[tuple[str, str, int, int, int]]:
    """Ends, bandwidth, latency and lanes."""
    whole = topology.expanded()
    if (matrix := whole.matrix) is None:
        return [(x.a, x.b, x.bandwidth_bytes_per_s, x.latency_ns, x.lanes or 1) for x in whole.links]
    rates, latencies = matrix.bandwidth_bytes_per_s, matrix.latency_ns
    pairs = [(i, k) for i in range(len(matrix.devices)) for k in range(len(matrix.devices)) if i != k]
    pairs.sort(key=lambda pair: rates[pair[0]][pair[1]])
    late = latencies or [[0] * len(matrix.devices)] * len(matrix.devices)
    return [(matrix.devices[i], matrix.devices[k], rates[i][k], late[i][k], 1) for i, k in pairs]
