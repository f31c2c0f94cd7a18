"""The HTTP application: endpoints, bodies, refusals, OpenAPI.

May import: `service` except `pages` internals, `schemas`; `planning` and `convert` for answers.
Start reading at `app.py`, then `routes/`.
"""
