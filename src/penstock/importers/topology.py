"""Topologies from the output of tools, for people: ``penstock.import_topology``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from penstock.importers.cluster import formats
from penstock.schemas.api.topology_import import Format, ImportOptions, ImportSource, TopologyImported
from penstock.schemas.document import faults_of
from penstock.schemas.errors import InvalidDocument

Source = str | Path | ImportSource


def import_topology(
    *sources: Source, format: Format | Sequence[Format] | None = None, **options: Any
) -> TopologyImported:
    """Build one topology of files, or of texts as ``ImportSource``; ``options``: fields of ``ImportOptions``.

    ``format``: of each source, or of all; left out, it is recognised. ``devices`` may be one name, and numbers may have
    units (``"80 GiB"``). Raises InvalidDocument as ``penstock.importers.cluster.formats.import_topology`` does.
    """
    if isinstance(devices := options.get("devices"), str):
        options["devices"] = [devices]
    several = [format] * len(sources) if format is None or isinstance(format, str) else list(format)
    if len(several) != len(sources) or any(name is not None and name not in get_args(Format) for name in several):
        raise InvalidDocument(
            f"formats {several} do not fit {len(sources)} sources",
            remedy=f"one for all sources, or one for each, of {', '.join(get_args(Format))}",
        )
    try:
        import_options = ImportOptions.model_validate(options, context={"units": True})
    except ValidationError as error:
        raise InvalidDocument(
            "the options of the import are not valid", faults=tuple(faults_of(error.errors()))
        ) from None
    return formats.import_topology(
        [_source(one, name) for one, name in zip(sources, several, strict=True)], import_options
    )


def _source(source: Source, name: Format | None) -> ImportSource:
    if isinstance(source, ImportSource):
        return source if name is None else source.model_copy(update={"format": name})
    return ImportSource(text=text_of(Path(source)), format=name, name=str(source))


def text_of(path: Path) -> str:
    """Return a file's text, in any Unicode encoding. Raises InvalidDocument for a file that cannot be read."""
    try:
        return decoded(path.read_bytes())
    except OSError as error:
        raise InvalidDocument(f"cannot read {str(path)!r}: {error.strerror}") from None


def decoded(data: bytes) -> str:
    """Decode UTF-8, or UTF-16 where it begins so; other bytes become U+FFFD, which readers refuse where they matter."""
    utf_16 = data.startswith((b"\xff\xfe", b"\xfe\xff"))
    return data.decode("utf-16" if utf_16 else "utf-8-sig", errors="replace")
