"""Roles of a profile's layers for transformer trainers: embedding, transformer layers and head."""

from __future__ import annotations

import re
from typing import NamedTuple

from penstock.schemas.errors import Fault, InvalidDocument
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import PlanRequest

EMBEDDING = ("embed", "wte", "wpe")
MTP = ("mtp", "multi_token", "multi-token", "nextn")
"""Words in the names of layers of multi-token prediction."""
HEAD = ("head", "logit", "loss", "classifier", "prediction", "lm_output", "norm", "linear")
OPTION = "transformer"
"""The planners' option that states the transformer layers (FIRST-LAST)."""


class Roles(NamedTuple):
    """Transformer layers ``first`` to ``last``; before them is the embedding, ``after`` layers come after them.

    ``mtp`` is the number of layers of multi-token prediction, which come first after them. The other layers after them
    are head and loss.
    """

    first: int
    last: int
    after: int
    assumption: str
    mtp: int = 0

    @property
    def number(self) -> int:
        """The number of transformer layers."""
        return self.last - self.first + 1


def roles_of(profile: ModelProfile, stated: str = "") -> Roles | None:
    """Return the roles as ``stated`` (``FIRST-LAST``), or by kinds and names; None where these do not determine them.

    Raises InvalidDocument for a range outside the chain, or one that leaves no embedding or no head.
    """
    if stated:
        return _stated(profile, stated)
    labels = [f"{layer.kind} {layer.name}".lower() for layer in profile.layers]
    first = next((i for i, words in enumerate(labels) if not any(word in words for word in EMBEDDING)), len(labels))
    after = next((i for i in range(first, len(labels)) if _is_mtp(labels[i]) or _is_head(labels[i])), len(labels))
    head = next((i for i in range(after, len(labels)) if not _is_mtp(labels[i])), len(labels))
    if (
        not 0 < first < after < len(labels)
        or head == len(labels)
        or any(not _is_head(words) for words in labels[head:])
    ):
        return None
    names = [layer.name for layer in profile.layers]
    return Roles(
        first,
        after - 1,
        len(labels) - after,
        f"by their names, layers {first}–{after - 1} ({names[first]} … {names[after - 1]}) are the transformer "
        f"layers, those before them the embedding, those after them "
        + ("head and loss" if head == after else f"{head - after} × multi-token prediction, head and loss"),
        head - after,
    )


def transformer_of(request: PlanRequest) -> str:
    """Return the transformer layers that a request states, no text by default."""
    return str(request.options.get(OPTION, ""))


def _is_head(words: str) -> bool:
    return any(word in words for word in HEAD)


def _is_mtp(words: str) -> bool:
    return any(word in words for word in MTP)


def _stated(profile: ModelProfile, stated: str) -> Roles:
    match = re.fullmatch(r"\s*(\d{1,9})\s*-\s*(\d{1,9})\s*", stated)
    most = len(profile.layers) - 1
    if match is None or not 0 < int(match[1]) <= int(match[2]) < most:
        raise InvalidDocument(
            f"{stated!r} is not a range of transformer layers of the profile {profile.name!r}, whose layers are "
            f"0…{most}",
            faults=(Fault(f"/options/{OPTION}", stated),),
            remedy=f"FIRST-LAST with an embedding before and a head after, such as 1-{most - 1}",
        )
    first, last = int(match[1]), int(match[2])
    labels = [f"{layer.kind} {layer.name}".lower() for layer in profile.layers[last + 1 : -1]]
    mtp = next((i for i, words in enumerate(labels) if not _is_mtp(words)), len(labels))
    return Roles(first, last, most - last, f"layers {match[1]}–{match[2]} are the transformer layers, as stated", mtp)
