"""Names in manifests: generated names are made legal, names with a meaning are refused where they are not."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

from penstock.schemas.errors import UnsupportedRequest

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_KUBERNETES = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_DIGITS_OF_HASH = 8


def legal(name: str, longest: int) -> str:
    """Return a name of lower-case letters, digits and hyphens that begins with a letter, at most ``longest`` long.

    A name that was changed or shortened gets a hash of the original as suffix, so that names stay distinct.
    """
    result = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not result or not result[0].isalpha():
        result = f"job-{result}".rstrip("-")
    if result == name and len(result) <= longest:
        return result
    digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGITS_OF_HASH]
    return f"{result[: longest - _DIGITS_OF_HASH - 1].rstrip('-')}-{digest}"


def refuse_hosts(names: Iterable[str], to: str) -> None:
    """Raise UnsupportedRequest naming the first that is no valid host name; in a file it might have another meaning."""
    _refuse(names, _HOST, 255, to, "a host's name has letters, digits, '.', '-' and '_'")


def refuse_kubernetes_nodes(names: Iterable[str], to: str) -> None:
    """Raise UnsupportedRequest naming the first that is no valid node name of Kubernetes."""
    _refuse(names, _KUBERNETES, 253, to, "a Kubernetes node name has lower-case letters, digits, '-' and '.'")


def _refuse(names: Iterable[str], form: re.Pattern[str], longest: int, to: str, rule: str) -> None:
    for name in names:
        if form.fullmatch(name) is None or len(name) > longest:
            shown = name if len(name) <= 100 else name[:100] + "…"
            raise UnsupportedRequest(
                f"{to} cannot name the plan's node {shown!r}: {rule}, at most {longest} characters",
                remedy="plan for a topology with the nodes' real names, or nodes=any (--nodes any) where the target "
                "has that",
            )
