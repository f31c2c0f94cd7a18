"""``penstock list``: every name that a request may use is listed, and each listed name can be used."""

from __future__ import annotations

import json

import pytest

from penstock.cli.main import main
from penstock.examples import catalogue
from penstock.facts.device_table import DEVICES
from penstock.planning.inputs import find_profile, find_topology
from penstock.questions.listing import LISTS
from penstock.solvers.planners.catalogue import PLANNERS, resolve
from penstock.solvers.schedules.catalogue import SCHEDULES, schedule_row

pytestmark = pytest.mark.tier("ci")

NAMES = {
    "models": catalogue.profile_names(),
    "clusters": catalogue.cluster_names(),
    "planners": tuple(PLANNERS),
    "schedules": tuple(SCHEDULES),
    "devices": tuple(DEVICES),
}


@pytest.mark.parametrize("what", LISTS)
def test_each_list_has_all_names_with_a_few_words(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", what, "--json"]) == 0
    items = json.loads(capsys.readouterr().out)["items"]
    assert tuple(item["name"] for item in items) == NAMES[what]
    assert all(item["about"] for item in items)
    assert main(["list", what]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")][: len(items)] == list(NAMES[what])


def test_listed_names_can_be_used() -> None:
    for name in NAMES["clusters"]:
        assert find_topology(name).nodes or find_topology(name).uniform
    for name in ("bert-48", "llama-3-8b"):
        assert name in NAMES["models"]
        assert find_profile(name).layers
    assert all(resolve(name).name == name for name in NAMES["planners"])
    assert all(schedule_row(name).name == name for name in NAMES["schedules"])


def test_another_list_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "model"]) == 64
    assert "did you mean 'models'?" in capsys.readouterr().err
