"""What a solver's process writes comes in chunks, of which large plans need several."""

from __future__ import annotations

import json

import pytest

from penstock.workers.protocol import lines


@pytest.mark.parametrize("size", [1, 7, 64, 10**6])
def test_messages_in_chunks_of_any_size(size: int) -> None:
    """Whole lines only, in order; of incumbents in one chunk the last one."""
    sent = [{"kind": "bound", "bound_ns": n} for n in range(5)]
    text = b"".join(json.dumps(each).encode() + b"\n" for each in sent)
    buffer = bytearray()
    heard = [message for at in range(0, len(text), size) for message in lines(buffer, text[at : at + size])]
    assert heard == sent
    assert not buffer


def test_only_the_last_of_incumbents_that_came_together() -> None:
    """What is overtaken already is not told."""
    kinds = ["incumbent", "incumbent", "bound", "incumbent", "incumbent"]
    text = b"".join(json.dumps({"kind": kind, "number": n}).encode() + b"\n" for n, kind in enumerate(kinds))
    assert [message["number"] for message in lines(bytearray(), text)] == [1, 2, 4]
