"""Clients of the service: ``Client("http://127.0.0.1:8642").plan(request)``, and ``AsyncClient`` with the same methods.

They need no extra. Every refusal of the service is raised as the error that it was there (``schemas.errors``).
"""

from penstock.client.refusals import error_of
from penstock.client.transports import AsyncClient, Client

__all__ = ["AsyncClient", "Client", "error_of"]
