"""The audit of dependencies finds what it is there for."""

from __future__ import annotations

import importlib.util
from email.message import Message
from importlib.metadata import Distribution, distribution
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from repository import ROOT


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", ROOT / ".ci/audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Licensed(Distribution):
    """A distribution with metadata of one's own."""

    def __init__(self, **fields: str) -> None:
        self._fields = {"Name": "some-thing", "Version": "1.0", **fields}

    @property
    def metadata(self) -> Any:
        message = Message()
        for name, value in self._fields.items():
            message[name.replace("_", "-")] = value
        return message

    def read_text(self, filename: str) -> str | None:
        return None

    def locate_file(self, path: Any) -> Any:
        return Path(path)


def test_every_dependency_of_the_project_is_bounded(audit: ModuleType):
    wanted = list(audit.requirements(ROOT / "pyproject.toml"))
    assert len(wanted) > 30
    assert list(audit.unbounded(wanted)) == []
    (fault,) = audit.unbounded([Requirement("thing<3"), Requirement("other>=1"), Requirement("third==2")])
    assert "thing<3 has no lower bound" in fault


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"License_Expression": "MIT AND (Apache-2.0 OR BSD-3-Clause)"}, None),
        ({"Classifier": "License :: OSI Approved :: MIT License"}, None),
        ({"License": "BSD-3-Clause"}, None),
        ({"License_Expression": "AGPL-3.0-only"}, "agpl-3.0-only"),
        ({"License_Expression": "MIT AND GPL-2.0-or-later"}, "gpl-2.0-or-later"),
        ({}, "no licence"),
    ],
)
def test_licences_are_on_the_list(audit: ModuleType, fields: dict[str, str], words: str | None):
    faults = list(audit.unlicensed([Licensed(**fields)]))
    assert bool(faults) == (words is not None)
    if words is not None:
        assert words in faults[0]


def test_what_is_asked_about_is_all_that_the_project_needs(audit: ModuleType):
    pins = audit.closure([Requirement("httpx>=0.28")])
    assert f"httpx=={distribution('httpx').version}" in pins
    assert f"h11=={distribution('h11').version}" in pins, "what httpx needs in turn"
