"""Media type and content codings of bodies: JSON, plain or compressed with gzip or deflate."""

from __future__ import annotations

import zlib

from penstock.schemas.errors import InvalidDocument
from penstock.service.problems import WrongMediaType

JSON = "application/json"

_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


def refuse_other_types(content_type: str) -> None:
    """Raise WrongMediaType where the value of a Content-Type is not a JSON type."""
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != JSON and not media_type.endswith("+json"):
        raise WrongMediaType(
            f"the body is {media_type!r}; this endpoint takes {JSON}",
            remedy=f"send the header Content-Type: {JSON}",
            headers={"Accept": JSON},
        )


STEP_BYTES = 2**18
"""The most that one step unpacks: little beside the limits on bodies, and some tenths of a millisecond of work."""


class Unpacker:
    """A decompressor of a body in steps of at most ``STEP_BYTES``; ``has_more``: the last input has more output."""

    def __init__(self, window_bits: int) -> None:
        self._stream = zlib.decompressobj(window_bits)
        self.has_more = False

    def take(self, chunk: bytes) -> bytes:
        """Return the next step of what was taken and ``chunk``, which is empty while there is more.

        Raises InvalidDocument.
        """
        if self._stream.eof and chunk:
            raise InvalidDocument("the compressed body continues after its end; send one compressed stream")
        try:
            step = self._stream.decompress(self._stream.unconsumed_tail + chunk, STEP_BYTES)
        except zlib.error as error:
            raise InvalidDocument(f"the body does not match its Content-Encoding: {error}") from None
        if self._stream.unused_data:
            raise InvalidDocument("the compressed body continues after its end; send one compressed stream")
        self.has_more = not self._stream.eof and len(step) == STEP_BYTES
        return step

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
