"""The output of ``scontrol show nodes``: lines, one per node with ``--oneliner``; or a document, JSON or YAML."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from penstock.importers.cluster.facts import NodeFacts, Place, SourceFacts, SwitchFacts
from penstock.importers.cluster.hostlist import fold_shortly
from penstock.importers.cluster.kubernetes.level_paths import Path, Step, make_switches
from penstock.importers.cluster.slurm.slurm_lines import refuse_other_than_text
from penstock.importers.cluster.slurm.slurm_states import (
    HAS_JOBS,
    MOST_DEVICES,
    Counts,
    devices,
    gres_counts,
    state_words,
    tracked_devices,
    why_not_usable,
)
from penstock.importers.cluster.structured import read_documents
from penstock.importers.lines import Faults

_RECORD = re.compile(r"^[ \t]*+NodeName=", re.MULTILINE)
_YAML = re.compile(r"^nodes:", re.MULTILINE)
_SIGNATURE = re.compile(r"\[[^\[\]@\s]++@[^\[\]\s]++\]")
_LONGEST = 4096
_NONE = ("", "(null)", "N/A", "None")
_TEXTS = ("gres", "gres_used", "tres", "tres_used", "reason", "topology")
_REMEDY = "give the output of `scontrol show nodes`, `scontrol -o show nodes` or `scontrol show nodes --json`"


@dataclass(frozen=True, slots=True)
class _Record:
    """One node as Slurm prints it; None: not printed. ``at``: where in a JSON document."""

    name: str
    place: Place
    states: tuple[str, ...]
    gres: str | None
    gres_used: str | None
    tres: str | None
    tres_used: str | None
    reason: str
    topology: str
    at: str = ""


def read_scontrol_nodes(text: str, source: str = "scontrol show nodes") -> SourceFacts:
    """Read the nodes that Slurm knows: their devices, how many are busy, and why some take no jobs.

    Device types are as Slurm's configuration spells them. Raises InvalidDocument with all faults: what is no output
    of the command, nodes without a state (a text that is cut off) or there twice, resources that cannot be read.
    """
    faults = Faults(f"the nodes {source!r}")
    refuse_other_than_text(text, faults)
    is_document = text.lstrip("\ufeff \t\r\n").startswith(("{", "[")) or _YAML.search(text)
    reader = _Reader(faults, source)
    for record in _document_records(text, source, faults) if is_document else _text_records(text, source, faults):
        reader.read(record)
    faults.stop(_REMEDY)
    return SourceFacts(
        format="scontrol-nodes",
        source=source,
        nodes=reader.nodes,
        switches=reader.switches(),
        assumptions=reader.assumptions(),
    )


class _Reader:
    def __init__(self, faults: Faults, source: str) -> None:
        self.nodes: dict[str, NodeFacts] = {}
        self._faults = faults
        self._source = source
        self._sentences: dict[str, list[str]] = {}
        self._paths: dict[str, Path] = {}
        self._has_tres = False

    def read(self, record: _Record) -> None:
        """Take one node in."""
        before = self.nodes.get(record.name)
        if before is not None:
            where = f"first on line {before.place.line}" if before.place.line else "once before"
            self._fault(record, f"the node {record.name!r} is there twice, {where}", "double")
            return
        if record.name.split() != [record.name] or set(record.name) & set("[],"):
            self._fault(record, f"{record.name[:60]!r} is no name of one node")
            return
        words = state_words(record.states)
        self._has_tres |= record.tres_used is not None
        if not words or (record.tres_used is None and self._has_tres):
            lacks = "AllocTRES, which others have" if words else "State"
            self._fault(record, f"the node {record.name!r} has no {lacks}: is the text cut off?", "missing")
            return
        counts = gres_counts("" if record.gres in _NONE else record.gres or "")
        if counts is None or sum(count for _, count in counts) > MOST_DEVICES:
            detail = (
                f"the node {record.name!r} has the Gres {record.gres!r}: no gpu:type:count of {MOST_DEVICES} at most"
            )
            self._fault(record, detail)
            return
        why = why_not_usable(words)
        total = sum(count for _, count in counts)
        tracked = tracked_devices(record.tres or "")
        if not why and tracked is not None and tracked != total:
            why = f"Gres says {total} devices and CfgTRES {tracked}"
        if why and record.reason not in _NONE:
            why = f"{why} ({record.reason})"
        self._note(record, words, counts)
        self._read_topology(record)
        self.nodes[record.name] = NodeFacts(
            name=record.name,
            place=record.place,
            devices=None if record.gres is None else devices(counts),
            usable=not why,
            why_not_usable=why,
            busy_devices=self._busy(record, words, total),
        )

    def assumptions(self) -> tuple[str, ...]:
        """Return the assumptions about states and resources, with the nodes that they are about."""
        return tuple(
            f"{self._source}: {sentence} ({fold_shortly(names)})" for sentence, names in self._sentences.items()
        )

    def switches(self) -> tuple[SwitchFacts, ...]:
        """Return the switches or blocks that nodes name as the ones above them."""
        return make_switches(self._paths, {name: node.place for name, node in self.nodes.items()})

    def _read_topology(self, record: _Record) -> None:
        """Parse ``name:unit:unit``, outermost first; of several topologies (``,``) the first one."""
        topology, *others = record.topology.split(",")
        name, *units = topology.strip().split(":")
        if not units or record.topology in _NONE:
            return
        if len(units) > 3 and all(unit.isdigit() for unit in units[-3:]):
            self._say(f"the places in the torus {units[0]} are not read; give topology.yaml, too", record)
            return
        if others:
            self._say(f"of several topologies {name} is read", record)
        self._paths[record.name] = tuple(
            Step("switch", len(units) - 1 - depth, unit) for depth, unit in enumerate(units)
        )

    def _busy(self, record: _Record, words: list[str], total: int) -> int:
        """Return the number of busy devices. Without devices it is 1 if something runs: an option may add devices."""
        if {"RESERVED", "RES"}.intersection(words):
            return total or 1
        if not total:
            return int(bool(HAS_JOBS.intersection(words)))
        busy = tracked_devices(record.tres_used or "")
        if busy is None and record.gres_used not in (None, *_NONE):
            busy = sum(count for _, count in gres_counts(record.gres_used or "") or ())
        if busy is not None:
            return min(busy, total)
        tracked = tracked_devices(record.tres or "") is not None
        if tracked or record.tres_used == "" or not HAS_JOBS.intersection(words):
            return 0
        self._say("Slurm does not track gres/gpu here, so that all devices of a node with jobs are taken", record)
        return total

    def _note(self, record: _Record, words: list[str], counts: Counts) -> None:
        if len(counts) > 1:
            self._say("devices are counted in the order of the Gres entries", record)
        if {"RESERVED", "RES"}.intersection(words):
            self._say("the devices of reserved nodes are counted as taken", record)
        if "PLANNED" in words:
            self._say("nodes that Slurm has planned a job for are counted as free until it starts", record)
        if {"POWERED_DOWN", "POWERING_DOWN", "POWER_DOWN"} & set(words):
            self._say("nodes that are powered down are counted as usable: Slurm starts them when a job asks", record)

    def _say(self, sentence: str, record: _Record) -> None:
        self._sentences.setdefault(sentence, []).append(record.name)

    def _fault(self, record: _Record, detail: str, code: str = "invalid") -> None:
        self._faults.add(record.place.line, detail, at=record.at, code=code)


def _text_records(text: str, source: str, faults: Faults) -> Iterator[_Record]:
    text = text.removeprefix("\ufeff")
    starts = [match.start() for match in _RECORD.finditer(text)]
    before = text[: starts[0]] if starts else text
    stray = before.strip("\ufeff \t\r\n").split("\n")[0]
    if stray:
        number = before.count("\n", 0, before.index(stray)) + 1
        faults.add(number, f"{stray.strip()[:60]!r} is before the first NodeName=")
    number, counted = 1, 0
    for start, end in pairwise([*starts, len(text)]):
        number += text.count("\n", counted, start)
        counted = start
        yield _text_record(text[start:end].strip(), Place(source, number))


def _text_record(text: str, place: Place) -> _Record:
    head, _, reason = text.partition(" Reason=")
    reason = reason.partition("\n")[0]
    signature = _SIGNATURE.search(reason)
    return _Record(
        name=text[:_LONGEST].removeprefix("NodeName=").partition(" ")[0].partition("\n")[0].rstrip(),
        place=place,
        states=(_value(head, "State") or "",),
        gres=_value(head, "Gres"),
        gres_used=_value(head, "GresUsed"),
        tres=_value(head, "CfgTRES"),
        tres_used=_value(head, "AllocTRES"),
        reason=reason[: signature.end() if signature else None].strip(),
        topology=_value(text, "Topology") or "",
    )


def _value(text: str, key: str) -> str | None:
    """Return what follows a key, up to the next blank: none of the values that are looked for has one."""
    start = text.find(f" {key}=")
    if start < 0:
        return None
    start += len(key) + 2
    line = text[start : start + _LONGEST]
    return line.split(None, 1)[0] if line[:1].strip() else ""


def _document_records(text: str, source: str, faults: Faults) -> Iterator[_Record]:
    document = (read_documents(text, faults) or [None])[0]
    nodes = document.get("nodes") if isinstance(document, dict) else None
    if not isinstance(nodes, list):
        faults.add(None, "it has no list of nodes under the key nodes", code="missing")
        return
    for index, node in enumerate(nodes):
        at = f"nodes/{index}"
        if not isinstance(node, dict) or not isinstance(node.get("name"), str) or not node["name"].strip():
            faults.add(None, "it is no node with a name", at=at)
            continue
        odd = [key for key in _TEXTS if not isinstance(node.get(key), str | None)]
        states = [*_listed(node.get("state")), *_listed(node.get("state_flags"))]
        if odd or not all(isinstance(state, str) for state in states):
            faults.add(None, f"{odd[0] if odd else 'state'} of {node['name']!r} is no text", at=at)
            continue
        yield _document_record(node, [str(state) for state in states], Place(source), at)


def _document_record(node: dict[str, Any], states: list[str], place: Place, at: str) -> _Record:
    return _Record(
        name=node["name"].strip(),
        place=place,
        states=tuple(states),
        gres=node.get("gres"),
        gres_used=node.get("gres_used"),
        tres=node.get("tres") or "",
        tres_used=node.get("tres_used") or "",
        reason=" ".join((node.get("reason") or "").split()),
        topology=node.get("topology") or "",
        at=at,
    )


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [] if value is None else [value]
