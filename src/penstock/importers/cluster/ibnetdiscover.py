"""The output of ``ibnetdiscover``, an InfiniBand fabric: switches, the adapters of hosts, and cables with their rates.

A block begins with ``Switch``, ``Ca`` or ``Rt``, the number of ports, an identifier and a description; each line after
it is one port and what it is connected to. A cable is printed at both of its ends.

.. [1] infiniband-diags, ibnetdiscover(8): the lines. InfiniBand Architecture Specification: signalling rates, and the
   8b/10b or 64b/66b coding, without which the rates below are.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from penstock.importers.cluster.facts import LinkFacts, NicFacts, NodeFacts, Place, SourceFacts, SwitchFacts
from penstock.importers.cluster.slurm.slurm_lines import refuse_other_than_text
from penstock.importers.lines import Faults

_IDENTIFIER = r'"([SHR]-[0-9a-fx]+)"'
_BLOCK = re.compile(rf'(Switch|Ca|Rt)\s+[0-9]+\s+{_IDENTIFIER}\s*(?:#\s*"([^"]*)")?', re.IGNORECASE)
_PORT = re.compile(
    r"\[([0-9]{1,6})\](?:\[ext [0-9]+\])?\s*+(?:\([0-9a-fx]+\)\s*+)?"
    rf"{_IDENTIFIER}\s*\[([0-9]{{1,6}})\][^#]*+(?:#(.*))?",
    re.IGNORECASE,
)
_RATE = re.compile(r"(?:^|\s)([0-9]{1,3})x([A-Z]+[0-9]*)(?=\s|$)")
_SKIPPED = re.compile(
    r"#|(?:vendid|devid|sysimgguid|switchguid|caguid|rtguid)=|(?:Non-)?Chassis |Hostname: "
    r"|ib(?:warn|panic|error): \[\d+\] |src/\w+\.c:\d+; ",
    re.IGNORECASE,
)
"""Lines that say nothing of cables; the last ones the command and its libraries write to standard error."""
_NAME = re.compile(r"(HCA-\d+|(?:mlx|ib|hfi|qib|bnxt_re|irdma|roce|rdma|ibp)(?=\w*\d)\w+)(?:\s|$)", re.IGNORECASE)
_UNLIKE_A_NAME = re.compile(r"[\s,\[\]]+")
_SYSTEM = re.compile(r"MF0;([^:;]+):")

_LANE_BITS_PER_S = {
    "SDR": 2_000_000_000,
    "DDR": 4_000_000_000,
    "QDR": 8_000_000_000,
    "FDR10": 10_000_000_000,
    "FDR": 13_636_363_636,
    "EDR": 25_000_000_000,
    "HDR": 50_000_000_000,
    "NDR": 100_000_000_000,
    "XDR": 200_000_000_000,
}
"""Data of one lane and direction after coding: FDR signals 14.0625 Gbit/s and codes 64 bits as 66."""

_REMEDY = "give what `ibnetdiscover` prints without options, or with -f"

End = tuple[str, int]
"""A block's identifier and a port of it."""


@dataclass(frozen=True, slots=True)
class _Adapter:
    host: str
    name: str


@dataclass(slots=True)
class _Block:
    """A switch, adapter or router."""

    kind: str
    guid: str
    description: str
    line: int
    ports: dict[int, tuple[End, int | None, int]] = field(default_factory=dict)
    """The other end of each port, its data rate in bytes per second and direction, and its line."""


def read_ibnetdiscover(text: str, source: str = "ibnetdiscover") -> SourceFacts:
    """Read hosts with their adapters, switches, and a link for each cable, with the data rate it runs at.

    Host names are the first word of an adapter's description, ``"host01 mlx5_0"``. Raises InvalidDocument with all
    faults by line: lines that are not of this form, ports without a block, cables whose ends contradict each other, a
    text without hosts.
    """
    faults = Faults(f"the fabric {source!r}")
    refuse_other_than_text(text, faults)
    blocks = _read_blocks(text, faults)
    faults.stop(_REMEDY)
    cables = _cables(blocks, faults)
    adapters = _adapters(blocks, faults)
    if not adapters and not faults.entries:
        faults.add(None, 'no adapter names its host: descriptions such as "host01 mlx5_0" do', code="missing")
    faults.stop()
    hosts = {guid: adapter.host for guid, adapter in adapters.items()}
    switches = _switch_names(blocks, set(hosts.values()))
    names = switches | hosts
    links = tuple(
        LinkFacts(names[a], names[b], Place(source, line), rate)
        for (a, _), (b, _), rate, line in cables
        if a in names and b in names and names[a] != names[b]
    )
    tiers = _tiers(adapters, links)
    return SourceFacts(
        format="ibnetdiscover",
        source=source,
        nodes=_nodes(blocks, adapters, source),
        switches=tuple(
            SwitchFacts(name, Place(source, blocks[guid].line), tier=tiers.get(name)) for guid, name in switches.items()
        ),
        links=links,
        assumptions=tuple(_assumptions(blocks, adapters, links, source)),
    )


def _read_blocks(text: str, faults: Faults) -> dict[str, _Block]:
    blocks: dict[str, _Block] = {}
    block: _Block | None = None
    for number, raw in enumerate(text.lstrip("\ufeff").split("\n"), start=1):
        line = raw.strip()
        if not line or _SKIPPED.match(line):
            continue
        if head := _BLOCK.match(line):
            block = _Block(head[1].capitalize(), _guid(head[2]), (head[3] or "").strip(), number)
            before = blocks.setdefault(block.guid, block)
            if before is not block:
                faults.add(number, f"{block.guid} is there twice, first on line {before.line}", code="double")
        elif port := _PORT.match(line):
            if block is None:
                faults.add(number, "a port before the first Switch or Ca")
            elif int(port[1]) in block.ports:
                faults.add(number, f"port {port[1]} of {block.guid} is there twice", code="double")
            else:
                block.ports[int(port[1])] = (_guid(port[2]), int(port[3])), _rate(port[4] or ""), number
        else:
            faults.add(number, f"{line[:60]!r} is not a line of ibnetdiscover")
    if not blocks and not faults.entries:
        faults.add(None, "it has no Switch and no Ca", code="missing")
    return blocks


def _guid(text: str) -> str:
    return text.lower().replace("0x", "").capitalize()


def _rate(comment: str) -> int | None:
    """Return the data rate of a port, one direction, in bytes per second, from ``4xHDR``; None without a rate."""
    match = _RATE.search(comment.rpartition('"')[2])
    lane = _LANE_BITS_PER_S.get(match[2]) if match else None
    return int(match[1]) * lane // 8 if match and lane else None


def _cables(blocks: dict[str, _Block], faults: Faults) -> list[tuple[End, End, int | None, int]]:
    """Return each cable once: its ends, its rate, and the line of the end that is printed first."""
    cables = []
    for guid, block in blocks.items():
        for port, (far, rate, line) in block.ports.items():
            near = guid, port
            other = blocks.get(far[0])
            if other is None:
                faults.add(line, f"{far[0]} is not a block of this text: is it cut off?", code="unknown")
                continue
            back = other.ports.get(far[1])
            if back is not None and back[0] != near:
                detail = (
                    f"port {port} of {guid} leads to port {far[1]} of {far[0]}, which leads elsewhere (line {back[2]})"
                )
                faults.add(line, detail, code="contradiction")
            elif back is None or line < back[2]:
                cables.append((near, far, min(filter(None, (rate, back and back[1])), default=None), line))
    return cables


def _adapters(blocks: dict[str, _Block], faults: Faults) -> dict[str, _Adapter]:
    """Return the adapters whose descriptions name their hosts, by identifier."""
    adapters: dict[str, _Adapter] = {}
    first: dict[_Adapter, _Block] = {}
    for guid, block in blocks.items():
        host, _, rest = block.description.partition(" ")
        name = _NAME.match(rest.strip())
        if block.kind != "Ca" or name is None or set(host) & set("[],"):
            continue
        adapter = adapters[guid] = _Adapter(host, name[1])
        before = first.setdefault(adapter, block)
        if before is not block:
            detail = (
                f"the adapter {host} {name[1]} is there twice, first on line {before.line}: do two hosts share a name?"
            )
            faults.add(block.line, detail, code="double")
    return adapters


def _switch_names(blocks: dict[str, _Block], hosts: set[str]) -> dict[str, str]:
    """Return a name for each switch and router: its system, else its description, else its unique identifier."""
    switches = {guid: block for guid, block in blocks.items() if block.kind != "Ca"}
    names = {guid: _system(block.description) for guid, block in switches.items()}
    for instead in (
        {guid: _plain(block.description) for guid, block in switches.items()},
        {guid: guid for guid in names},
    ):
        times = Counter(names.values()) + Counter(hosts)
        names = {guid: name if name and times[name] == 1 else instead[guid] for guid, name in names.items()}
    return names


def _system(description: str) -> str:
    system = _SYSTEM.match(description)
    return _plain(system[1] if system else description)


def _plain(description: str) -> str:
    return _UNLIKE_A_NAME.sub("_", description)


def _tiers(adapters: dict[str, _Adapter], links: tuple[LinkFacts, ...]) -> dict[str, int]:
    """Return how many cables each switch is away from the next host, less one."""
    neighbours: dict[str, list[str]] = {}
    for link in links:
        neighbours.setdefault(link.a, []).append(link.b)
        neighbours.setdefault(link.b, []).append(link.a)
    tiers = {adapter.host: -1 for adapter in adapters.values()}
    reached = list(tiers)
    for name in reached:
        for other in neighbours.get(name, ()):
            if other not in tiers:
                tiers[other] = tiers[name] + 1
                reached.append(other)
    return tiers


def _nodes(blocks: dict[str, _Block], adapters: dict[str, _Adapter], source: str) -> dict[str, NodeFacts]:
    nics: dict[str, list[NicFacts]] = {}
    place: dict[str, Place] = {}
    for guid, adapter in adapters.items():
        rates = [rate for _, rate, _ in blocks[guid].ports.values() if rate]
        nics.setdefault(adapter.host, []).append(NicFacts(adapter.name, sum(rates) or None))
        place.setdefault(adapter.host, Place(source, blocks[guid].line))
    return {host: NodeFacts(host, place[host], nics=tuple(cards)) for host, cards in nics.items()}


def _assumptions(
    blocks: dict[str, _Block], adapters: dict[str, _Adapter], links: tuple[LinkFacts, ...], source: str
) -> list[str]:
    sentences = [f"{source}: the first word of an adapter's description is the name of its host"]
    nameless = Counter(
        block.description for guid, block in blocks.items() if block.kind == "Ca" and guid not in adapters
    )
    sentences += [
        f"{source}: {count} of {text!r} passed over: it names no host" for text, count in sorted(nameless.items())
    ]
    unknown = sum(link.bandwidth_bytes_per_s is None for link in links)
    sentences += [f"{source}: {unknown} cables without a rate"] if unknown else []
    return sentences
