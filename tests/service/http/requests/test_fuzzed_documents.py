"""A thousand documents that are almost good: each is answered or refused with a reason. ``scripts/fuzz`` sends more."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fuzz_documents import fuzz

pytestmark = pytest.mark.tier("nightly")

SEED = 1
COUNT = 1000


def test_no_mutated_document_is_answered_with_a_fault_of_the_service(tmp_path: Path):
    findings = asyncio.run(fuzz(SEED, COUNT, tmp_path))
    assert findings.bad == []
    assert sum(findings.answers.values()) == COUNT
    assert findings.answers[422] > COUNT / 3, "mutations that change nothing find nothing"
    assert findings.answers.keys() >= {200, 201, 202, 415, 422}
