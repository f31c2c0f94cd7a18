"""The values of pages with lists: jobs, runs, agents, the cluster, and the service's own health."""

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
    """Return the newest jobs, runs and agents."""
    jobs = sources.jobs(None, NEWEST)
    return {
        "examples": EXAMPLES,
        "jobs": jobs,
        "words": sources.words(jobs),
        "runs": sources.runs(None, NEWEST),
        "agents": sources.agents(),
    }


def jobs(sources: Sources, cursor: str | None, state: JobState | None) -> dict[str, Any]:
    """Return a page of jobs."""
    page = sources.jobs(cursor, PAGE, state)
    return {
        "jobs": page,
        "words": sources.words(page),
        "states": get_args(JobState),
        "shown": state,
        "first": cursor,
        "next": page[-1].id if len(page) == PAGE else None,
    }


def job(sources: Sources, job_id: str) -> dict[str, Any]:
    """Return a job with its events so far."""
    entry = sources.job(job_id)
    events = sources.events(job_id)
    return {
        "job": entry,
        "summary": sources.summary(entry.request_hash),
        "active": entry.state in ACTIVE,
        "events": events,
        "found_how": entry.result.why if entry.result else (),
        "first_event": events[0].at if events else entry.created_at,
    }


def sweeps(sources: Sources, cursor: str | None) -> dict[str, Any]:
    """Return a page of sweeps."""
    page = sources.sweeps(cursor, SWEEPS)
    models = {one.id: sources.swept_model(one.id) for one in page}
    return {"sweeps": page, "models": models, "next": page[-1].id if len(page) == SWEEPS else None}


def runs(sources: Sources, cursor: str | None) -> dict[str, Any]:
    """Return a page of runs."""
    page = sources.runs(cursor, PAGE)
    return {"runs": page, "first": cursor, "next": page[-1].id if len(page) == PAGE else None}


def run(sources: Sources, run_id: str) -> dict[str, Any]:
    """Return a run with its events, and its last steps as a table."""
    entry = sources.run(run_id)
    plan = sources.store.plan(entry.plan_hash)
    first = max(0, entry.steps_done - MAX_STEPS)
    times = dict(enumerate(entry.step_times_ns))
    losses = dict(enumerate(entry.losses))
    return {
        "run": entry,
        "active": entry.state in LIVE,
        "figures": _figures(entry),
        "note": measured_note(entry.hardware),
        "losses": _thinned(entry.losses),
        "times": _thinned(entry.step_times_ns),
        "evaluations": [[each.step, each.loss] for each in entry.evaluations if isinstance(each.loss, float)],
        "steps": [(step, losses.get(step), times.get(step)) for step in range(first, entry.steps_done)],
        "events": sources.run_events(run_id),
        "ranks": len({name for pipeline in plan.pipelines for stage in pipeline.stages for name in stage.devices}),
        "timeline": fetched_figure(f"/runs/{run_id}/timeline") if sources.trace(run_id) is not None else None,
    }


def agents(sources: Sources) -> dict[str, Any]:
    """Return all agents, living ones first."""
    return {"agents": sorted(sources.agents(), key=lambda agent: (not agent.alive, agent.id))}


def cluster(sources: Sources) -> dict[str, Any]:
    """Return the devices of living agents, and their links."""
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
    """Return the service's readiness, its workers, and installed versions."""
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
    """Return every k-th step with its value, so that a page stays small, without values that are not finite."""
    every = -(-len(values) // MAX_POINTS) or 1
    return [[step, value] for step, value in enumerate(values) if isinstance(value, int | float) and step % every == 0]


def _links(topology: ClusterTopology) -> list[tuple[str, str, int, int, int]]:
    """Return ends, bandwidth, latency and number of channels of each link."""
    whole = topology.expanded()
    if (matrix := whole.matrix) is None:
        return [(x.a, x.b, x.bandwidth_bytes_per_s, x.latency_ns, x.lanes or 1) for x in whole.links]
    rates, latencies = matrix.bandwidth_bytes_per_s, matrix.latency_ns
    pairs = [(i, k) for i in range(len(matrix.devices)) for k in range(len(matrix.devices)) if i != k]
    pairs.sort(key=lambda pair: rates[pair[0]][pair[1]])
    late = latencies or [[0] * len(matrix.devices)] * len(matrix.devices)
    return [(matrix.devices[i], matrix.devices[k], rates[i][k], late[i][k], 1) for i, k in pairs]
