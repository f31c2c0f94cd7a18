"""Clients of the service: ``Client("http://127.0.0.1:8642").plans.create(request)``, and the awaited ``AsyncClient``.

They need no extra. Every refusal of the service is raised as the error that it was there (``schemas.errors``). The
modules without ``async_`` are made from those with it by ``scripts/make-client``.

May import: `schemas`.
Start reading at `async_resources.py`; `client.py` and `resources.py` are generated from the async files.
"""

from penstock.client.async_client import AsyncClient
from penstock.client.client import Client
from penstock.client.refusals import error_of

__all__ = ["AsyncClient", "Client", "error_of"]
