"""Manifests within the limits of their CustomResourceDefinitions, whose rules an evaluator of CEL checks."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from limits import CEL, LimitedValue, broken, limited_values
from plans import plan_on
from repository import ROOT
from test_kubernetes import EQUAL, KINDS, ODD, RACKS, SITE
from test_meshes_of_manifests import plan_at_tensor

from penstock.manifests import make
from penstock.schemas.ranks.launch import LaunchSettings

sys.path.append(str(ROOT / "scripts"))
from trainers import INSTALLED, RELEASES

EVALUATOR = f"common-expression-language-{RELEASES['common-expression-language'][0]}"
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "any": {"nodes": "any"},
    "odd": ODD,
    "site": SITE,
    "again": {"restarts": 2},
}
SETTINGS_OF = {"volcano": {"highest_tier": 2, "queue": "training"}, "kueue": {"queue": "gpus"}}
LEAST = {"trainjob": 60, "pytorchjob": 20, "jobset": 25, "kueue": 25, "volcano": 60}
"""Values that limits are for, in the manifests of a target: fewer would be a test of nothing."""
BEYOND = {
    "minimum": -1,
    "maxLength": "a" * 2_000_000,
    "minLength": "",
    "maxItems": [{}] * 200,
    "minItems": [],
    "enum": "Sometimes",
    "pattern": "1 Gi:",
}
"""A value for each keyword that none of its limits allows."""


@cache
def manifests(to: str) -> list[dict[str, Any]]:
    """Return the jobs of a target, at degrees and with settings."""
    jobs = []
    for file in (plan_on(EQUAL, switches=RACKS), plan_at_tensor(2), plan_at_tensor(8)):
        for more in VARIANTS.values():
            settings = {
                "model": "m:job",
                "steps": 3,
                "image": "registry.example/train:1",
                **SETTINGS_OF.get(to, {}),
                **more,
            }
            if to == "trainjob":  # whose runtime restarts
                settings.pop("restarts", None)
            [written] = make(file, to, LaunchSettings.parse(settings))
            jobs.append(list(yaml.safe_load_all(written.text))[1])
    return jobs


def values(to: str) -> list[LimitedValue]:
    return [each for job in manifests(to) for each in limited_values(KINDS[to], job)]


@pytest.mark.cases(1)
@pytest.mark.parametrize("to", KINDS)
def test_every_value_is_within_its_limits(to: str) -> None:
    plain_limits = [each for each in values(to) if each.keyword != CEL]
    assert [each[:3] for each in plain_limits if broken(each)] == []
    assert len(plain_limits) >= LEAST[to]


def replaced(value: Any, path: list[str], by: Any) -> Any:
    """Return the value with another one in the first place of a path."""
    if not path:
        return by
    inner = copy.copy(value)
    key = path[0] if path[0] != "*" else (0 if isinstance(value, list) else next(iter(value)))
    inner[key] = replaced(value[key], path[1:], by)
    return inner


@pytest.mark.parametrize("to", KINDS)
def test_each_limit_refuses_what_is_beyond_it(to: str) -> None:
    job = manifests(to)[3]
    places = {(each.path, each.keyword) for each in limited_values(KINDS[to], job) if each.keyword != CEL}
    for path, keyword in places:
        changed = replaced(job, path.split("/"), BEYOND[keyword])
        assert any(broken(each) for each in limited_values(KINDS[to], changed) if each[:2] == (path, keyword)), (
            path,
            keyword,
        )


def evaluated(rules: list[tuple[str, Any]], tier: str) -> list[Any]:
    """Return the results of an evaluator of CEL; without one skip the test, or fail it in the full tier."""
    folder = INSTALLED / EVALUATOR
    if not folder.is_dir():
        (pytest.fail if tier == "everything" else pytest.skip)(f"{EVALUATOR} is not installed: scripts/trainers")
    command = [sys.executable, str(Path(__file__).parent / "cel_rules.py")]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(
        command, input=json.dumps(rules), capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results: list[Any] = json.loads(done.stdout)
    return results


@pytest.mark.tier("ci")
@pytest.mark.parametrize("to", ["trainjob", "jobset", "kueue"])
def test_rules_in_cel_hold(to: str, pytestconfig: pytest.Config) -> None:
    """Rules of a change (``oldSelf``) are left out; PyTorchJob and Volcano's Job have no others."""
    tier = pytestconfig.getoption("tier")
    rules = [(each.limit, each.value) for each in values(to) if each.keyword == CEL]
    assert len(rules) >= len(manifests(to))
    assert set(map(str, evaluated(rules, tier))) == {"True"}


@pytest.mark.tier("ci")
def test_rules_in_cel_refuse(pytestconfig: pytest.Config) -> None:
    tier = pytestconfig.getoption("tier")
    bad = {
        "self.metadata.name.matches": {"metadata": {"name": "9-is-no-letter"}},
        "size(self.metadata.name)": {"metadata": {"name": "a" * 64}},
        "self >= 1": 0,
    }
    limits_in_cel = [each.limit for each in values("trainjob") if each.keyword == CEL]
    rules = [(next(rule for rule in limits_in_cel if rule.startswith(begin)), value) for begin, value in bad.items()]
    assert evaluated(rules, tier) == [False] * len(rules)
    [startup] = {each.limit for each in values("jobset") if each.keyword == CEL}
    policy = {"startupPolicy": {"startupPolicyOrder": "InOrder"}, "replicatedJobs": [{"dependsOn": []}]}
    assert evaluated([(startup, policy)], tier) == [False]
