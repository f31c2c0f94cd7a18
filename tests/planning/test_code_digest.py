"""The digest of the code that answers depend on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from repository import ROOT

from penstock.planning.code_digest import ROOMS, code_digest, digest_of

pytestmark = pytest.mark.tier("quick")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for room in ROOMS:
        folder = ROOT / room if (ROOT / room).exists() else ROOT / "src" / "penstock" / room
        shutil.copytree(folder, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_a_copy_has_the_same_digest(package: Path) -> None:
    assert digest_of(package) == code_digest()
    (package / "planning" / "__pycache__").mkdir()
    (package / "planning" / "__pycache__" / "solve.pyc").write_bytes(b"compiled")
    assert digest_of(package) == code_digest()


@pytest.mark.parametrize("room", ROOMS)
def test_each_room_counts(package: Path, room: str) -> None:
    (package / room / "__init__.py").write_text("changed = True\n")
    assert digest_of(package) != code_digest()


def test_a_renamed_file_counts(package: Path) -> None:
    (package / "planning" / "pareto.py").rename(package / "planning" / "other.py")
    assert digest_of(package) != code_digest()
