"""The service in a browser: what each page shows, and how it is rendered.

May import: `service`, `report`, `schemas`.
Start reading at `sources.py`; `templates/` and `static/` are what browsers get.
"""
