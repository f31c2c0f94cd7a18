"""JSON without what differs from run to run: times of the clock, ids and versions; hashes and ids become names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

CLOCK = frozenset({"seconds", "at", "created_at", "started_at", "finished_at", "updated_at"})
VARIABLE = CLOCK | {"versions", "request_id"}
"""Fields whose values say when, where or by which versions of other packages something was done."""
IDENTITY = re.compile(r"sha256:[0-9a-f]{64}|\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b")


class Normaliser:
    """A namer of hashes and ids: named ones get their names, others numbers in the order of appearance."""

    def __init__(self, name_to_value: Mapping[str, str]) -> None:
        self._names = {value: f"<{name}>" for name, value in name_to_value.items()}

    def text(self, text: str) -> str:
        """Return the text with names in place of hashes and ids."""
        return IDENTITY.sub(lambda match: self._name(match[0]), text)

    def document(self, value: Any) -> Any:
        """Return the document with names in place of hashes and ids, and a mark where a field's value varies."""
        if isinstance(value, dict):
            return {
                self.text(key): "<varies>" if key in VARIABLE and each is not None else self.document(each)
                for key, each in value.items()
            }
        if isinstance(value, list):
            return [self.document(each) for each in value]
        return self.text(value) if isinstance(value, str) else value

    def _name(self, identity: str) -> str:
        return self._names.setdefault(identity, f"<identity {len(self._names) + 1}>")
