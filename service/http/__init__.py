"""The HTTP application: endpoints, bodies, refusals, OpenAPI.

May import: `service.settings`, `service.logs`, `service.metrics`, `service.db`, `service.problems`,
`service.idempotency`, `service.parsing`, `service.security`, `service.jobs`, `service.runs`, `service.services`,
`service.readiness`, `service.pages`; besides that what `service` may.
Start reading at `app.py`, then `routes/`.
"""
