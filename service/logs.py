"""The service's log: a line per request and per job, as JSON or for people, with ids that relate the lines.

Modules write with ``logging.getLogger("penstock.…")``; code that works on something binds its ids with ``about``, and
every line within carries them. Libraries log from level WARNING on. ``configure`` is for our own processes only.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, Literal, TextIO

import structlog
from structlog.contextvars import bound_contextvars, get_contextvars

Format = Literal["auto", "json", "text"]

_SECRETS = re.compile(
    r"""(?x)
    (?P<key>psk_)[A-Za-z0-9_\-]+                                       # a key
    | (?P<scheme>\b[a-zA-Z][a-zA-Z0-9+.\-]*://[^\s/:@"']*):[^\s/@"']+@  # a password in a URL
    | (?P<bearer>[Bb]earer\s+)[^\s"']+
    """
)


def configure(form: Format = "auto", level: str = "info", stream: TextIO | None = None) -> None:
    """Send this process's log lines to ``stream`` (default: stderr), replacing an earlier configuration."""
    stream = stream or sys.stderr
    for_people = form == "text" or (form == "auto" and stream.isatty())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    last: list[Any] = [
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(ensure_ascii=False),
    ]
    if for_people:
        plain = structlog.dev.plain_traceback
        last = [structlog.dev.ConsoleRenderer(colors=stream.isatty(), pad_event_to=0, exception_formatter=plain)]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last, _without_secrets],
        )
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("penstock").setLevel(level.upper())


@contextmanager
def about(**ids: str | None) -> Iterator[None]:
    """Add these ids to every line of this thread or task within the context; None is left out."""
    with bound_contextvars(**{name: value for name, value in ids.items() if value is not None}):
        yield


def request_id() -> str | None:
    """Return the id of the request being answered, or of the one that made the job being worked on."""
    current_id: str | None = get_contextvars().get("request_id")
    return current_id


def without_secrets(text: str) -> str:
    """Return the text with keys, bearer tokens and passwords in URLs masked."""
    return _SECRETS.sub(_masked, text)


def _masked(match: re.Match[str]) -> str:
    if match["key"]:
        return f"{match['key']}***"
    return f"{match['scheme']}:***@" if match["scheme"] else f"{match['bearer']}***"


def _without_secrets(logger: Any, name: str, rendered: str | Mapping[str, Any] | MutableMapping[str, Any]) -> str:
    return without_secrets(str(rendered))
