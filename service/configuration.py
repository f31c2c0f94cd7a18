"""Sources of settings: the command line, ``PENSTOCK_…`` variables, a TOML file, defaults; the first one wins.

An unknown name is refused with the nearest known one, in the file and in the environment alike.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic_settings import BaseSettings

from penstock.schemas.errors import Fault, InvalidDocument, meant

PREFIX = "PENSTOCK_"
FILE_VARIABLE = PREFIX + "SETTINGS"
NOT_OURS = ("AGENT_", "API_KEY", "DEBUG", "SERVER", "SETTINGS")
"""Beginnings of ``PENSTOCK_…`` variables that other parts of Penstock read."""

MASK = "***"
_RESEMBLANCE = 0.75
"""Least ``difflib`` ratio at which an unknown variable counts as a misspelt setting, not as another program's."""


def read_file(path: str | Path, names: Iterable[str]) -> dict[str, Any]:
    """Return the settings in a TOML file.

    Raises InvalidDocument for an unreadable file, text that is not TOML, or a name that is not a setting.
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidDocument(f"cannot read the service's settings {str(path)!r}: {error}") from None
    faults = [Fault(f"/{name}", _unknown(name, names), "unknown-setting") for name in values if name not in set(names)]
    if faults:
        raise InvalidDocument(f"{str(path)!r} has unknown settings", faults=tuple(faults))
    return values


def refuse_misspelt(environ: Mapping[str, str], settings: Iterable[str]) -> None:
    """Raise InvalidDocument for a variable that is nearly the name of a setting."""
    names = list(settings)
    for variable in sorted(environ):
        name = variable.removeprefix(PREFIX).lower()
        if name == variable.lower() or name in names or name.upper().startswith(NOT_OURS):
            continue
        if nearest := difflib.get_close_matches(name, names, 1, _RESEMBLANCE):
            raise InvalidDocument(f"{variable} is not a setting; did you mean {PREFIX}{nearest[0].upper()}?")


def in_environment(environ: Mapping[str, str], names: Iterable[str]) -> set[str]:
    """Return the settings given by environment variables."""
    variables = {variable.lower() for variable in environ}
    return {name for name in names if (PREFIX + name).lower() in variables}


def shown(settings: BaseSettings, origins: Mapping[str, str]) -> str:
    """Return all settings with their values and origins as a TOML file that can be read back; secrets are masked."""
    lines = []
    for name, value in printable(settings).items():
        description = type(settings).model_fields[name].description
        text = "# " if value is None or (isinstance(value, str) and MASK in value) else ""
        text += f"{name} = {_toml(value)}"
        lines.append(f"{text:<48} # {origins.get(name, 'default')}" + (f"; {description}" if description else ""))
    return "\n".join(lines) + "\n"


def printable(settings: BaseSettings) -> dict[str, Any]:
    """Return the settings as plain data without secrets: marked fields, and passwords in URLs."""
    masked: dict[str, Any] = {}
    for name, value in settings.model_dump(mode="json").items():
        extra = type(settings).model_fields[name].json_schema_extra
        is_secret = isinstance(extra, dict) and bool(extra.get("secret"))
        masked[name] = MASK if is_secret and value else _without_password(value)
    return masked


def table(settings: type[BaseSettings]) -> str:
    """Return a page of documentation: every setting with its type, default and meaning."""
    lines = [_HEAD]
    for name, field in settings.model_fields.items():
        kind = field.annotation.__name__ if isinstance(field.annotation, type) else str(field.annotation)
        kind = kind.replace("typing.", "").replace("pathlib._local.", "pathlib.").replace("|", "\\|")
        default = "" if field.default_factory is not None or field.default is None else f"`{_toml(field.default)}`"
        lines.append(f"| `{name}` | {kind} | {default} | {field.description} |")
    return "\n".join(lines) + "\n"


_HEAD = """# Settings of the service

Made by `scripts/make-settings`; [operating](operating.md) says how they are given. Times are seconds, sizes are bytes.

| setting | type | default | |
|---|---|---|---|"""


def _without_password(value: Any) -> Any:
    if not isinstance(value, str) or "://" not in value:
        return value
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        return make_url(value).render_as_string(hide_password=True)
    except ArgumentError:
        return MASK


def _unknown(name: str, names: Iterable[str]) -> str:
    return "; ".join(filter(None, (f"{name!r} is not a setting", meant(name, names, likeness=0.5))))


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml(one) for one in value) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_toml(one)}" for key, one in value.items()) + " }"
    return '""' if value is None else json.dumps(value)
