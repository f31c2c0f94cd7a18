"""Media type and content codings of bodies: JSON, plain or compressed with gzip or deflate."""

from __future__ import annotations

import zlib

from penstock.schemas.errors import InvalidDocument
from penstock.service.http.problems import WrongMediaType

JSON = "application/json"

_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


def refuse_other_types(content_type: str) -> None:
    """Raise WrongMediaType where the value of a Content-Type is not a JSON type."""
    given = content_type.partition(";")[0].strip().lower()
    if given != JSON and not given.endswith("+json"):
        raise WrongMediaType(
            f"the body is {given!r}; this endpoint takes {JSON}",
            remedy=f"send the header Content-Type: {JSON}",
            headers={"Accept": JSON},
        )


class Unpacker:
    """Decompresses a body piece by piece, never more of it than was asked for."""

    def __init__(self, window_bits: int) -> None:
        self._stream = zlib.decompressobj(window_bits)

    def take(self, chunk: bytes, most: int) -> bytes:
        """Return what a piece unpacks to; after ``most`` bytes there may be more. Raises InvalidDocument."""
        if self._stream.eof and chunk:
            raise InvalidDocument("the compressed body continues after its end; send one compressed stream")
        try:
            found = self._stream.decompress(chunk, most)
        except zlib.error as error:
            raise InvalidDocument(f"the body does not match its Content-Encoding: {error}") from None
        if self._stream.unused_data:
            raise InvalidDocument("the compressed body continues after its end; send one compressed stream")
        return found

    def close(self) -> None:
        """Raise InvalidDocument when the compressed stream was cut off."""
        if not self._stream.eof:
            raise InvalidDocument("the compressed body is cut off")


def unpacker(content_encoding: str) -> Unpacker | None:
    """Return the decoder of a Content-Encoding, None for none. Raises WrongMediaType for an unknown one."""
    coding = content_encoding.strip().lower()
    if coding in ("", "identity"):
        return None
    if coding not in _WINDOW_BITS:
        raise WrongMediaType(
            f"the body is encoded with {coding!r}; this service decodes gzip and deflate",
            remedy="send it with Content-Encoding: gzip, or uncompressed",
            headers={"Accept-Encoding": "gzip, deflate"},
        )
    return Unpacker(_WINDOW_BITS[coding])
