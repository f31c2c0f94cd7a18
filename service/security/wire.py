"""Connections: over TLS or not, and with which of uvicorn's protocols."""

from __future__ import annotations

import ssl
from typing import Any

from penstock.schemas.errors import InvalidDocument
from penstock.service.settings import Settings


def options(settings: Settings) -> dict[str, Any]:
    """Return the part of uvicorn's configuration that is about connections.

    Raises InvalidDocument for a certificate that cannot be used.
    """
    chosen: dict[str, Any] = {"http": "h11", "ws": "none"}
    if settings.tls_certificate is None:
        if settings.tls_key is not None:
            raise InvalidDocument("tls_key is set without tls_certificate", remedy="set tls_certificate as well")
        return chosen
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(settings.tls_certificate, settings.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidDocument(
            f"tls_certificate {str(settings.tls_certificate)!r} and its key cannot be used: {error}",
            remedy="give PEM files that the service may read: the certificate with its chain, and the key that fits it",
        ) from None
    return chosen | {"ssl_certfile": settings.tls_certificate, "ssl_keyfile": settings.tls_key}
