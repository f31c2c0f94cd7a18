"""The schedules' names in papers and trainers, for users who ask for one by another name."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.schemas.errors import meant

CALLED_ELSEWHERE = {
    "1f1b": "early-backward",
    "onefoneb": "early-backward",
    "pipedreamflush": "early-backward",
    "dapple": "early-backward",
    "fillanddrain": "gpipe",
    "filldrain": "gpipe",
    "afab": "gpipe",
    "fthenb": "gpipe",
    "allforwardallbackward": "gpipe",
    "interleaved1f1b": "interleaved",
    "virtualpipeline": "interleaved",
    "vpp": "interleaved",
    "bfs": "looped-bfs",
    "loopedbfs": "looped-bfs",
    "zerobubble": "zb-h1",
    "zb1p": "zb-h1",
    "zb2p": "zb-h2",
    "zbv": "zb-v",
    "zbvzerobubble": "zb-v",
}
"""Other names in small letters without marks, and ours."""


def remedy_for(name: str, known: Iterable[str]) -> str | None:
    """Return the question which ``known`` schedule was meant: one with this name elsewhere, or with a similar name."""
    names = list(known)
    own = CALLED_ELSEWHERE.get("".join(letter for letter in name.lower() if letter.isalnum()))
    if own in names:
        return f"did you mean {own!r}? It is what {name} is called here"
    return meant(name.lower(), names)
