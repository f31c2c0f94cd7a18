"""``penstock list``: the names of models, clusters, planners, schedules and kinds of devices."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli import completion
from penstock.cli.groups import grouped
from penstock.cli.input_files import print_json
from penstock.cli.options import AsJson
from penstock.cli.panels import PLAN
from penstock.cli.questions import ask
from penstock.cli.service.remote import Server


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("list", rich_help_panel=PLAN)(grouped(list_names))


def list_names(
    *,
    what: Annotated[
        str,
        typer.Argument(
            metavar="NAMES", help="Which names, such as clusters.", autocompletion=completion.lists, show_default=False
        ),
    ],
    as_json: AsJson = False,
    server: Server = None,
) -> None:
    """List what requests may name: models, clusters, planners, schedules or devices.

    Example: penstock list clusters
    """
    from penstock.cli.show import Screen
    from penstock.schemas.api.listing import ListAnswer, ListRequest
    from penstock.schemas.errors import UnknownName

    if what not in (kinds := completion.lists("")):
        raise UnknownName.among("list of", what, kinds)
    answer: ListAnswer = ask("list", ListRequest.parse({"what": what}), server)
    if as_json:
        print_json(answer)
        return
    screen = Screen.of()
    screen.names([(each.name, each.about) for each in answer.items])
    if answer.note:
        screen.say(answer.note)
