"""Transports are decided when a plan is lowered, and every surface keeps to what its programs carry."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.examples.tiny import tiny_request
from penstock.executor.launched.environment import Launch
from penstock.executor.launched.process import Orders, Process
from penstock.executor.node.agent_state import Offer, State
from penstock.executor.node.state import step
from penstock.executor.node.stimuli import CHECK, ChildMessage, Start, Synced
from penstock.executor.run import unattended
from penstock.executor.run.rank_programs import Work, common_transports
from penstock.executor.transport.choice import AUTO, Place, choose
from penstock.planning.programs.bundles import make_bundle
from penstock.planning.programs.lower import programs
from penstock.planning.programs.lowered import lower
from penstock.questions.solve import solve
from penstock.schemas.api.agents import Assignment, RankPrograms, SyncReply, digest_of
from penstock.schemas.errors import InvalidPlan, PenstockError, UnsupportedRequest
from penstock.schemas.plan import PlanFile
from penstock.schemas.program import TRANSPORTS, Program
from penstock.schemas.ranks.bundle import JobBundle
from penstock.schemas.request import PlanRequest
from penstock.solvers.lowering import check_programs

BACKWARDS = [{"devices": ["node0/0"], "text": "F0:4 B0:4"}, {"devices": ["node1/0"], "text": "(F3)*4-1 B0:4"}]
"""Two stages, of which the second runs its forwards in another order than they arrive in."""

TWO_GPUS = ("GPU-1", "GPU-2")


def planned(kind: str = "V100", **more: Any) -> PlanFile:
    """Return a plan of the tiny request on devices of one kind."""
    data = json.loads(json.dumps(tiny_request() | {"planner": "gpipe"} | more).replace('"V100"', json.dumps(kind)))
    request = PlanRequest.parse(data)
    plan = solve(request).plan
    assert plan is not None
    return PlanFile(plan=plan, request=request)


def out_of_order(kind: str = "V100") -> PlanFile:
    """Return a plan whose usual order of receives does not suit NCCL."""
    file = planned(kind, global_batch_size=4)
    plan = file.plan.model_dump(mode="json", exclude={"prediction"})
    plan["schedule"] = {"name": "gpipe", "rows": BACKWARDS}
    return PlanFile.parse({"plan": plan, "request": file.request})


def coded() -> PlanFile:
    """Return a plan that encodes what crosses its cuts."""
    speeds = [{"device_kind": "V100", "encode_bytes_per_s": 10**11, "decode_bytes_per_s": 10**11}]
    topology = tiny_request()["topology"]
    slow = topology | {"uniform": topology["uniform"] | {"nic": {"bandwidth_bytes_per_s": 10**8}}}
    file = planned(profile=tiny_request()["profile"] | {"codec_speeds": speeds}, topology=slow, codec="auto")
    assert any(file.plan.pipelines[0].codecs or ())
    return file


def averaging() -> PlanFile:
    return planned(planner="avgpipe", update_rules=["elastic_averaging"])


def carried_by(programs: Sequence[Sequence[dict[str, Any]]], gpus: Sequence[str | None], wanted: str = AUTO) -> str:
    """Return the transport of ranks on these devices; ``programs``: the programs of each rank, as JSON."""
    places = []
    for rank_programs, gpu in zip(programs, gpus, strict=True):
        places.append(Place(wanted, gpu, common_transports(map(Program.from_json, rank_programs))))
    return choose(places)


# The decision


def test_programs_for_gpus_suit_nccl_and_say_so() -> None:
    file = out_of_order()
    with pytest.raises(InvalidPlan, match="not received in the order"):
        check_programs(programs(file, transport="gloo"), transport="nccl")
    lowered = programs(file)
    check_programs(lowered, transport="nccl")
    assert {program.transports for program in lowered} == {TRANSPORTS}
    assert programs(file, transport="nccl") == lowered


def test_programs_for_cpus_are_for_gloo_unless_gpus_will_run_them() -> None:
    file = out_of_order("cpu")
    lowered = programs(file)
    assert lowered == programs(file, transport="gloo")
    assert {program.transports for program in lowered} == {("gloo",)}
    on_gpus = programs(file, transport="auto-on-gpus")
    check_programs(on_gpus, transport="nccl")
    assert on_gpus == programs(file, transport="nccl")


@pytest.mark.parametrize(("make", "words"), [(coded, "encoded"), (averaging, "elastic averaging")])
def test_what_needs_tags_is_for_gloo_alone(make: Any, words: str) -> None:
    file = make()
    assert {program.transports for program in programs(file)} == {("gloo",)}
    assert {program.transports for program in programs(file, transport="auto-on-gpus")} == {("gloo",)}
    with pytest.raises(UnsupportedRequest, match=f"nccl cannot carry this plan: .*{words}") as caught:
        programs(file, transport="nccl")
    assert "at auto" in str(caught.value.remedy)


def test_where_no_order_suits_nccl_programs_are_for_gloo_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.solvers.lowering.posted_as_sent", lambda wiring, codes, starts: (codes, starts))
    file = out_of_order()
    assert {program.transports for program in programs(file)} == {("gloo",)}
    with pytest.raises(InvalidPlan, match="not received in the order"):
        programs(file, transport="nccl")


# Documents


def test_a_program_of_before_is_for_gloo_and_keeps_its_text() -> None:
    program = programs(planned("cpu"))[0]
    data = program.to_json()
    assert "transports" not in data, "as programs were written before the field was there"
    assert Program.from_json(data) == program
    for_gpus = replace(program, transports=TRANSPORTS)
    assert for_gpus.to_json() == data | {"transports": ["gloo", "nccl"]}
    assert Program.from_json(json.loads(json.dumps(for_gpus.to_json()))) == for_gpus


@pytest.mark.parametrize("transports", [["nccl"], [], ["gloo", "mpi"], "gloo", None])
def test_other_transports_are_refused(transports: Any) -> None:
    data = programs(planned("cpu"))[0].to_json() | {"transports": transports}
    with pytest.raises(PenstockError, match="/transports: "):
        Program.from_json(data)


# Surfaces


def test_a_run_of_the_service_is_checked_for_nccl_where_the_plan_has_gpus() -> None:
    lowered = lower(out_of_order())
    check_programs([Program.from_json(rank_programs[0]) for rank_programs in lowered.programs], transport="nccl")
    assert carried_by(lowered.programs, TWO_GPUS) == "nccl"
    assert carried_by(lowered.programs, ("GPU-1", "GPU-1")) == "gloo-staged"
    assert carried_by(lowered.programs, (None, None)) == "gloo"


def test_agents_stage_what_was_lowered_for_gloo() -> None:
    """An agent's user names no transport, so none that could be named is refused."""
    lowered = lower(coded())
    ranks = tuple(
        RankPrograms(rank=rank, device=f"a/{rank}", programs=rank_programs)
        for rank, rank_programs in enumerate(lowered.programs)
    )
    assignment = Assignment(
        run="r",
        generation=1,
        phase="start",
        plan_hash=lowered.plan_hash,
        digest=digest_of(program for rank_programs in lowered.programs for program in rank_programs),
        model="toy",
        world_size=len(ranks),
        steps=1,
        seed=0,
        check=False,
        trace_steps=0,
        store_address="here:1",
        layers=(),
        hosts_store=False,
        ranks=ranks,
    )
    state = State(Offer("a", frozenset(rank.device for rank in ranks), {"toy": "toys:job"}))
    actions: list[Any] = []
    for wanted in (assignment.model_copy(update={"phase": "prepare", "store_address": None}), assignment):
        state, actions = step(state, Synced(SyncReply(state_version=1, assignments=(wanted,), ack=0)))
        if wanted.phase == "prepare":
            state, _ = step(state, ChildMessage("r", 1, CHECK, {"kind": "ready"}))
    started = [action.assignment for action in actions if isinstance(action, Start) and action.assignment is not None]
    assert [one.rank for one in started] == list(range(len(ranks)))
    assert {one.transport for one in started} == {"auto"}
    gpus = [f"GPU-{rank}" for rank in range(len(ranks))]
    assert carried_by([list(one.programs) for one in started], gpus) == "gloo-staged"


@pytest.mark.parametrize(
    ("make", "flags", "expected"),
    [
        pytest.param(out_of_order, [], TRANSPORTS, id="gpus"),
        pytest.param(out_of_order, ["--transport", "gloo"], ("gloo",), id="gloo"),
        pytest.param(out_of_order, ["--transport", "gloo-staged"], ("gloo",), id="staged"),
        pytest.param(lambda: out_of_order("cpu"), [], ("gloo",), id="cpus"),
        pytest.param(lambda: out_of_order("cpu"), ["--device", "cuda:0"], TRANSPORTS, id="a-plan-for-cpus-on-gpus"),
        pytest.param(coded, ["--device", "cuda:0"], ("gloo",), id="codecs"),
    ],
)
def test_penstock_run_lowers_for_its_devices(
    make: Any, flags: list[str], expected: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works: list[Work] = []

    def run_unattended(work: Any, *args: Any, **more: Any) -> None:
        works.append(work(None))
        raise UnsupportedRequest("far enough")

    monkeypatch.setattr(unattended, "run_unattended", run_unattended)
    make().write(tmp_path / "plan.json")
    assert main(["run", str(tmp_path / "plan.json"), "--job", "mine:job", *flags]) == 65
    assert works[0].transports == expected


def test_penstock_run_says_why_nccl_cannot_carry_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    coded().write(tmp_path / "plan.json")
    assert main(["run", str(tmp_path / "plan.json"), "--job", "mine:job", "--transport", "nccl"]) == 65
    message = capsys.readouterr().err
    assert "layers 0 to " in message
    assert "leave the transport at auto" in message


def launched(bundle: JobBundle, **orders: Any) -> Process:
    """Return a process of a launch that has not connected to any other process."""
    launch = Launch(
        launcher="by hand",
        process=0,
        processes=2,
        local_rank=0,
        node="node0",
        host="127.0.0.1",
        port=1,
        opens_store=False,
    )
    all_orders = Orders(model="mine:job", directory=".", steps=1, seed=0, wait_s=0.01, **orders)
    return Process(bundle, "", launch, all_orders, show=lambda event: None, on_first=lambda: None)


def test_penstock_rank_keeps_to_what_its_bundle_was_lowered_for() -> None:
    bundle = make_bundle(coded())
    assert bundle.lowered_for == "gloo"
    assert carried_by([list(part.programs) for part in bundle.ranks], TWO_GPUS) == "gloo-staged"
    with pytest.raises(UnsupportedRequest, match="lowered for gloo alone") as caught:
        launched(bundle, transport="nccl").run()
    assert "start penstock rank without --transport" in str(caught.value.remedy)
    with pytest.raises(UnsupportedRequest, match="nccl cannot carry this plan"):
        make_bundle(coded(), transport="nccl")
