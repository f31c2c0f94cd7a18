"""Options that several commands share: a dataclass is declared once, and a command takes it as one parameter.

``grouped`` expands each parameter whose type is a dataclass into an option per field, and builds the dataclass again
before it calls the command. The ``PANEL`` of a class is the panel of the help that shows its options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from typer.models import OptionInfo


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command as typer reads it, with its options and with the options of its groups."""
    hints = get_type_hints(command, include_extras=True)
    command_parameters = inspect.signature(command).parameters.values()
    groups: dict[str, type] = {one.name: hints[one.name] for one in command_parameters if is_dataclass(hints[one.name])}

    def parameters() -> Iterator[inspect.Parameter]:
        for one in command_parameters:
            if one.name in groups:
                yield from _options(groups[one.name])
            else:
                yield one.replace(annotation=hints[one.name], kind=inspect.Parameter.KEYWORD_ONLY)

    @wraps(command)
    def called(**values: Any) -> None:
        objects = {
            name: kind(**{one.name: values.pop(one.name) for one in fields(kind)}) for name, kind in groups.items()
        }
        command(**values, **objects)

    called.__annotations__ = {}
    called.__signature__ = inspect.Signature(list(parameters()))  # type: ignore[attr-defined]
    return called


def _options(group: type) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for one in fields(group):
        yield inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_default(one),
            annotation=_in_panel(hints[one.name], group.PANEL),  # type: ignore[attr-defined]
        )


def _default(one: Field[Any]) -> Any:
    return inspect.Parameter.empty if one.default is MISSING else one.default


def _in_panel(annotation: Any, panel: str) -> Any:
    """Put the annotation of an option into the group's panel, unless the option names another panel."""
    assert get_origin(annotation) is Annotated, annotation
    kind, info = get_args(annotation)
    assert isinstance(info, OptionInfo)
    info = copy(info)
    info.rich_help_panel = info.rich_help_panel or panel
    return Annotated[kind, info]
