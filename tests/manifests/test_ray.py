"""The script for Ray: it calls what Ray documents, asks for the plan's nodes, and runs their ranks.

On Ray itself it runs in ``test_ray_runs.py``; here it is loaded with a ``ray`` that only marks functions.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from plans import plan_on

from penstock.manifests import make
from penstock.schemas.ranks.launch import LaunchSettings

DOCUMENTED = {
    "placement_group": {"bundles", "strategy", "name", "lifetime", "bundle_label_selector", "topology_strategy"},
    "PlacementGroupSchedulingStrategy": {
        "placement_group",
        "placement_group_bundle_index",
        "placement_group_capture_child_tasks",
    },
}
"""Keyword arguments, from docs.ray.io: ray.util.placement_group and ray.util.scheduling_strategies (2.49 and later)."""


def files(used: dict[str, int], **more: Any) -> dict[str, str]:
    settings = LaunchSettings.parse({"model": "m:job", "steps": 3, **more})
    return {each.name: each.text for each in make(plan_on(used), "ray", settings)}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The exported script as a module."""
    for name in ("ray", "ray.util", "ray.util.placement_group", "ray.util.scheduling_strategies"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["ray"].remote = lambda **_: lambda function: function  # type: ignore[attr-defined]
    sys.modules["ray.util"].get_node_ip_address = lambda: "10.0.0.1"  # type: ignore[attr-defined]
    sys.modules["ray.util.placement_group"].__dict__.update(placement_group=None, remove_placement_group=None)
    sys.modules["ray.util.scheduling_strategies"].__dict__.update(PlacementGroupSchedulingStrategy=SimpleNamespace)
    path = tmp_path / "ray_job.py"
    path.write_text(files({"a": 1})["ray_job.py"])
    spec = importlib.util.spec_from_file_location("ray_job", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rays_functions_are_called_as_documented() -> None:
    calls = [node for node in ast.walk(ast.parse(files({"a": 1})["ray_job.py"])) if isinstance(node, ast.Call)]
    seen = {}
    for call in calls:
        if isinstance(call.func, ast.Name) and call.func.id in DOCUMENTED:
            assert not call.args
            seen[call.func.id] = {keyword.arg for keyword in call.keywords}
    assert seen.keys() == DOCUMENTED.keys()
    assert all(arguments <= DOCUMENTED[name] for name, arguments in seen.items())


def test_a_bundle_per_node_in_the_order_of_the_stages(script: Any) -> None:
    launch = json.loads(files({"b": 1, "a": 3})["launch.json"])
    assert script.wanted(launch["nodes"]) == "1 times 1 CPU, 1 GPU; 1 times 3 CPU, 3 GPU"
    assert [(node["name"], node["ranks"], node["stages"]) for node in launch["nodes"]] == [
        ("b", [0], [0]),
        ("a", [1, 2, 3], [1, 2, 3]),
    ]
    assert [node["resources"] for node in launch["nodes"]] == [{"CPU": 1, "GPU": 1}, {"CPU": 3, "GPU": 3}]


def test_named_nodes_are_asked_for_by_their_ids(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"NodeManagerHostname": name, "NodeID": f"id-{name}", "Alive": name != "c"} for name in "abc"]
    monkeypatch.setattr(script.ray, "nodes", lambda: nodes, raising=False)
    assert script.selectors(json.loads(files({"b": 1, "a": 1})["launch.json"])) == [
        {"ray.io/node-id": "id-b"},
        {"ray.io/node-id": "id-a"},
    ]
    assert script.selectors(json.loads(files({"b": 1}, nodes="any")["launch.json"])) is None
    with pytest.raises(SystemExit, match="the plan runs on c, and Ray has only a, b"):
        script.selectors(json.loads(files({"c": 1, "a": 1})["launch.json"]))


def run_node(script: Any, *arguments: Any) -> None:
    """Start the ranks of a node, as processes."""
    script.run_node(*arguments)


@pytest.mark.tier("ci")
def test_ranks_get_their_places_and_the_first_that_fails_ends_the_others(script: Any, tmp_path: Path) -> None:
    program = tmp_path / "rank.py"
    program.write_text(
        "import os, sys, time\n"
        "names = 'RANK', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT', 'OWN'\n"
        f"out = open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w')\n"
        "print(*[os.environ[name] for name in names], *sys.argv[1:2], *sys.argv[3:], file=out, flush=True)\n"
        "if 'fail' in sys.argv: time.sleep(100) if os.environ['RANK'] == '1' else sys.exit(3)\n"
    )
    command = f"'{sys.executable}' '{program}'"
    launch = json.loads(files({"b": 1, "a": 2}, command=command, environment=["OWN=x y"])["launch.json"])
    assert script.meeting_place(None)[1] > 0
    run_node(script, launch, 1, "{}", ("10.0.0.1", 1234))
    options = "--node a --job m:job --steps 3"
    assert (tmp_path / "1").read_text() == f"1 0 2 3 10.0.0.1 1234 x y rank {options}\n"
    assert (tmp_path / "2").read_text() == f"2 1 2 3 10.0.0.1 1234 x y rank {options}\n"
    launch["options"].append("fail")
    with pytest.raises(RuntimeError, match="rank 2 ended with 3"):
        run_node(script, launch, 1, "{}", ("10.0.0.1", 1234))
