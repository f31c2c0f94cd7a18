"""schemathesis finds nothing on the routes of a real service; ``scripts/fuzz`` looks for longer."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz_routes import fuzz_routes

pytestmark = pytest.mark.tier("nightly")


def test_schemathesis_finds_nothing(tmp_path: Path):
    code, report = fuzz_routes(tmp_path, examples=2, seed=1, limit_s=10)
    assert code == 0, report
    assert "Coverage" in report
