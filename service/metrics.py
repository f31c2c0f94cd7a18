"""Counters of this process for Prometheus; ``db.gauges`` adds the state of the database.

Code counts its events here (``metrics.cache_answers.labels("hit").inc()``).
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
_GAPS = (0.0, 0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)

REGISTRY = CollectorRegistry()

http_seconds = Histogram(
    "penstock_http_request_seconds",
    "Time to answer requests, by route; waits that were asked for (Prefer, events, syncs) count as well",
    ("method", "route", "status"),
    buckets=_SECONDS,
    registry=REGISTRY,
)
http_active = Gauge("penstock_http_requests_active", "Requests that are being answered or wait", registry=REGISTRY)
waiters = Gauge("penstock_waiters", "Listeners of this process that wait for news", registry=REGISTRY)
cache_answers = Counter(
    "penstock_cache_requests", "Plan requests, by whether the answer was known", ("result",), registry=REGISTRY
)
wait_seconds = Histogram(
    "penstock_job_wait_seconds", "From a job's request to its first start", buckets=_SECONDS, registry=REGISTRY
)
solve_seconds = Histogram(
    "penstock_solve_seconds", "Time of solves", ("planner", "outcome"), buckets=_SECONDS, registry=REGISTRY
)
gap = Histogram(
    "penstock_plan_gap",
    "How far above the bound plans are: 0.1 is 10 %",
    ("planner",),
    buckets=_GAPS,
    registry=REGISTRY,
)
leases_lost = Counter(
    "penstock_leases_lost", "Jobs taken back because their worker or its process was silent", registry=REGISTRY
)
retries = Counter("penstock_job_retries", "Jobs put back into the queue to be tried again", registry=REGISTRY)
database_errors = Counter("penstock_database_errors", "Transactions that the database did not do", registry=REGISTRY)
