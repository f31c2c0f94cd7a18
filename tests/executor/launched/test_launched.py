"""Processes that a launcher has started: what its environment says, who is which rank, how they meet and part."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from ports import keep_port

from penstock.executor.launched import rendezvous as meetings
from penstock.executor.launched.environment import FIRST_PORT, Launch, read_launch
from penstock.executor.launched.process import device_of
from penstock.executor.launched.rank_places import Presence, ranks_of_processes, refuse_differences
from penstock.executor.launched.rendezvous import Rendezvous
from penstock.executor.launched.report import check_failure, launch_report
from penstock.executor.program.neighbours import awaited
from penstock.importers.cluster.hostlist import expand
from penstock.schemas.errors import Conflict, PenstockError, Unreachable, UnsupportedRequest
from penstock.schemas.program import Channel, Instruction, Program, RankStage
from penstock.schemas.ranks.bundle import JobBundle
from penstock.schemas.trace import Hardware

pytestmark = pytest.mark.tier("quick")

# What launchers say

SRUN = {
    "SLURM_JOB_ID": "12007",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "8",
    "SLURMD_NODENAME": "n3",
    "SLURM_STEP_NODELIST": "n[3,9]",
    "SLURM_JOB_NODELIST": "n[1-9]",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
    "NODE_NAME": "gpu-7",
}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param(SRUN, ("srun", 2, 4, 0, "n3", "n3", FIRST_PORT + 7, True), id="srun: first node, port of the job"),
        pytest.param(
            SRUN | {"SLURM_LOCALID": "1"},
            ("srun", 2, 4, 1, "n3", "n3", FIRST_PORT + 7, False),
            id="srun: second process of the first node",
        ),
        pytest.param(
            SRUN | {"MASTER_ADDR": "n9", "MASTER_PORT": "40000"},
            ("srun", 2, 4, 0, "n3", "n9", 40000, False),
            id="srun: another node has the store, whatever its process's number",
        ),
        pytest.param(
            SRUN | {"MASTER_ADDR": "10.0.0.1", "SLURM_PROCID": "0"},
            ("srun", 0, 4, 0, "n3", "10.0.0.1", FIRST_PORT + 7, True),
            id="srun: an address is process 0's",
        ),
        pytest.param(TORCHRUN, ("torchrun", 0, 4, 0, "gpu-7", "head", 29500, False), id="torchrun: its agent's store"),
        pytest.param(
            SRUN | TORCHRUN, ("torchrun", 0, 4, 0, "n3", "head", 29500, False), id="torchrun within srun: Slurm's name"
        ),
        pytest.param(
            TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"},
            ("torchrun", 0, 4, 0, "gpu-7", "head", 29500, True),
            id="torchrun without a store",
        ),
        pytest.param(BY_HAND, ("by hand", 1, 2, 0, socket.gethostname(), "head", 29500, False), id="by hand"),
    ],
)
def test_what_a_launcher_says(environ: dict[str, str], expected: tuple[Any, ...]) -> None:
    launch = read_launch(environ, expand)
    assert (
        launch.launcher,
        launch.process,
        launch.processes,
        launch.local_rank,
        launch.node,
        launch.host,
        launch.port,
        launch.opens_store,
    ) == expected


def test_the_command_line_names_the_node() -> None:
    assert read_launch(SRUN, expand, node="rack1-n3").node == "rack1-n3"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        pytest.param({}, "by hand also need RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT", id="nothing"),
        pytest.param({"RANK": "0"}, "by hand also need WORLD_SIZE, MASTER_ADDR, MASTER_PORT", id="a part"),
        pytest.param({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, "the batch script of Slurm's job 7", id="batch"),
        pytest.param(BY_HAND | {"RANK": "two"}, "RANK is 'two'", id="no number"),
        pytest.param(BY_HAND | {"RANK": "2"}, "RANK 2 has to be below WORLD_SIZE 2", id="beyond"),
        pytest.param(BY_HAND | {"MASTER_PORT": "70000"}, "MASTER_PORT is 70000", id="port"),
        pytest.param(BY_HAND | {"MASTER_ADDR": ""}, "MASTER_ADDR is not set", id="empty"),
        pytest.param(SRUN | {"SLURM_STEP_NODELIST": "n[1-"}, "n[1-", id="hostlist"),
    ],
)
def test_an_environment_that_says_too_little(environ: dict[str, str], words: str) -> None:
    with pytest.raises(PenstockError) as caught:
        read_launch(environ, expand)
    assert words in str(caught.value)


# Who is which rank


def bundle(*devices: str, kind: str = "cpu") -> JobBundle:
    """Build a bundle of ranks on these devices, without programs."""
    ranks = [
        {"rank": i, "device": device, "device_kind": kind, "programs": [{}], "digest": ""}
        for i, device in enumerate(devices)
    ]
    return JobBundle.parse(
        {
            "plan_hash": "sha256:" + 64 * "0",
            "update_rule": "synchronous",
            "global_batch_size": 8,
            "layers": ["a"],
            "lowered_for": "gloo",
            "ranks": ranks,
        }
    )


def present(*places: str, **more: Any) -> list[Presence]:
    """Return processes in the launcher's order, each ``node/local rank``."""
    plain = {"machine": "m", "address": "127.0.0.1", "bundle": "b", "orders": {}} | more
    presences = []
    for place in places:
        node, _, local_rank = place.partition("/")
        presences.append(Presence(node=node, local_rank=int(local_rank), **plain))
    return presences


TWO_BY_TWO = ("n1/0", "n1/1", "n0/0", "n0/1")
"""The plan begins on n1, which the launcher puts last."""


@pytest.mark.parametrize(
    ("devices", "places", "any_nodes", "ranks"),
    [
        pytest.param(TWO_BY_TWO, ("n0/0", "n0/1", "n1/0", "n1/1"), False, [2, 3, 0, 1], id="by name, not by order"),
        pytest.param(TWO_BY_TWO, ("n1/1", "n0/1", "n0/0", "n1/0"), False, [1, 3, 2, 0], id="in any order"),
        pytest.param(("a/10", "a/2", "b/0"), ("a/0", "a/1", "b/0"), False, [1, 0, 2], id="devices by number"),
        pytest.param(("a/4", "a/6"), ("a/0", "a/1"), False, [0, 1], id="some of a node's devices"),
        pytest.param(("a/0", "a/1", "b/0"), ("b/0", "a/0", "a/1"), False, [2, 0, 1], id="unequal nodes"),
        pytest.param(("a.x/0", "b.x/0"), ("b/0", "a/0"), False, [1, 0], id="short names"),
        pytest.param(("a/0", "b/0"), ("b.x.org/0", "a.x.org/0"), False, [1, 0], id="long names"),
        pytest.param(("a/0", "a/0", "b/0", "b/0"), ("a/0", "a/1", "b/0", "b/1"), False, [0, 1, 2, 3], id="shared"),
        pytest.param(TWO_BY_TWO, ("n2/0", "n2/1", "n10/0", "n10/1"), True, [0, 1, 2, 3], id="any: order of names"),
        pytest.param(TWO_BY_TWO, ("n0/0", "n0/1", "n5/0", "n5/1"), True, [2, 3, 0, 1], id="any: the plan's own stay"),
        pytest.param(("a/0", "b/0", "b/1"), ("x/0", "x/1", "y/0"), True, [1, 2, 0], id="any: as many as fit"),
    ],
)
def test_processes_take_their_places(
    devices: tuple[str, ...], places: tuple[str, ...], any_nodes: bool, ranks: list[int]
) -> None:
    assert ranks_of_processes(bundle(*devices), present(*places), any_nodes=any_nodes) == ranks


@pytest.mark.parametrize(
    ("places", "any_nodes", "error", "words"),
    [
        pytest.param(
            ("n0/0", "n0/1", "n2/0", "n2/1"),
            False,
            UnsupportedRequest,
            "the plan does not name n2: processes were started on n0 (2), n2 (2), and the plan has ranks on n1 (2), "
            "n0 (2), of which n1 got none\n  try: request the plan's nodes (sbatch --nodelist=n1,n0); or plan for "
            "the nodes that you have (penstock place --free n0,n2); or add --any-nodes",
            id="stranger",
        ),
        pytest.param(
            ("n0/0", "n1/0"), False, UnsupportedRequest, "1 process on n0, where the plan has 2 ranks", id="few"
        ),
        pytest.param(
            ("n0/0", "n0/1", "n0/2", "n1/0", "n1/1"),
            False,
            UnsupportedRequest,
            "3 processes on n0, where the plan has 2 ranks",
            id="many",
        ),
        pytest.param(
            ("n0/0", "n0/1"),
            False,
            UnsupportedRequest,
            "the launcher has started no process on n1, where the plan has ranks, but processes on n0 (2)\n"
            "  try: start 2 on each of n1, n0 (sbatch --nodes=2 --ntasks-per-node=2,",
            id="absent",
        ),
        pytest.param(
            ("n0/0", "n0/1", "n0/0", "n1/1"),
            False,
            Conflict,
            "processes 0 and 2 both have local rank 0 on n0",
            id="two in one place",
        ),
        pytest.param(
            ("n7/0", "n7/1", "n8/0"),
            True,
            UnsupportedRequest,
            "n8 has 1 processes and can replace none of the plan's nodes that are left (n0 (2))",
            id="any: none fits",
        ),
        pytest.param(
            ("n7/0", "n7/1", "n8/0", "n8/1", "n9/0", "n9/1"),
            True,
            UnsupportedRequest,
            "n9 has 2 processes and can replace none of the plan's nodes that are left (none)",
            id="any: too many",
        ),
    ],
)
def test_places_that_do_not_fit(
    places: tuple[str, ...], any_nodes: bool, error: type[PenstockError], words: str
) -> None:
    with pytest.raises(error) as caught:
        ranks_of_processes(bundle(*TWO_BY_TWO), present(*places), any_nodes=any_nodes)
    assert words in str(caught.value)


def test_unequal_nodes_are_told_how_to_start() -> None:
    with pytest.raises(UnsupportedRequest, match=r"start a \(2\), b \(1\) \(srun --distribution=arbitrary"):
        ranks_of_processes(bundle("a/0", "a/1", "b/0"), present("a/0", "b/0"))


def test_all_have_the_same_bundle_and_command_line() -> None:
    same = [*present("a/0", orders={"steps": 5, "seed": 0}), *present("b/0", orders={"steps": 5, "seed": 0})]
    refuse_differences(same)
    with pytest.raises(Conflict, match=r"\(on a\) and process 1 \(on b\) have different bundles"):
        refuse_differences([*present("a/0"), *present("b/0", bundle="other")])
    with pytest.raises(Conflict, match="started differently: steps is 5 and 6"):
        refuse_differences([same[0], *present("b/0", orders={"steps": 6, "seed": 0})])


@pytest.mark.parametrize(
    ("kind", "wanted", "visible", "device"),
    [
        pytest.param("cpu", "auto", 8, "cpu", id="the plan's devices are CPUs"),
        pytest.param("H100", "cpu", 8, "cpu", id="asked for"),
        pytest.param("H100", "auto", 1, "cuda:0", id="the launcher shows a process its own"),
        pytest.param("H100", "auto", 2, "cuda:1", id="those of the job: the second of two"),
        pytest.param("H100", "cuda", 8, "cuda:6", id="all of the node: by number"),
    ],
)
def test_a_rank_finds_its_device(
    kind: str, wanted: str, visible: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.executor.launched.process.gpu_count", lambda: visible)
    assert device_of(bundle("a/4", "a/6", kind=kind), 1, wanted) == device


# Rendezvous and parting


@pytest.fixture(autouse=True)
def _ports_are_given_back() -> Iterator[None]:
    yield
    PORTS.close()


PORTS = ExitStack()
"""The ports of a test's launches."""


def launches(count: int, host: str = "127.0.0.1", **more: Any) -> list[Launch]:
    port = keep_port(PORTS)
    return [
        Launch(
            launcher="by hand",
            process=i,
            processes=count,
            local_rank=i,
            node="here",
            host=host,
            port=port,
            opens_store=i == 0,
            **more,
        )
        for i in range(count)
    ]


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return the results of calls in separate threads."""
    results: list[Any] = [None] * len(calls)

    def call(number: int) -> None:
        results[number] = calls[number]()

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


@pytest.mark.tier("ci")
def test_processes_meet_hear_of_a_failure_and_leave() -> None:
    def attend(launch: Launch) -> tuple[list[Presence], str, str | None, str]:
        meeting = Rendezvous(launch, 20)
        present, name = meeting.present("digest", {"steps": 3, "seed": launch.process})
        nothing = meeting.failure(0.05) if launch.process == 0 else None
        meeting.publish_failure(f"process {launch.process} failed") if launch.process == 1 else None
        heard = meeting.watch()
        meeting.publish_failure("a later one")
        meeting.leave(20)
        return present, name, nothing, heard

    results = together([lambda launch=launch: attend(launch) for launch in launches(3)])  # type: ignore[misc]
    assert {name for _, name, _, _ in results} == {results[0][1]}
    assert {heard for _, _, _, heard in results} == {"process 1 failed"}
    assert results[2][0] == results[0][0]
    assert [(one.local_rank, one.orders["seed"], one.opens_store) for one in results[0][0]] == [
        (0, 0, True),
        (1, 1, False),
        (2, 2, False),
    ]


@pytest.mark.tier("ci")
def test_those_that_do_not_come_are_named() -> None:
    meeting = Rendezvous(launches(3)[0], 0.3)
    with pytest.raises(
        Unreachable, match=r"1 of 3 processes have arrived at 127.0.0.1:\d+ within 0.3 s; missing are, .* 1, 2\n"
    ):
        meeting.present("digest", {})


@pytest.mark.tier("ci")
def test_a_store_that_nobody_opens_and_one_whose_port_is_taken() -> None:
    first, second = launches(2)
    with pytest.raises(
        Unreachable, match=r"no process has opened the store at 127\.0\.0\.1:\d+ within 0\.3 s: Connection refused"
    ):
        Rendezvous(second, 0.3)
    with socket.socket() as occupied:
        occupied.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        occupied.bind(("", first.port))
        occupied.listen()
        with pytest.raises(Unreachable, match=f"cannot listen on port {first.port}.*\n  try: export MASTER_PORT"):
            Rendezvous(first, 0.3)


@pytest.mark.tier("ci")
def test_something_else_that_answers_at_the_port() -> None:
    _, second = launches(2)

    def greet(listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                with listening.accept()[0] as caller:
                    caller.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", second.port)) as listening:
        threading.Thread(target=greet, args=(listening,), daemon=True).start()
        with pytest.raises(Unreachable, match=f":{second.port} is not the ranks' store"):
            Rendezvous(second, 0.5)
        listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.tier("ci")
def test_slurm_knows_the_addresses_of_its_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = "NodeName=n0 Arch=x86_64 CoresPerSocket=1 NodeAddr=127.0.0.1 NodeHostName=here OS=Linux 6.1 #1 SMP"
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho '{record}'\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    launch = launches(1, host="n0.nowhere.invalid", job_id="7")[0]
    assert Rendezvous(launch, 5).host == "127.0.0.1"
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 'Node n0 not found' >&2\nexit 1\n")
    with pytest.raises(Unreachable, match=r"'n0.nowhere.invalid', where ranks meet, cannot be resolved here"):
        Rendezvous(launch, 5)


@pytest.mark.tier("ci")
def test_gloo_goes_over_the_interface_that_leads_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(meetings, "address_towards", lambda host: f"to {host}")
    monkeypatch.setattr(meetings, "interface_of", lambda address: f"if {address}")

    def chosen(present: list[Presence], number: int) -> tuple[str | None, str | None]:
        meetings.bind_to(present, number)
        return os.environ.pop("GLOO_SOCKET_IFNAME", None), os.environ.pop("NCCL_SOCKET_IFNAME", None)

    keeper, far = present("a/0", machine="a"), present("b/0", machine="b", address="10.0.0.2")
    assert chosen([*keeper, *present("a/1", machine="a")], 0) == ("if 127.0.0.1", None), "one machine"
    assert chosen([*keeper, *far], 0) == ("if to 10.0.0.2",) * 2, "its own name may be its loopback"
    assert chosen([*keeper, *far], 1) == ("if 10.0.0.2",) * 2


# Reports


def test_the_report_of_a_run_that_was_resumed_and_told_to_end() -> None:
    events: list[Mapping[str, Any]] = [
        {"kind": "resumed", "step": 4, "directory": "d"},
        {"kind": "step", "step": 4, "loss": 2.0, "time_ns": 900},
        {"kind": "step", "step": 5, "loss": float("nan"), "time_ns": 100},
        {"kind": "evaluation", "step": 6, "loss": 1.5},
        {"kind": "step", "step": 6, "loss": 1.0, "time_ns": 300},
        {"kind": "checkpoint", "step": 7, "directory": "d"},
    ]
    data = bundle("n1/0", "n0/0").model_dump(mode="json")
    for part in data["ranks"]:
        part["programs"] = [{"pipelines": 2}]
    averaging = JobBundle.parse(data | {"update_rule": "elastic_averaging"})
    report = launch_report(averaging, "srun", "m:job", present("x/3", "y/0"), events, [None, None])
    plain = json.loads(report.model_dump_json())
    assert (report.state, report.first_step, report.steps_done, report.checkpoint_step) == ("left", 4, 7, 7)
    assert plain["losses"] == [2.0, "NaN", 1.0]
    assert report.step_times_ns == (50, 150), "of two pipelines' global batches, without the first step"
    assert [(one.step, one.loss) for one in report.evaluations] == [(6, 1.5)]
    assert [(one.node, one.local_rank, one.device) for one in report.ranks] == [("x", 3, "n1/0"), ("y", 0, "n0/0")]


def test_the_report_has_what_ranks_computed_on() -> None:
    loads = {"load_at_start": 0.5, "load_at_end": 1.5, "cpu_ns": 5, "wall_ns": 9}
    hardware = {"kind": "H100", "model": "NVIDIA H100", "ranks": 1, "cores": 8, "machine_cores": 8, **loads}
    done = {"gradient_check": None, "peak_memory_bytes": 7, "hardware": hardware}
    done |= {"collectives": {"all_reduce": 2}, "collectives_differ": None}
    report = launch_report(bundle("n0/0"), "srun", "m:job", present("x/0"), [], [done])
    assert report.ranks[0].hardware == Hardware.model_validate(hardware)
    assert (report.collectives, report.collectives_differ) == ({"all_reduce": 2}, None)


def test_a_comparison_that_is_off_is_said() -> None:
    done = {"gradient_check": 1e-9, "loss_check": 1e-9, "gradient_tolerance": 1e-6, "collectives_differ": None}
    assert check_failure([None]) is None
    assert check_failure([done | {"gradient_check": None}]) is None
    assert check_failure([done, done]) is None
    assert "gradients 0.5 apart" in str(check_failure([done | {"gradient_check": 0.5}]))
    assert "predicted: rank 1" in str(check_failure([done, done | {"collectives_differ": "rank 1, step 0"}]))


def test_whose_message_an_instruction_waits_for() -> None:
    entry = RankStage(
        stage=1,
        first=0,
        last=0,
        replica=0,
        ranks=(1,),
        dispatch="rows",
        rows=((0, 4),),
        recompute=(),
        previous=0,
        next=2,
        micro_batches=(0, 3),
        buckets=((0, 0, 0),),
        update_every=4,
        versions=1,
        pipeline=0,
    )
    ends = [("F", 0, 0), ("F", 0, 4), ("F", 2, 2), ("B", 2, 2), ("B", 0, 0)]
    channels = tuple(
        Channel(kind=kind, stage=1, peer_stage=stage, peer=peer, tag=0, rows=((0, 4),), codec=None)  # type: ignore[arg-type]
        for kind, stage, peer in ends
    )
    program = Program(
        rank=1,
        world_size=5,
        device="n/1",
        global_batch_size=16,
        num_micro_batches=4,
        stages=(entry,),
        channels=channels,
        row_classes=((4, 4),),
        groups=((1, 3),),
        prologue=(),
        body=(),
        repeat=0,
        epilogue=(),
    )
    waits = {kind: awaited(program, Instruction(kind, 1, 0)) for kind in ("F", "B", "I", "WAIT_REDUCE", "STEP")}
    assert waits == {"F": [0, 4], "B": [2], "I": [2], "WAIT_REDUCE": [3], "STEP": [0, 2, 3, 4]}
    assert awaited(program, Instruction("SEND_F", 1, 0, 2)) == [2]
