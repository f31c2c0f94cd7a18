"""Options that several commands share: a dataclass is declared once, and a command takes it as one parameter.

``grouped`` expands each parameter whose type is a dataclass into an option per field, and makes the dataclass again
before the command is called. A class's ``PANEL`` is the panel of the help that its options are in.
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
    """The command as typer reads it, with every option of its own and of its groups."""
    hints = get_type_hints(command, include_extras=True)
    own = inspect.signature(command).parameters.values()
    groups: dict[str, type] = {one.name: hints[one.name] for one in own if is_dataclass(hints[one.name])}

    def parameters() -> Iterator[inspect.Parameter]:
        for one in own:
            if one.name in groups:
                yield from _options(groups[one.name])
            else:
                yield one.replace(annotation=hints[one.name], kind=inspect.Parameter.KEYWORD_ONLY)

    @wraps(command)
    def called(**given: Any) -> None:
        made = {name: kind(**{one.name: given.pop(one.name) for one in fields(kind)}) for name, kind in groups.items()}
        command(**given, **made)

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
    """The annotation of an option, in the group's panel unless the option names one of its own."""
    assert get_origin(annotation) is Annotated, annotation
    kind, info = get_args(annotation)
    assert isinstance(info, OptionInfo)
    info = copy(info)
    info.rich_help_panel = info.rich_help_panel or panel
    return Annotated[kind, info]
