"""The service in a browser: what each page shows, and how it is rendered.

May import: `service.db`, `service.problems`, `service.parsing`, `service.security`, `service.jobs`,
`service.runs`, `service.services`, `service.readiness`; besides that what `service` may.
Start reading at `sources.py`; `templates/` and `static/` are what browsers get.
"""
