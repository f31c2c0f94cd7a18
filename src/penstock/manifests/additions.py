"""A site's additions to every pod: parts of its spec and of its container, merged as ``kubectl patch`` would."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.schemas.errors import Fault, InvalidDocument

Manifest = dict[str, Any]

OWN_OF_PODS = {
    "affinity": "it says which pod runs on which node; `nodeSelector` and `tolerations` leave that alone",
    "containers": "the setting `container` is for the one that there is",
    "hostname": "pods find each other by it",
    "subdomain": "pods find each other by it",
    "restartPolicy": "it follows from `restarts`",
}
OWN_OF_CONTAINERS = {
    "name": "controllers look for it",
    "image": "there is the setting `image`",
    "command": "it starts the ranks; `command` and `directory` are settings of their own",
    "args": "the command has them",
}
"""The fields that may not be added to a pod or a container, and why."""


def pod_additions(text: str | None) -> Manifest:
    """Return the additions to every pod's spec. Raises InvalidDocument for a field that may not be set."""
    return _free(text, "pod", OWN_OF_PODS)


def container_additions(text: str | None) -> Manifest:
    """Return the additions to every pod's container. Raises InvalidDocument for a field that may not be set."""
    return _free(text, "container", OWN_OF_CONTAINERS)


def refuse_others(additions: Mapping[str, Any], setting: str, possible: frozenset[str], to: str) -> None:
    """Raise InvalidDocument naming additions that the target has no place for."""
    idle = sorted(additions.keys() - possible)
    if idle:
        raise InvalidDocument(
            f"{to} cannot add {', '.join(idle)} to a {setting}; it can add {', '.join(sorted(possible))}",
            faults=tuple(Fault(f"/{setting}/{key}", f"{to} has no place for it") for key in idle),
            remedy="set it in the training runtime, or export another form, such as `--to jobset`",
        )


def merged(base: Any, more: Any) -> Any:
    """Merge ``more`` into ``base``: objects by key, lists of named things by name, other lists by concatenation.

    Where neither is possible, ``more`` takes precedence.
    """
    if isinstance(base, dict) and isinstance(more, dict):
        both = base | more
        return {key: merged(base[key], more[key]) if key in base and key in more else both[key] for key in both}
    if isinstance(base, list) and isinstance(more, list):
        key = next((key for key in ("mountPath", "name") if all(_has(one, key) for one in [*base, *more])), None)
        if key is None:
            return [*base, *more]
        named = merged({one[key]: one for one in base}, {one[key]: one for one in more})
        return list(named.values())
    return more


def _free(text: str | None, setting: str, reserved: Mapping[str, str]) -> Manifest:
    additions: Manifest = {} if text is None else json.loads(text)
    refused = [key for key in additions if key in reserved]
    if refused:
        raise InvalidDocument(
            f"the setting `{setting}` cannot change what starts the ranks",
            faults=tuple(Fault(f"/{setting}/{key}", reserved[key]) for key in refused),
        )
    return additions


def _has(one: Any, key: str) -> bool:
    return isinstance(one, dict) and key in one
