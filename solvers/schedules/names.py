"""The schedules' names in papers and trainers, for users who name one differently."""

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
"""A dict from other names, in small letters without punctuation, to the names here."""


def remedy_for(name: str, schedules: Iterable[str]) -> str | None:
    """Return a question that suggests one of the ``schedules``, or None.

    It is the schedule that has this name elsewhere, or a similar name.
    """
    names = list(schedules)
    schedule = CALLED_ELSEWHERE.get("".join(letter for letter in name.lower() if letter.isalnum()))
    if schedule in names:
        return f"did you mean {schedule!r}? It is what {name} is called here"
    return meant(name.lower(), names)
