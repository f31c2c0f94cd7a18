"""The versions of torch under which ranks run, and the warnings about others."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from penstock.executor.torch_versions import NEEDED, TRIED, refuse_unfit_torch, untried
from penstock.schemas.errors import UnsupportedRequest


def test_this_torch_and_those_that_were_tried_are_taken() -> None:
    refuse_unfit_torch()
    for version in (torch.__version__, *TRIED):
        refuse_unfit_torch(version)
        assert untried(version) is None


@pytest.mark.parametrize("version", ["2.8.0", "2.8.0+cu128", "1.13.1", "2.9.0a0+git1234"])
def test_an_older_torch_is_refused(version: str) -> None:
    with pytest.raises(UnsupportedRequest) as refused:
        refuse_unfit_torch(version)
    assert refused.value.detail == f"torch {version} is too old: ranks need 2.9 or newer"
    assert refused.value.remedy is not None
    assert all(one in refused.value.remedy for one in TRIED)


def test_a_torch_that_dropped_what_it_does_not_document_is_refused() -> None:
    with pytest.raises(UnsupportedRequest, match=r"^torch 2\.99\.0 lacks torch\._C\._no_such, which ranks need"):
        refuse_unfit_torch("2.99.0", (*NEEDED, "_C._no_such"))


@pytest.mark.parametrize("version", ["2.9.0", "2.11.0+cu130", "2.13.7"])
def test_other_builds_of_what_was_tried_need_no_word(version: str) -> None:
    assert untried(version) is None


@pytest.mark.parametrize("version", ["2.99.0", "3.0.0+cpu", "2.140.1"])
def test_an_untried_torch_is_named(version: str) -> None:
    warning = untried(version)
    assert warning is not None
    assert warning.startswith(f"Penstock was not tried with torch {version}, but with {', '.join(TRIED)}")


@pytest.mark.tier("quick")
def test_the_extra_takes_what_was_tried_and_no_more() -> None:
    about = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = about["optional-dependencies"]["executor"]
    allowed = next(one.specifier for one in map(Requirement, extra) if one.name == "torch")
    installed = Requirement((Path(__file__).parents[2] / "lock/torch.txt").read_text().strip()).specifier
    assert all(one in allowed for one in TRIED)
    assert "2.8.0" not in allowed
    major, minor = TRIED[-1].split(".")[:2]
    assert f"{major}.{int(minor) + 1}.0" not in allowed
    assert any(one in installed for one in TRIED)
