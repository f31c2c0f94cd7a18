"""The element that the script of ``assets`` fills with a timeline, with its data or the address of the data."""

from __future__ import annotations

import json
from html import escape
from typing import Any

LOADING = "The timeline is drawn by a script; the tables have what it shows."


def embedded_figure(name: str, data: dict[str, Any]) -> str:
    """Return a figure whose data is in the page itself."""
    return (
        f'<figure class="timeline" data-timeline="{name}"><p class="hint">{LOADING}</p></figure>\n'
        f'<script type="application/json" id="{name}">{_embedded(data)}</script>'
    )


def fetched_figure(address: str) -> str:
    """Return a figure whose data the script fetches; finer parts of it with ``?from=&to=&columns=``."""
    return f'<figure class="timeline" data-timeline-src="{escape(address)}"><p class="hint">{LOADING}</p></figure>'


def _embedded(data: dict[str, Any]) -> str:
    """Return JSON that no HTML parser can mistake for markup."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c").replace("&", "\\u0026")
