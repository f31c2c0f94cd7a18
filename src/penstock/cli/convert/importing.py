"""``penstock import topology``: what schedulers, drivers and fabric tools print, as one topology."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

import typer

from penstock.cli.groups import grouped
from penstock.cli.input_files import STANDARD, post_document, prepare_output, print_json, write_document
from penstock.cli.options import OUTPUT, Document, option_values, shown
from penstock.cli.questions import ask
from penstock.cli.service.remote import Post, Server, connect
from penstock.schemas.options.importing import FACTS, IMPORT_OPTIONS, KEPT, SOURCES

if TYPE_CHECKING:
    from penstock.cli.show import Screen
    from penstock.schemas.api.topology_import import ImportOptions, ImportSource, LeftOut, TopologyImported

MOST_SHOWN = 20
LONGEST_SHOWN = 200
_KIND = re.compile(r"([^\s=]+)\s*=\s*([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*x\s*([^\s=]+)")

group = typer.Typer(help="Convert what other tools write into profiles, topologies and plans.", no_args_is_help=True)


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Options for the sources: files, their formats, and a service's agents."""

    PANEL: ClassVar[str] = SOURCES

    formats: Annotated[list[str] | None, shown(IMPORT_OPTIONS["formats"])] = None
    agents: Annotated[str | None, shown(IMPORT_OPTIONS["agents"])] = None
    node: Annotated[str | None, shown(IMPORT_OPTIONS["node"])] = None
    topology_name: Annotated[str | None, shown(IMPORT_OPTIONS["topology_name"])] = None


@dataclass(frozen=True, kw_only=True)
class HardwareFacts:
    """Facts about the hardware that no source contains."""

    PANEL: ClassVar[str] = FACTS

    device_kind: Annotated[list[str] | None, shown(IMPORT_OPTIONS["device_kind"])] = None
    kind: Annotated[list[str] | None, shown(IMPORT_OPTIONS["kind"])] = None
    devices_per_node: Annotated[int | None, shown(IMPORT_OPTIONS["devices_per_node"], min=1)] = None
    memory: Annotated[str | None, shown(IMPORT_OPTIONS["memory"])] = None
    fabric: Annotated[str | None, shown(IMPORT_OPTIONS["fabric"])] = None
    fabric_bandwidth: Annotated[str | None, shown(IMPORT_OPTIONS["fabric_bandwidth"])] = None
    nic: Annotated[str | None, shown(IMPORT_OPTIONS["nic"])] = None
    latency: Annotated[str | None, shown(IMPORT_OPTIONS["latency"])] = None
    oversubscription: Annotated[float, shown(IMPORT_OPTIONS["oversubscription"], min=1)] = 1
    nvlink_blocks: Annotated[bool, shown(IMPORT_OPTIONS["nvlink_blocks"])] = False


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Options for the nodes that the topology keeps."""

    PANEL: ClassVar[str] = KEPT

    only: Annotated[str | None, shown(IMPORT_OPTIONS["only"])] = None
    only_free: Annotated[bool, shown(IMPORT_OPTIONS["only_free"])] = False


@group.command("topology")
@grouped
def import_topology(
    *,
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE]…", help="Files with what the tools printed; - is standard input."),
    ] = None,
    sources: Sources,
    facts: HardwareFacts,
    kept: Kept,
    name: Annotated[
        str | None, typer.Option(help="Name of the topology (default: that of the file).", rich_help_panel=OUTPUT)
    ] = None,
    output: Document = STANDARD,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print the topology, the assumptions and what was left out as JSON.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    post: Post = None,
    server: Server = None,
) -> None:
    """Make one topology of what Slurm, Kubernetes, drivers and fabric tools print.

    Prints what was found, what was assumed and which nodes were left out, and
    names the option for what no source says. With --server the service does it,
    and keeps the topology.

    Example: penstock import topology topology.conf nodes.txt -o cluster.json
    """
    prepare_output(output)
    title = name or (Path(output).stem if output != STANDARD else "imported")
    options = _options(title, option_values(sources, facts, kept))
    from penstock.schemas.api.topology_import import TopologyImport

    question = TopologyImport(sources=tuple(_sources(files or [], sources)), options=options)
    imported: TopologyImported = ask("import-topology", question, server)
    if as_json:
        print_json(imported)
    if output != STANDARD or not as_json:
        write_document(imported.topology, output)
    to_error = output == STANDARD or as_json
    _show(_screen(to_error), imported, None if output == STANDARD else output, server)
    if post is not None:
        post_document(_screen(to_error), imported.topology, post)


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "device_kind": lambda _, texts: tuple(texts or ()),
    "kind": lambda _, texts: tuple(map(_kind, texts or ())),
    "memory": lambda flag, text: _read(flag, text, "bytes"),
    "fabric_bandwidth": lambda flag, text: _read(flag, text, "bytes_per_s"),
    "nic": lambda flag, text: _read(flag, text, "bytes_per_s"),
    "latency": lambda flag, text: _read(flag, text, "time_ns"),
}
"""The functions that read options whose text is not the field's value."""


def _options(title: str, values: Mapping[str, Any]) -> ImportOptions:
    """Return the options of an import. Raises typer.BadParameter, which names the option."""
    from pydantic import ValidationError

    from penstock.schemas.api.topology_import import ImportOptions

    fields, flags = {"name": title}, {"name": "--name"}
    for name, option in IMPORT_OPTIONS.items():
        if option.pointer.startswith("/options/"):
            field = option.pointer.removeprefix("/options/")
            read = _READERS.get(name)
            fields[field] = values[name] if read is None else read(option.flag, values[name])
            flags[field] = option.flag
    try:
        return ImportOptions.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        message = f"{first['msg'][:1].lower()}{first['msg'][1:]}"
        raise typer.BadParameter(message, param_hint=flags[str(first["loc"][0])]) from None


def _read(option: str, text: str | None, unit: Literal["bytes", "bytes_per_s", "time_ns"]) -> int | None:
    """Parse a number with its unit; None stays None. Raises BadParameter."""
    if text is None:
        return None
    from penstock.schemas import quantities

    parse: Callable[[str], int] = getattr(quantities, f"parse_{unit}")
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def _kind(text: str) -> dict[str, str | float]:
    """Parse a kind such as ``GB200=2.5xH100``. Raises BadParameter."""
    match = _KIND.fullmatch(text.strip())
    if match is None or not float(match[2]):
        raise typer.BadParameter(
            f"{text!r} does not have the form NAME=SPEEDxKNOWN, such as GB200=2.5xH100", param_hint="--kind"
        )
    return {"name": match[1], "speed": float(match[2]), "scale_from": match[3]}


def _sources(files: list[str], options: Sources) -> list[ImportSource]:
    from penstock.importers.topology import decoded, text_of
    from penstock.schemas.api.topology_import import Format, ImportSource

    formats, agents = options.formats or [], options.agents
    for name in formats:
        if name not in get_args(Format):
            raise typer.BadParameter(f"{name!r} is none of {', '.join(get_args(Format))}", param_hint="--from")
    if len(formats) > 1 and len(formats) != len(files):
        raise typer.BadParameter(
            f"there are {len(formats)} formats for {len(files)} files; give one for each, one for all, or none",
            param_hint="--from",
        )
    if files.count(STANDARD) > 1:
        raise typer.BadParameter("standard input can be read only once", param_hint="FILE")
    each: list[str | None] = list(formats) if len(formats) == len(files) else [*formats, None][:1] * len(files)
    sources = [
        ImportSource(
            text=decoded(sys.stdin.buffer.read()) if file == STANDARD else text_of(Path(file)),
            format=name,  # type: ignore[arg-type]
            name="standard input" if file == STANDARD else file,
            nodes=options.node,
        )
        for file, name in zip(files, each, strict=True)
    ]
    if agents is not None:
        with connect(agents) as client:
            topology = client.topologies.of_agents()
        sources.append(ImportSource(text=topology.text(), format="agents", name=f"the agents of {agents}"))
    if not sources:
        raise typer.BadParameter("there is nothing to read; give files, - or --agents", param_hint="FILE")
    return sources


def _show(screen: Screen, imported: TopologyImported, output: str | None, server: str | None) -> None:
    """Show what was found, assumed and left out."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    topology = imported.topology
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("source", overflow="fold")
    table.add_column("format")
    for head in ("nodes", "switches", "links"):
        table.add_column(head, justify="right")
    for finding in imported.sources:
        numbers = (finding.nodes, finding.switches, finding.links)
        table.add_row(finding.source, finding.format, *(f"{number:,}" if number else "–" for number in numbers))
    screen.table(table)
    screen.say(_summary(imported))
    _list(screen, "assumed", imported.assumptions)
    _list(screen, "left out", [_left_out(group) for group in imported.left_out])
    if imported.free is not None:
        screen.say(f"free: {_short(imported.free) or 'no node'}")
    if output is not None:
        screen.say(f"{topology.name} is written to {output}")
    if imported.hash is not None:
        screen.say(f"{server} keeps it as {imported.hash}")


def _summary(imported: TopologyImported) -> str:
    topology = imported.topology
    parts = {"node": topology.nodes, "switch": topology.switches, "link": topology.links}
    nodes, switches, links = (_counted(len(part), word) for word, part in parts.items())
    return f"{nodes} with {topology.devices_in_words()}, {switches}, {links}"


def _counted(count: int, word: str) -> str:
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}{'es' if word.endswith('ch') else 's'}"


def _left_out(group: LeftOut) -> str:
    count = f" ({group.count:,} nodes)" if group.count > 1 else ""
    return f"{_short(group.nodes)}{count}: {group.why}"


def _short(hostlist: str) -> str:
    """Shorten a hostlist to a length that a person can read."""
    return hostlist if len(hostlist) <= LONGEST_SHOWN else f"{hostlist[:LONGEST_SHOWN]} … (--json has all)"


def _list(screen: Screen, head: str, lines: Sequence[str]) -> None:
    if not lines:
        return
    screen.say(f"{head}:")
    for line in lines[:MOST_SHOWN]:
        screen.say(f"- {line}")
    if len(lines) > MOST_SHOWN:
        screen.say(f"- and {len(lines) - MOST_SHOWN} more; --json lists them")


def _screen(to_error: bool) -> Screen:
    """Return a screen on standard output, or on standard error where a document goes to standard output."""
    from penstock.cli.show import Screen

    return Screen.of(file=sys.stderr if to_error else None)
