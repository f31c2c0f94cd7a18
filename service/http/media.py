"""Media types and content codings of bodies: JSON and MessagePack, gzip and deflate."""

from __future__ import annotations

import json
import zlib
from typing import Any

import msgpack  # type: ignore[import-untyped]

from penstock.schemas.document import doubled_keys
from penstock.schemas.errors import InvalidDocument
from penstock.service.http.problems import WrongMediaType

JSON = "application/json"
MSGPACK = "application/msgpack"

_MSGPACK_NAMES = frozenset({MSGPACK, "application/x-msgpack", "application/vnd.msgpack"})
_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


def kind_of(content_type: str) -> str:
    """JSON or MSGPACK for the value of a Content-Type. Raises WrongMediaType."""
    given = content_type.partition(";")[0].strip().lower()
    if given == JSON or given.endswith("+json"):
        return JSON
    if is_msgpack(given):
        return MSGPACK
    raise WrongMediaType(
        f"the body is {given!r}; this endpoint takes {JSON} and {MSGPACK}",
        remedy=f"send the header Content-Type: {JSON}",
        headers={"Accept": f"{JSON}, {MSGPACK}"},
    )


def is_msgpack(name: str) -> bool:
    """Whether a media type is one of the names of MessagePack."""
    return name in _MSGPACK_NAMES


class Unpacker:
    """Decompresses a body piece by piece, never more of it than it is asked for."""

    def __init__(self, window_bits: int) -> None:
        self._stream = zlib.decompressobj(window_bits)

    def take(self, chunk: bytes, most: int) -> bytes:
        """What a piece unpacks to; a result of ``most`` bytes means that there may be more. Raises InvalidDocument."""
        if self._stream.eof and chunk:
            raise InvalidDocument("the compressed body goes on after its end; send one compressed stream")
        try:
            found = self._stream.decompress(chunk, most)
        except zlib.error as error:
            raise InvalidDocument(f"the body is not what its Content-Encoding says: {error}") from None
        if self._stream.unused_data:
            raise InvalidDocument("the compressed body goes on after its end; send one compressed stream")
        return found

    def close(self) -> None:
        """Raise InvalidDocument when the compressed stream was cut off."""
        if not self._stream.eof:
            raise InvalidDocument("the compressed body is cut off")


def unpacker(content_encoding: str) -> Unpacker | None:
    """What decodes a Content-Encoding; None for none. Raises WrongMediaType for one that is not known here."""
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


def json_of_msgpack(body: bytes) -> bytes:
    """The JSON text of a MessagePack document. Raises InvalidDocument for what JSON does not have."""
    try:
        data = msgpack.unpackb(body, object_pairs_hook=_unique, ext_hook=_no_extension)
        return json.dumps(data, allow_nan=False, separators=(",", ":")).encode()
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        reason = str(error) or type(error).__name__
        raise InvalidDocument(f"the body is no MessagePack of a JSON document: {reason}") from None


def msgpack_of_json(body: bytes) -> bytes:
    """The MessagePack of a JSON text of ours."""
    packed: bytes = msgpack.packb(json.loads(body))
    return packed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if doubled := doubled_keys(pairs):
        raise ValueError(f"the keys {doubled} are given twice in one object")
    return dict(pairs)


def _no_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code} has no place in a document")
