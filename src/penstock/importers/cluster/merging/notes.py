"""The notes of an import beside its topology: assumptions, nodes left out, and missing facts."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.importers.cluster.hostlist import fold
from penstock.schemas.api.topology_import import LeftOut
from penstock.schemas.errors import Fault, InvalidDocument

_LONGEST = 200


class Notes:
    """Sentences about nodes; a sentence about many nodes appears once, with a hostlist."""

    def __init__(self) -> None:
        self._general: list[str] = []
        self._of_nodes: dict[str, list[str]] = {}
        self._left_out: dict[str, list[str]] = {}
        self._missing: dict[tuple[str, str], list[str]] = {}

    def assume(self, sentence: str, nodes: Iterable[str] = ()) -> None:
        """Note an assumption that no source states; of these nodes, or of the whole."""
        nodes = list(nodes)
        if nodes:
            self._of_nodes.setdefault(sentence, []).extend(nodes)
        elif sentence not in self._general:
            self._general.append(sentence)

    def leave_out(self, node: str, why: str) -> None:
        """Note a node that is no part of the topology."""
        self._left_out.setdefault(why, []).append(node)

    def miss(self, what: str, option: str, nodes: Iterable[str]) -> None:
        """Note a fact of these nodes that is missing, and the option that states it."""
        self._missing.setdefault((what, option), []).extend(nodes)

    def stop_if_missing(self) -> None:
        """Raise InvalidDocument with all that is missing, of which nodes, and how to say it."""
        if not self._missing:
            return
        faults = tuple(
            Fault(shown(nodes), f"{what} is unknown; give {option}", "missing")
            for (what, option), nodes in self._missing.items()
        )
        options = " ".join(dict.fromkeys(option.split(" (")[0] for _, option in self._missing))
        count = len(faults)
        raise InvalidDocument(
            f"{count} fact{'s are' if count > 1 else ' is'} missing from the sources and the table of devices",
            faults=faults,
            remedy=options,
        )

    def left_out(self) -> tuple[LeftOut, ...]:
        """Return the nodes by the reason why they are left out, the most frequent reason first."""
        groups = sorted(self._left_out.items(), key=lambda each: (-len(each[1]), each[0]))
        return tuple(LeftOut(nodes=shown(nodes), count=len(nodes), why=why) for why, nodes in groups)

    def assumptions(self, all_nodes: Iterable[str]) -> tuple[str, ...]:
        """Return all sentences; a sentence about every node does not list them."""
        everybody = set(all_nodes)
        return (*self._general, *(_of(nodes, sentence, everybody) for sentence, nodes in self._of_nodes.items()))


def _of(nodes: list[str], sentence: str, everybody: set[str]) -> str:
    here = [node for node in nodes if node in everybody]
    if len(here) == len(everybody) or not here:
        return sentence
    text = shown(here)
    return f"{text if len(text) <= _LONGEST else f'{len(here)} nodes, {here[0]} among them'}: {sentence}"


def shown(nodes: Iterable[str]) -> str:
    """Return the nodes as a hostlist; names that no hostlist can have are listed."""
    try:
        return fold(nodes)
    except InvalidDocument:
        return ", ".join(dict.fromkeys(nodes))
