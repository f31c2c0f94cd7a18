"""``penstock place``, several jobs, and what is said where nothing fits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from random_clusters import request

from penstock.cli.main import main
from penstock.placing import answer
from penstock.schemas.api.placement import PlacementRequest
from penstock.solvers.placement.choice import Chooser

pytestmark = pytest.mark.tier("ci")

ASK = ("place", "--example", "gpt2-small", "--cluster", "3x2xV100", "-b", "8", "--planner", "gpipe", "--max-plans", "4")


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main([*ASK, *arguments])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_the_answer_is_text_json_a_hostlist_or_a_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    code, out, _err = run_command(capsys, "--nodes", "2", "--busy", "node1", "--hostlist", "-o", str(plan))
    assert (code, out) == (0, "node[0,2]\n")
    assert main(["verify", str(plan)]) == 0
    code, out, _err = run_command(capsys, "--nodes", "1-2", "--explain")
    assert code == 0
    assert "proven: no set of the 2 classes of sets examined, which are all of them, can reach more than" in out
    code, out, _err = run_command(capsys, "--free", "node2/1", "--json")
    choice = json.loads(out)["choices"][0]
    assert (code, choice["devices"]) == (0, ["node2/1"])


def test_private_channels_are_no_links_between_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    """A channel has the number of its edge; some link of the shared network has the same number."""
    outputs = [
        run_command(capsys, "--nodes", "2", "--explain", "--network", network)[1] for network in ("shared", "private")
    ]
    assert ["the busiest link between nodes" in out for out in outputs] == [True, False]


def test_what_a_scheduler_prints_says_what_is_free(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    states = {"node0": "IDLE", "node1": "IDLE+DRAIN", "node2": "ALLOCATED", "login": "IDLE"}
    allocated = {"node2": "cpu=4,gres/gpu=2"}
    (tmp_path / "nodes.txt").write_text(
        "".join(
            f"NodeName={name} Arch=x86_64 CoresPerSocket=2\n   Gres=gpu:2\n   State={state} Reason=disk\n"
            f"   CfgTRES=cpu=4,gres/gpu=2\n   AllocTRES={allocated.get(name, '')}\n\n"
            for name, state in states.items()
        )
    )
    code, out, err = run_command(capsys, "--nodes-from", str(tmp_path / "nodes.txt"), "--hostlist")
    assert (code, out) == (0, "node0\n"), err
    code, _out, err = run_command(capsys, "--nodes-from", str(tmp_path / "nodes.txt"), "--free", "node0")
    assert code == 64
    assert "give one of --free, --nodes-from" in err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--free", "node[1-5]"), 65, "'node3' is neither a node nor a device"),
        (("--free", "nod1"), 65, "did you mean 'node1'"),
        (("--nodes", "many"), 64, "'many' is not a number of nodes"),
        (("--nodes", "3-2"), 65, "min 3 is more than max 2"),
        (("--nodes", "4-"), 65, "needs at least 4 nodes, and 3 are free"),
        (("--busy", "node[0-2]"), 1, "no device of '3x2xV100' is free"),
        (("--max-price", "5"), 65, "devices without a price"),
        (("--objective", "fastest"), 65, "objective"),
        (("--time-limit", "0"), 64, "not between 1ns and 11d"),
        (("--deadline", "nan"), 64, "is not a duration"),
        (("--nodes-from", sys.executable), 65, "has no known format, and does not say which nodes are free"),
        (("--request", __file__), 64, "leave out --example, --cluster, --global-batch-size, --max-plans, --planner"),
    ],
)
def test_what_cannot_be_asked(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, words: str
) -> None:
    status, _out, err = run_command(capsys, *arguments)
    assert status == code
    assert words in err
    assert "Traceback" not in err


def _of(placement_request: PlacementRequest, **fields: Any) -> PlacementRequest:
    data = placement_request.model_dump(mode="json", exclude_none=True)
    data["jobs"] = [data["jobs"][0] | fields]
    return PlacementRequest.parse(data)


@pytest.mark.tier("nightly")
def test_a_budget_that_fits_nothing_names_the_least_that_does() -> None:
    placement_request = _of(request(0, planner="dapple"), memory={"optimizer": "sgd", "headroom_bytes": 400_000_000})
    assert answer(placement_request).choices[0].status == "placed"
    (choice,) = answer(_of(placement_request, budget={"devices": 1})).choices
    assert choice.status == "infeasible"
    assert "bytes) are missing" in choice.why[0]
    assert "the smallest set found without these limits is" in " ".join(choice.why)
    (choice,) = answer(_of(placement_request, nodes={"min": 2}, budget={"devices": 1})).choices
    assert choice.why[0] == "the budget allows no set of 2 nodes with a device on each"
    (choice,) = answer(_of(placement_request, budget={"price_per_hour": 0.5})).choices
    assert "the cheapest free device costs 1 per hour" in choice.why[0]
    (choice,) = answer(_of(placement_request, budget={"time_per_global_batch_ns": 1})).choices
    assert "the fastest that was found takes" in choice.why[0]


@pytest.mark.tier("quick")
def test_what_others_have_taken_is_an_answer_of_one_job_only() -> None:
    data = request(0, planner="dapple").model_dump(mode="json", exclude_none=True)
    job = data["jobs"][0]
    data["jobs"] = [job | {"name": "a", "nodes": {"min": 3, "max": 3}}, job | {"name": "b", "nodes": {"min": 2}}]
    first, second = answer(PlacementRequest.parse(data)).choices
    assert (first.status, second.status) == ("placed", "infeasible")
    assert second.why == (
        "because of the other jobs: /jobs/1/nodes/min: the job 'b' needs at least 2 nodes, and 1 is free for it",
    )


@pytest.mark.cases(1)
@pytest.mark.tier("quick")
@pytest.mark.parametrize("seed", range(3))
def test_jobs_share_no_device_and_jointly_they_do_at_least_as_much(seed: int) -> None:
    data = request(seed, planner="dapple").model_dump(mode="json", exclude_none=True)
    job, worth = data["jobs"][0], {}
    data["jobs"] = [job | {"name": "a", "nodes": {"max": 3}}, job | {"name": "b", "weight": 3}]
    for together in ("priority", "joint"):
        result = answer(PlacementRequest.parse(data | {"together": together}))
        used = [device for choice in result.choices for device in choice.devices]
        assert len(used) == len(set(used))
        assert [choice.job for choice in result.choices] == ["a", "b"]
        assert result.method.startswith("jointly" if together == "joint" else "jobs in the order")
        a, b = (choice.samples_per_s or 0.0 for choice in result.choices)
        worth[together] = a + 3 * b
    assert worth["joint"] >= worth["priority"]


def test_an_interrupt_keeps_the_best_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_chooser: Chooser) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(Chooser, "_ask", interrupted)
    command = ["place", "--cluster", "2x2xV100", "-b", "8"]
    for example in ("resnet-50", "gpt2-small"):  # without a choice of degrees, and with one
        kept = tmp_path / f"{example}.json"
        assert main([*command, "--example", example, "-o", str(kept)]) == 130
        assert f"is written to {kept}" in capsys.readouterr().out
        assert main(["verify", str(kept)]) == 0
    assert main([*command, "--example", "resnet-50"]) == 130
    assert "is lost: -o FILE would have kept it" in capsys.readouterr().out
