"""The agent's daemon over real HTTP, with real processes: ranks are stand-ins, check and store are the real ones."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import agent_process
import psutil
import pytest
from agent_process import with_real_check
from orphans import no_orphans
from scripted_service import LIMIT_S, ScriptedService, problem

from penstock.executor.node.agent import run_agent
from penstock.executor.node.rank_log import tail
from penstock.executor.node.settings import AgentSettings
from penstock.schemas.api.agents import Assignment, LogRequest, RankPrograms, digest_of
from penstock.schemas.errors import Conflict, InvalidDocument, Unreachable

pytestmark = pytest.mark.tier("ci")

TOY_PROJECT = """
import torch
from torch import nn
from penstock.executor.run.job import LayerSpec, SimpleJob

class Job(SimpleJob):
    def layers(self):
        return [LayerSpec("first", lambda: nn.Linear(4, 4)), LayerSpec("second", lambda: nn.Linear(4, 1))]
    def batch(self, step, rows):
        return {"x": torch.ones(len(rows), 4)}, torch.ones(len(rows), 1)
    def loss(self, outputs, targets):
        return ((outputs["x"] - targets) ** 2).sum(), len(targets)
    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.1)

job = Job("toy", batch_size=8)
"""


@pytest.fixture
def service():
    service = ScriptedService()
    yield service
    service.close()


@pytest.fixture
def project(tmp_path):
    """A training project that owns packages of our folders' names, and a module named like one of Python's."""
    (tmp_path / "toy_project.py").write_text(TOY_PROJECT)
    for name in ("schemas", "service", "executor", "queue"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('this is the user\\'s own')")
    return tmp_path


class Running:
    """An agent in a separate thread."""

    def __init__(self, server: str, directory: Path, **settings) -> None:
        self.lines: list[str] = []
        self.heard = threading.Condition()
        self.error: Exception | None = None
        self._begun = threading.Event()
        self._make = lambda: agent_process.make_agent(server, directory, self._say, **settings)
        self.thread = threading.Thread(target=self._live)
        self.thread.start()
        self._begun.wait(LIMIT_S)

    def _say(self, text: str) -> None:
        with self.heard:
            self.lines.append(text)
            self.heard.notify_all()

    def wait_until_said(self, words: str, times: int = 1) -> None:
        with self.heard:
            assert self.heard.wait_for(lambda: sum(words in text for text in self.lines) == times, LIMIT_S), self.lines

    def _live(self) -> None:
        async def live() -> None:
            self.loop = asyncio.get_running_loop()
            self.agent = self._make()
            self._begun.set()
            await self.agent.run()

        try:
            asyncio.run(live())
        except Exception as error:
            self.error = error
        finally:
            self._begun.set()

    def leave(self) -> None:
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.agent.leave)
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()


@contextmanager
def running(service: ScriptedService, directory: Path, **settings):
    with no_orphans():
        agent = Running(service.url, directory, **settings)
        try:
            yield agent
        finally:
            agent.leave()


def assign(phase, *do, generation=1, hosts_store=False, layers=("first", "second"), model="toy", batch=8):
    programs = [{"do": list(lines), "global_batch_size": batch} for lines in do]
    ranks = tuple(RankPrograms(rank=i, device=f"node/{i}", programs=(one,)) for i, one in enumerate(programs))
    return Assignment(
        run="r",
        generation=generation,
        phase=phase,
        plan_hash="sha256:" + 64 * "0",
        digest=digest_of(program for rank in ranks for program in rank.programs),
        model=model,
        world_size=len(ranks),
        steps=2,
        seed=7,
        check=False,
        trace_steps=1,
        hosts_store=hosts_store,
        store_address="127.0.0.1:1" if phase == "start" and not hosts_store else None,
        ranks=ranks,
        layers=layers,
    )


def start(service: ScriptedService, *do, hosts_store=False) -> None:
    """Bring a run to the phase start."""
    service.wish(assign("prepare", *do, hosts_store=hosts_store))
    service.wait_for("prepared")
    service.wish(assign("start", *do, hosts_store=hosts_store))


def facts_of(directory: Path, rank: int) -> dict:
    return json.loads((directory / f"rank-{rank}.json").read_text())


def gone(pid: int) -> bool:
    try:
        psutil.Process(pid).wait(LIMIT_S)
    except psutil.NoSuchProcess:
        return True
    return True


def test_a_run_from_prepare_to_its_end(service, project):
    with running(service, project, command=with_real_check) as agent:
        do = ["hello", "print a word of the user", "step 0", "trace 9000", "step 1", "done"]
        start(service, do, do, hosts_store=True)
        assert {event.data["rank"] for event in service.wait_for("rank_done", 2)} == {0, 1}
        service.wish()
        service.wait_for("stopped")
    assert agent.error is None
    kinds = [event.kind for event in service.events if event.kind != "progress"]
    assert sorted(kinds[:2]) == ["prepared", "store_ready"]
    assert kinds.count("started") == 1
    assert kinds.count("trace") == 2
    assert kinds[-1] == "stopped"
    assert [event.sequence for event in service.events] == list(range(1, len(service.events) + 1))
    done = service.wait_for("rank_done")[0].data
    assert (done["losses"], done["step_times_ns"]) == ([1.0, 0.5], [1000, 1000])
    assert len(service.wait_for("trace")[0].data["rank_trace"]["events"]) == 9000
    first, last = service.requests[0], service.requests[-1]
    assert [device.id for device in first.devices] == ["node/0", "node/1"]
    assert (first.models, first.address, last.leaving) == (("toy",), "127.0.0.1", True)
    assert {request.incarnation for request in service.requests} == {first.incarnation}


def test_what_a_rank_is_given(service, project, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with running(service, project, peer_timeout_s=7.5):
        start(service, ["hello", "wait never"], ["hello", "wait never"], hosts_store=True)
        service.wait_for("started")
        facts = facts_of(project, 1)
        store = service.wait_for("store_ready")[0].data["address"]
    message = facts["assignment"]
    assert (message["rank"], message["world_size"], message["store"], message["prefix"]) == (1, 2, store, "r/1")
    assert (message["job"], message["directory"], message["device"]) == ("toy_project:job", str(project), "cpu")
    assert (message["steps"], message["seed"], message["layers"]) == (2, 7, ["first", "second"])
    assert message["timeout_s"] == 7.5
    assert facts["cwd"] == str(project)
    assert facts["environment"]["OMP_NUM_THREADS"] == "1"
    assert facts["environment"]["GLOO_SOCKET_IFNAME"] == "lo"


def test_a_killed_rank_is_named_and_its_neighbours_end(service, project):
    with running(service, project):
        start(service, ["hello", "stderr I was here", "wait now", "die 9"], ["hello", "wait never"])
        service.wait_for("started")
        pids = [facts_of(project, rank)["pid"] for rank in (0, 1)]
        (project / "now").touch()
        (failed,) = service.wait_for("rank_failed")
        assert all(map(gone, pids))
        service.wish(assign("stop"))
        service.wait_for("stopped")
    assert failed.data == {
        "rank": 0,
        "reason": "rank 0 ended before it was done: signal 9: I was here",
        "instruction": None,
        "signal": 9,
        "exit_code": None,
        "last_lines": ["I was here"],
        "is_final": False,
    }
    assert [event.kind for event in service.events].count("rank_failed") == 1


def test_a_rank_that_raises_is_named_with_its_instruction_and_last_lines(service, project):
    with running(service, project):
        start(
            service,
            ["hello", "wait now", "fail ValueError: no", "stderr model.py, line 3", "exit 1"],
            ["hello", "wait now", "fail Connection closed by peer", "exit 1"],
        )
        service.wait_for("started")
        (project / "now").touch()
        (failed,) = service.wait_for("rank_failed")
    assert (failed.data["rank"], failed.data["reason"]) == (0, "ValueError: no")
    assert (failed.data["instruction"], failed.data["exit_code"]) == ("1F4", 1)
    assert failed.data["last_lines"] == ["model.py, line 3"]


def test_stop_ends_ranks_that_ignore_it_and_their_children(service, project):
    with running(service, project):
        start(service, ["stubborn", "child", "hello", "wait never"])
        service.wait_for("started")
        pids = [facts_of(project, 0)["pid"], int((project / "child-0.pid").read_text())]
        service.wish(assign("stop"))
        service.wait_for("stopped")
        assert all(map(gone, pids))


def test_a_higher_generation_replaces_the_lower_one(service, project):
    with running(service, project):
        start(service, ["hello", "wait never"])
        service.wait_for("started")
        pid = facts_of(project, 0)["pid"]
        service.wish(assign("prepare", ["hello"], generation=2))
        service.wait_for("stopped")
        assert gone(pid)
        assert [event.generation for event in service.wait_for("prepared", 2)] == [1, 2]


def test_training_goes_on_while_the_service_is_away(service, project):
    with running(service, project) as agent:
        start(service, ["hello", "wait away", *[f"step {i}" for i in range(400)], "trace 10", "done"])
        service.wait_for("started")
        service.close()
        agent.wait_until_said("no answer from")
        (project / "away").touch()
        agent.wait_until_said("run r: rank_done")
        heard = len(service.events)
        service.open()
        service.wait_for("rank_done")
    assert sum("no answer from" in text for text in agent.lines) == 1
    assert "what runs goes on" in next(text for text in agent.lines if "no answer from" in text)
    later = service.events[heard:]
    assert [event.kind for event in later if event.kind != "progress"][:2] == ["trace", "rank_done"]
    assert len(later) < 10
    assert [event.sequence for event in service.events] == list(range(1, len(service.events) + 1))


def test_events_whose_acknowledgement_was_lost_are_sent_again_and_not_counted_twice(service, project):
    service.forget_acks = 2
    with running(service, project):
        start(service, ["hello", "done"])
        service.wait_for("rank_done")
    assert [event.kind for event in service.events].count("prepared") == 1
    assert sum(any(e.kind == "prepared" for e in request.events) for request in service.requests) == 3


def test_an_agent_waits_for_a_service_that_is_not_there_yet(service, project):
    service.close()
    with running(service, project) as agent:
        agent.wait_until_said("no answer from")
        service.open()
        agent.wait_until_said(f"{service.url} answers")
    assert agent.error is None


def test_an_answer_that_passes_is_tried_again(service, project):
    service.answer_with = problem(503, "the database is locked")
    with running(service, project) as agent:
        agent.wait_until_said("status 503: the database is locked")
        service.answer_with = (200, b"<html>")
        service.wait_until(lambda: service.requests, len(service.requests) + 2)
        service.answer_with = None
        agent.wait_until_said(f"{service.url} answers")
    assert agent.error is None


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        (409, Conflict, "already has a living agent with the name 'node': incarnation x is alive"),
        (404, Unreachable, "refused agent 'node' with status 404: incarnation x is alive"),
    ],
)
def test_a_refused_agent_ends_with_a_sentence(service, project, status, error, words):
    service.answer_with = problem(status, "incarnation x is alive")
    agent = Running(service.url, project, name_wait_s=0)
    agent.thread.join(LIMIT_S)
    assert isinstance(agent.error, error)
    assert words in str(agent.error)
    assert "\n  try: " in str(agent.error)


def test_a_new_agent_waits_for_the_name_of_a_dead_one(service, project):
    service.answer_with = problem(409, "incarnation x is alive")
    with running(service, project) as agent:
        agent.wait_until_said("status 409: incarnation x is alive")
        service.answer_with = None
        agent.wait_until_said(f"{service.url} answers")
    assert agent.error is None


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"layers": ("first", "other")}, ["layer 1", "'second'", "'other'"], id="another-name"),
        pytest.param({"layers": ("first",)}, ["has 2 layers", "made for 1"], id="another-length"),
        pytest.param({"batch": 9}, ["global batch has 9 samples", "that of job 'toy_project:job' has 8"], id="batch"),
        pytest.param({"model": "broken"}, ["broken_project", "no_such_package"], id="does-not-import"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(service, project, changes, words):
    (project / "broken_project.py").write_text("import no_such_package")
    models = {"toy": "toy_project:job", "broken": "broken_project:job"}
    with running(service, project, command=with_real_check, models=models):
        service.wish(assign("prepare", ["hello"], **changes))
        (refused,) = service.wait_for("refused")
    assert all(word in refused.data["reason"] for word in words)


def test_a_model_that_hangs_while_it_is_imported_is_refused(service, project):
    (project / "toy_project.py").write_text("import time; time.sleep(1000)")
    with running(service, project, command=with_real_check, prepare_limit_s=0.5):
        service.wish(assign("prepare", ["hello"]))
        (refused,) = service.wait_for("refused")
    assert "not done after 0.5 s" in refused.data["reason"]


def test_a_child_that_cannot_be_started_is_told(service, project):
    with running(service, project, command=lambda process: ["/does/not/exist"]):
        service.wish(assign("prepare", ["hello"]))
        (refused,) = service.wait_for("refused")
    assert "exit code 127: cannot start '/does/not/exist'" in refused.data["reason"]


def spawn(service: ScriptedService, project: Path) -> subprocess.Popen:
    command = [sys.executable, agent_process.__file__, service.url, str(project)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, process_group=0)


@pytest.mark.cases(2)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_no_process_outlives_the_agent(service, project, number):
    with spawn(service, project) as agent:
        try:
            start(service, ["stubborn", "hello", "wait never"], ["hello", "wait never"], hosts_store=True)
            service.wait_for("started")
            children = psutil.Process(agent.pid).children(recursive=True)
            agent.send_signal(number)
            _, complaints = agent.communicate(timeout=LIMIT_S)
        finally:
            agent.kill()
    assert {facts_of(project, rank)["pid"] for rank in (0, 1)} < {child.pid for child in children}
    assert psutil.wait_procs(children, LIMIT_S)[1] == []
    assert complaints == b""
    if number == signal.SIGKILL:
        assert agent.returncode == -9
        return
    assert agent.returncode == 0
    (failed,) = service.wait_for("rank_failed")
    assert "agent 'node' is leaving" in failed.data["reason"]
    assert service.wait_for("stopped")
    assert service.requests[-1].leaving


@pytest.mark.tier("quick")
def test_run_agent_says_when_there_is_no_device(project, monkeypatch):
    monkeypatch.setenv("PATH", str(project))
    settings = AgentSettings(name="node", server="http://127.0.0.1:1", models={"toy": "t:job"}, directory=project)
    with pytest.raises(InvalidDocument, match="has no device"):
        run_agent(settings)


def test_the_agent_loads_neither_torch_nor_the_other_packages():
    script = "import sys, penstock.executor.node.agent; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    roots = {".".join(name.split(".")[:2]) if name.startswith("penstock") else name.split(".")[0] for name in loaded}
    assert not roots & {"torch", "numpy", "numba", "sqlalchemy", "fastapi"}
    assert {name for name in roots if name.startswith("penstock")} == {
        "penstock",
        "penstock.executor",
        "penstock.schemas",
    }


def test_ranks_save_before_a_leaving_agent_says_goodbye(service, project):
    with running(service, project, stop_grace_s=30) as agent:
        start(service, ["saves 7", "hello", "wait never"], ["saves 7", "hello", "wait never"])
        service.wait_for("started")
        agent.leave()
    kinds = [event.kind for event in service.events if event.kind != "progress"]
    assert kinds == ["prepared", "started", "checkpoint", "checkpoint", "rank_failed", "stopped"]
    (failed,) = service.wait_for("rank_failed")
    assert failed.data["reason"] == "agent 'node' is leaving: it was asked to end"
    assert service.requests[-1].leaving


def test_a_cancelled_run_may_save_and_a_failed_one_is_killed(service, project):
    with running(service, project, stop_grace_s=30):
        start(service, ["saves 7", "hello", "wait never"])
        service.wait_for("started")
        service.wish(assign("stop").model_copy(update={"save": True}))
        service.wait_for("stopped")
        do = ["saves 8", "hello", "wait never"]
        service.wish(assign("prepare", do, generation=2))
        service.wait_for("prepared", 2)
        service.wish(assign("start", do, generation=2))
        service.wait_for("started", 2)
        service.wish(assign("stop", generation=2))
        service.wait_for("stopped", 2)
    assert [event.data["step"] for event in service.events if event.kind == "checkpoint"] == [7]


def wait_for_line(file, line):
    """Wait for a line: the streams of a rank are read side by side, and a full file is moved away during reading."""
    limit = time.monotonic() + LIMIT_S
    while line not in (tail(file, 4000) or "").splitlines():
        assert time.monotonic() < limit, f"{file} never had {line!r}"
        time.sleep(0.01)


def test_what_ranks_write_is_kept_in_files_and_its_end_is_sent(service, project):
    logs = project / "logs"
    with running(service, project, log_directory=logs, log_bytes=4000):
        lines = [f"stderr line {i}" for i in range(1000)]
        start(service, ["hello", *lines, "wait written", "print epoch 9", "wait never"])
        wait_for_line(logs / "r/1/rank-0.log", "line 999")
        (project / "written").touch()
        wait_for_line(logs / "r/1/rank-0.log", "epoch 9")
        service.log_wishes = (LogRequest(number=5, run="r", generation=1, rank=0, max_bytes=30),)
        service.wish(*service._wishes)
        tails = service.wait_until(lambda: [one for request in service.requests for one in request.log_tails])
    assert (tails[0].number, tails[0].path, tails[0].text) == (
        5,
        str(logs / "r/1/rank-0.log"),
        "line 998\nline 999\nepoch 9\n",
    )
    assert sum(file.stat().st_size for file in (logs / "r/1").glob("rank-0.log*")) <= 4000


def test_a_scratch_that_is_full_costs_the_last_instruction_only(service, project, monkeypatch):
    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("penstock.executor.node.agent.write_mark", full)
    with running(service, project):
        start(service, ["hello", "wait now", "die 9"])
        service.wait_for("started")
        (project / "now").touch()
        (failed,) = service.wait_for("rank_failed")
    assert (failed.data["signal"], failed.data["instruction"]) == (9, None)


def test_an_alive_file_is_touched_again_and_again(service, project, monkeypatch):
    monkeypatch.setattr("penstock.executor.node.agent.ALIVE_EVERY_S", 0.05)
    alive = project / "alive"
    with running(service, project, alive_file=alive):
        for _ in range(2):
            alive.unlink(missing_ok=True)
            limit = time.monotonic() + LIMIT_S
            while not alive.exists():
                assert time.monotonic() < limit, "it was never touched again"
                time.sleep(0.01)
