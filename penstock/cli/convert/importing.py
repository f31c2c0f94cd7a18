"""``penstock import topology``: what schedulers, drivers and fabric tools print, as one topology."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from penstock.cli.documents import STANDARD, post_document, print_json, refuse_unwritable, write_document
from penstock.cli.service.remote import Server, connect

if TYPE_CHECKING:
    from penstock.cli.show import Screen
    from penstock.schemas.api.topology_import import ImportOptions, ImportSource, LeftOut, TopologyImported

MOST_SHOWN = 20
LONGEST_SHOWN = 200
_KIND = re.compile(r"([^\s=]+)\s*=\s*([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*x\s*([^\s=]+)")

group = typer.Typer(help="Read what other tools write.", no_args_is_help=True)


@group.command("topology")
def import_topology(
    files: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE]…", help="What tools printed; - is standard input.")
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option("--from", help="Each file's format, in their order, or one for all; else it is recognised."),
    ] = None,
    agents: Annotated[
        str | None, typer.Option(metavar="URL", help="The living agents of this service are a source, too.")
    ] = None,
    node: Annotated[
        str | None, typer.Option(help="Hostlist of the nodes that a text without names (nvidia-smi, NCCL) is about.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What the topology is called.")] = None,
    device: Annotated[
        list[str] | None, typer.Option(help="What devices are: H100; or PRODUCT=H100 for a source's own name.")
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(help="A kind that profiles lack, costed from one that they have: GB200=2.5xH100."),
    ] = None,
    devices_per_node: Annotated[int | None, typer.Option(min=1, help="Where no source counts them.")] = None,
    memory: Annotated[str | None, typer.Option(help="Of each device: 80GiB.")] = None,
    fabric: Annotated[
        str | None, typer.Option(help="What joins the devices of a node: ports (NVSwitch), pairs or bus.")
    ] = None,
    fabric_bandwidth: Annotated[str | None, typer.Option(help="Of it, in one direction: 450GB/s.")] = None,
    nic: Annotated[str | None, typer.Option(help="All network cards of a node together: 3200Gbit/s.")] = None,
    latency: Annotated[str | None, typer.Option(help="Of a node's link to its switch: 10us.")] = None,
    oversubscription: Annotated[
        float, typer.Option(min=1, help="Bandwidth below a switch over that of its link upwards, where none is said.")
    ] = 1,
    topology: Annotated[
        str | None, typer.Option(help="Which topology of a topology.yaml with several; else its default.")
    ] = None,
    nvlink_blocks: Annotated[
        bool, typer.Option("--nvlink-blocks", help="Each block of Slurm's block topology is an NVLink domain.")
    ] = False,
    only: Annotated[str | None, typer.Option(help="Hostlist: these nodes, and no others.")] = None,
    only_free: Annotated[bool, typer.Option("--only-free", help="Only nodes on which nothing runs.")] = False,
    output: Annotated[
        str, typer.Option("--output", "-o", help="Where the topology goes; - is standard output.")
    ] = STANDARD,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print topology, assumptions and what was left out as JSON.")
    ] = False,
    server: Server = None,
    post: Annotated[str | None, typer.Option(help="Also send the topology to this service, http://host:port.")] = None,
) -> None:
    """Make one topology of what Slurm, Kubernetes, drivers and fabric tools print.

    Says what was found, what was assumed, and which nodes were left out; asks for what nobody says. With --server the
    service does it, and keeps the topology.
    """
    refuse_unwritable(output)
    given = {
        "name": name or (Path(output).stem if output != STANDARD else "imported"),
        "devices": tuple(device or ()),
        "kinds": tuple(map(_kind, kind or ())),
        "devices_per_node": devices_per_node,
        "memory_bytes": _read("--memory", memory, "bytes"),
        "fabric": fabric,
        "fabric_bytes_per_s": _read("--fabric-bandwidth", fabric_bandwidth, "bytes_per_s"),
        "nic_bytes_per_s": _read("--nic", nic, "bytes_per_s"),
        "latency_ns": _read("--latency", latency, "time_ns"),
        "oversubscription": oversubscription,
        "topology": topology,
        "nvlink_blocks": nvlink_blocks,
        "only": only,
        "only_free": only_free,
    }
    options, sources = _options(given), _sources(files or [], formats or [], node, agents)
    imported = _imported(sources, options, server)
    if as_json:
        print_json(imported)
    if output != STANDARD or not as_json:
        write_document(imported.topology, output)
    to_error = output == STANDARD or as_json
    _show(_screen(to_error), imported, None if output == STANDARD else output, server)
    if post is not None:
        post_document(_screen(to_error), imported.topology, post)


def _imported(sources: Sequence[ImportSource], options: ImportOptions, server: str | None) -> TopologyImported:
    if server is not None:
        with connect(server) as client:
            return client.topologies.import_(sources, options)
    from penstock.importers.cluster import formats

    return formats.import_topology(sources, options)


def _options(given: dict[str, Any]) -> ImportOptions:
    from pydantic import ValidationError

    from penstock.schemas.api.topology_import import ImportOptions

    try:
        return ImportOptions.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        names = {"fabric_bytes_per_s": "fabric-bandwidth", "memory_bytes": "memory", "nic_bytes_per_s": "nic"}
        field = str(first["loc"][0])
        hint = "--" + names.get(field, field.replace("_", "-"))
        raise typer.BadParameter(f"{first['msg'][:1].lower()}{first['msg'][1:]}", param_hint=hint) from None


def _read(option: str, text: str | None, unit: Literal["bytes", "bytes_per_s", "time_ns"]) -> int | None:
    """A number with its unit. Raises BadParameter."""
    if text is None:
        return None
    from penstock.schemas import quantities

    parse: Callable[[str], int] = getattr(quantities, f"parse_{unit}")
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def _kind(text: str) -> dict[str, str | float]:
    """``GB200=2.5xH100``. Raises BadParameter."""
    match = _KIND.fullmatch(text.strip())
    if match is None or not float(match[2]):
        raise typer.BadParameter(f"{text!r} is not like GB200=2.5xH100, NAME=SPEEDxKNOWN", param_hint="--kind")
    return {"name": match[1], "speed": float(match[2]), "scale_from": match[3]}


def _sources(files: list[str], formats: list[str], node: str | None, agents: str | None) -> list[ImportSource]:
    from penstock.importers.topology import decoded, text_of
    from penstock.schemas.api.topology_import import Format, ImportSource

    for name in formats:
        if name not in get_args(Format):
            raise typer.BadParameter(f"{name!r} is none of {', '.join(get_args(Format))}", param_hint="--from")
    if len(formats) > 1 and len(formats) != len(files):
        raise typer.BadParameter(
            f"there are {len(formats)} formats for {len(files)} files; give one for each, one for all, or none",
            param_hint="--from",
        )
    if files.count(STANDARD) > 1:
        raise typer.BadParameter("standard input can be read once", param_hint="FILE")
    each: list[str | None] = list(formats) if len(formats) == len(files) else [*formats, None][:1] * len(files)
    sources = [
        ImportSource(
            text=decoded(sys.stdin.buffer.read()) if file == STANDARD else text_of(Path(file)),
            format=name,  # type: ignore[arg-type]
            name="standard input" if file == STANDARD else file,
            nodes=node,
        )
        for file, name in zip(files, each, strict=True)
    ]
    if agents is not None:
        with connect(agents) as client:
            found = client.topologies.of_agents()
        sources.append(ImportSource(text=found.text(), format="agents", name=f"the agents of {agents}"))
    if not sources:
        raise typer.BadParameter("there is nothing to read; give files, - or --agents", param_hint="FILE")
    return sources


def _show(screen: Screen, imported: TopologyImported, output: str | None, server: str | None) -> None:
    """What was found, assumed and left out."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    topology = imported.topology
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("source", overflow="fold")
    table.add_column("format")
    for head in ("nodes", "switches", "links"):
        table.add_column(head, justify="right")
    for found in imported.found:
        numbers = (found.nodes, found.switches, found.links)
        table.add_row(found.source, found.format, *(f"{number:,}" if number else "–" for number in numbers))
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
    kinds: dict[str, int] = {}
    for node in topology.nodes:
        for device in node.devices:
            kinds[device.kind] = kinds.get(device.kind, 0) + 1
    devices = " and ".join(f"{count:,} {kind}" for kind, count in kinds.items())
    parts = {"node": topology.nodes, "switch": topology.switches, "link": topology.links}
    nodes, switches, links = (_counted(len(part), word) for word, part in parts.items())
    return f"{nodes} with {devices}, {switches}, {links}"


def _counted(count: int, word: str) -> str:
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}{'es' if word.endswith('ch') else 's'}"


def _left_out(group: LeftOut) -> str:
    count = f" ({group.count:,} nodes)" if group.count > 1 else ""
    return f"{_short(group.nodes)}{count}: {group.why}"


def _short(hostlist: str) -> str:
    """A hostlist as far as it can be read."""
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
    """Standard output, or standard error where a document goes to the former."""
    from penstock.cli.show import Screen

    return Screen.of(file=sys.stderr if to_error else None)
