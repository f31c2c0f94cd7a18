"""The configuration that a trainer prints in its log when it starts.

Lines keep their numbers, so that faults name the line of the log.
"""

from __future__ import annotations

import json
import re

PREFIX = re.compile(r"(?m)^\[(?:default|rank)?[0-9]+\]:")
"""A launcher's mark of the process that wrote a line."""


def printed_json(text: str, before: re.Pattern[str]) -> str:
    """Return a text with nothing but the last JSON object that follows ``before``; without one, as it is."""
    places = [match.end() for match in before.finditer(text)]
    if not places:
        return text
    plain = PREFIX.sub(lambda match: " " * len(match[0]), text)
    try:
        _data, end = json.JSONDecoder().raw_decode(plain, places[-1])
    except (ValueError, RecursionError):
        return text
    return re.sub(r"[^\n]", " ", plain[: places[-1]]) + plain[places[-1] : end]
