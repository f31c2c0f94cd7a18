"""The tables, by what they hold. A change here needs a revision in ``service/migrations``.

May import: `service.db`.
Start reading at `documents.py`, `jobs.py`.
"""

from penstock.service.db.tables.access import api_keys, idempotency
from penstock.service.db.tables.base import DEFAULT_TENANT, iso, metadata, now_ms
from penstock.service.db.tables.documents import answers, documents
from penstock.service.db.tables.jobs import ACTIVE, is_alive, job_events, jobs, sweeps, workers
from penstock.service.db.tables.runs import (
    agents,
    run_agents,
    run_events,
    run_generations,
    run_ranks,
    run_steps,
    run_traces,
    runs,
)
from penstock.service.db.tables.telling import CHANGES

__all__ = [
    "ACTIVE",
    "CHANGES",
    "DEFAULT_TENANT",
    "agents",
    "answers",
    "api_keys",
    "documents",
    "idempotency",
    "is_alive",
    "iso",
    "job_events",
    "jobs",
    "metadata",
    "now_ms",
    "run_agents",
    "run_events",
    "run_generations",
    "run_ranks",
    "run_steps",
    "run_traces",
    "runs",
    "sweeps",
    "workers",
]
