"""The formats that topologies are imported from, and the import of several sources at once.

A new format is a module with ``read_<format>(text, source) -> SourceFacts`` and a line in ``FORMATS``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import re2

from penstock.importers.cluster.facts import SourceFacts
from penstock.importers.cluster.merging.merge import merge
from penstock.schemas.api.terms import NO_TERMS, Terms
from penstock.schemas.api.topology_import import Format, ImportOptions, ImportSource, TopologyImport, TopologyImported
from penstock.schemas.errors import Fault, InvalidDocument
from penstock.schemas.machine.collector import no_collection

Reader = Callable[..., SourceFacts]
"""The interface of a reader: it takes a text and its name. The reader of topology.yaml also takes a topology's name."""

_LOOKED_AT = 1 << 20
_MORE_EXACT: dict[tuple[Format, ...], Format] = {
    ("slurm-conf", "scontrol-topology"): "scontrol-topology",
    ("slurm-yaml", "scontrol-nodes"): "scontrol-nodes",
    ("k8s-nodes", "hypernodes"): "k8s-nodes",
    ("nvidia-topo", "rocm-topo"): "rocm-topo",
}
"""The format of a text that two patterns match. scontrol adds to the content of topology.conf. Nodes state which
topology they belong to, and are read with their HyperNodes. rocm-smi's matrices have the columns of nvidia-smi's."""


@dataclass(frozen=True)
class KnownFormat:
    """A format: the module of its reader, its description, and a pattern of its texts (RE2: linear in any text)."""

    module: str
    what: str
    tells: Any

    def reader(self, name: Format) -> Reader:
        """Return the function that reads it."""
        module = import_module(f"penstock.importers.cluster.{self.module}")
        read: Reader = getattr(module, f"read_{name.replace('-', '_')}")
        return read


def _format(module: str, what: str, tells: str) -> KnownFormat:
    return KnownFormat(module, what, re2.compile(f"(?im){tells}"))


FORMATS: dict[Format, KnownFormat] = {
    "slurm-conf": _format(
        "slurm.slurm_conf",
        "Slurm's topology.conf: tree, blocks or rings",
        r"^\s*(SwitchName|BlockName|RingName|BlockSizes)\s*=",
    ),
    "slurm-yaml": _format(
        "slurm.slurm_yaml", "Slurm's topology.yaml", r"^(-\s*\{?|)\s*(topology|tree|block|flat|ring|torus3d):"
    ),
    "scontrol-topology": _format(
        "slurm.scontrol_topology",
        "what `scontrol show topology` prints",
        r"^\s*(SwitchName=\S*\s+Level=|(BlockName|AggregatedBlock)=.*\bBlock(Index|Size)=|RingName=.*\bRingSize=)",
    ),
    "scontrol-nodes": _format(
        "slurm.scontrol_nodes",
        "what `scontrol show nodes` prints, text, --json or --yaml",
        r"^\s*NodeName=\S+.*(\n.*){0,40}?\bState=|"
        r'"(gres_used|gres|slurmd_version|slurmd_start_time|tres_used)"\s*:|^[ -]*(gres_used|tres_used):',
    ),
    "ibnetdiscover": _format(
        "ibnetdiscover", "what `ibnetdiscover` prints", r"^(Switch|Ca)\s+[0-9]+\s+\"[HS]-[0-9a-f]+\"|^switchguid="
    ),
    "k8s-nodes": _format(
        "kubernetes.kubernetes_nodes",
        "what `kubectl get nodes -o json` prints (or yaml)",
        r'(^\W*|[{,]\s*)"?kind"?\s*:\s*"?(Node|Pod)(List)?"?\s*(,|\}|$)|\ANAME\s+STATUS\s+ROLES\b',
    ),
    "hypernodes": _format(
        "kubernetes.hypernodes",
        "Volcano HyperNodes, `kubectl get hypernodes -o json`",
        r'"?kind"?\s*:\s*"?HyperNode(List)?\b',
    ),
    "topograph": _format(
        "kubernetes.topograph", "the graph of NVIDIA topograph, JSON", r'"(instances|network_layers)"\s*:'
    ),
    "nvidia-topo": _format("node.nvidia_topo", "what `nvidia-smi topo -m` prints", r"^[\s\x1b\[0-9;m]*GPU0\b.*"),
    "nvidia-query": _format("node.nvidia_query", "what `nvidia-smi -q -x` prints", r"<nvidia_smi_log\b"),
    "nccl-xml": _format("node.nccl_xml", "a topology that NCCL wrote or is given, XML", r"<system\b"),
    "rocm-topo": _format(
        "node.rocm_topo", "what `rocm-smi --showtopo` prints", r"^\s*=+ *(Weight|Link Type) between two GPUs *=+"
    ),
    "agents": _format(
        "agents", "a topology of Penstock's: living agents, `penstock probe`", r'^\W*"?(schema_version|uniform)"?\s*:'
    ),
}


_AMD_SMI = re2.compile(r"(?im)^(ACCESS|WEIGHT|HOPS|LINK TYPE|NUMA BW) TABLE:")


def import_topology(
    sources: Sequence[ImportSource], options: ImportOptions | None = None, *, most_devices: int | None = None
) -> TopologyImported:
    """Build one topology from all sources.

    Raises InvalidDocument for texts that cannot be read, by line and column, and for contradictions, with both places.
    Raises it too for facts that neither sources nor options nor the table have, each with the option that states it.
    Raises UnsupportedRequest for more than ``most_devices``.
    """
    if not sources:
        raise InvalidDocument("there is no source to import", remedy="give a file, a text, or - for standard input")
    options = options or ImportOptions()
    with no_collection():
        read = [_read(number, source, options.topology) for number, source in enumerate(sources)]
        _refuse_topology_alone(sources, options, read[0].format)
        if options.topology is not None and all(facts.format != "slurm-yaml" for facts in read):
            raise InvalidDocument(
                f"no source is a topology.yaml, in which to find the topology {options.topology!r}",
                remedy="add Slurm's topology.yaml, or leave out the name of the topology",
            )
        return merge(read, [source.nodes for source in sources], options, most_devices)


def recognised(source: ImportSource, number: int = 0) -> Format:
    """Return the format of a text. Raises InvalidDocument where no format matches, or several do."""
    if source.format is not None:
        return source.format
    text = source.text[:_LOOKED_AT]
    fitting: list[Format] = [name for name, each in FORMATS.items() if each.tells.search(text)]
    if len(fitting) == 1:
        return fitting[0]
    if tuple(fitting) in _MORE_EXACT:
        return _MORE_EXACT[tuple(fitting)]
    called = source.name or f"source {number + 1}"
    if not text.strip():
        raise InvalidDocument(f"{called} is empty", remedy="look at what the command printed to standard error")
    seen = f"may be {' or '.join(fitting)}" if fitting else "is of no known format"
    faults = tuple(Fault(name, each.what, "format") for name, each in FORMATS.items() if not fitting or name in fitting)
    raise InvalidDocument(f"{called} {seen}", faults=faults, remedy="name the format: --from FORMAT (sources.format)")


def _read(number: int, source: ImportSource, topology: str | None) -> SourceFacts:
    _refuse_unread(source, number)
    name = recognised(source, number)
    reader = FORMATS[name].reader(name)
    called = source.name or f"source {number + 1} ({name})"
    try:
        return reader(source.text, called, topology) if name == "slurm-yaml" else reader(source.text, called)
    except InvalidDocument:
        _refuse_other_format(source, name, called)
        raise


def _refuse_unread(source: ImportSource, number: int) -> None:
    """Refuse by its name what is recognised and not read."""
    if _AMD_SMI.search(source.text[:_LOOKED_AT]):
        raise InvalidDocument(
            f"{source.name or f'source {number + 1}'} is the output of `amd-smi topology`, which Penstock cannot read",
            remedy="give the output of `rocm-smi --showtopo`, or the file that RCCL writes with "
            "NCCL_TOPO_DUMP_FILE=topo.xml",
        )


def _refuse_topology_alone(sources: Sequence[ImportSource], options: ImportOptions, format: str) -> None:
    """Refuse a topology of Penstock's with nothing to add to it. Where its format is given, that is what is meant."""
    if format == "agents" and len(sources) == 1 and sources[0].format is None and options == ImportOptions():
        called = sources[0].name or "source 1"
        raise InvalidDocument(
            f"{called} is already a Penstock topology, and no other source or option changes it",
            remedy=f"use it as it is (--topology {sources[0].name or 'FILE'}), or name its format: --from agents",
        )


def _refuse_other_format(source: ImportSource, name: Format, called: str) -> None:
    """Raise InvalidDocument where the text does not match the stated format, and matches exactly one other."""
    text = source.text[:_LOOKED_AT]
    other = [each for each, entry in FORMATS.items() if entry.tells.search(text)]
    if source.format is None or name in other or len(other) != 1:
        return
    raise InvalidDocument(
        f"{called} is not {FORMATS[name].what}, but {FORMATS[other[0]].what}",
        remedy=f"--from {other[0]} (sources.format), or leave it out",
    ) from None


def answer(request: TopologyImport, terms: Terms = NO_TERMS) -> TopologyImported:
    """Answer a request; the ``agents`` are among its sources already."""
    return import_topology(request.sources, request.options, most_devices=terms.most_devices)
