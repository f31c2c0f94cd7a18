"""The agent of a node executes the decisions of `state`. It keeps one call open to the service and manages processes.

It loads no torch. Ranks continue to train while the service is away; they die with the agent, whatever kills it. When
the agent is asked to end, it lets the ranks save first, and keeps in contact with the service meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, urlsplit

import httpx
from pydantic import ValidationError

from penstock.executor.children import Child
from penstock.executor.devices import LocalDevice, discover
from penstock.executor.interfaces import interface_of, is_loopback
from penstock.executor.links.link_peer import Host, Peer
from penstock.executor.node.agent_state import ImpossibleStateError, Offer, State
from penstock.executor.node.rank_log import LogFile, log_path, prune, tail
from penstock.executor.node.settings import AgentSettings
from penstock.executor.node.state import step
from penstock.executor.node.stimuli import (
    CHECK,
    STORE,
    Action,
    ChildMessage,
    Drain,
    Exited,
    GraceOver,
    Process,
    SetTimer,
    Start,
    Stimulus,
    Stop,
    Synced,
)
from penstock.executor.node.tcp_store import join_address
from penstock.executor.program.mark import marked_instruction, write_mark
from penstock.schemas.api.agents import LogRequest, LogTail, SyncReply, SyncRequest
from penstock.schemas.errors import Conflict, PenstockError, Unreachable

HOLD_LIMIT_S = 45.0
FAREWELL_S = 3.0
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 5.0
PROGRESS_EVERY_S = 0.5
ALIVE_EVERY_S = 5.0
SHORTEST_HOLD_S = 0.2
MAX_REQUEST_BYTES = 8 * 2**20

Command = Callable[[Process], list[str]]


def penstock_command(process: Process) -> list[str]:
    """Return the command that starts a child: this interpreter, and the module that does its work."""
    module = {"check": "node.check_model", "store": "node.tcp_store", "rank": "run.rank_main"}[process.kind]
    return [sys.executable, "-P", "-m", f"penstock.executor.{module}"]


def run_agent(settings: AgentSettings) -> None:
    """Offer this machine to the service until SIGINT or SIGTERM, and leave no process behind.

    Writes a line to standard error whenever something changes. Raises Conflict when another agent of this name is
    alive, InvalidDocument without a device, Unreachable when the server is no Penstock service.
    """
    devices = discover(settings.name, cpu_devices=settings.cpu_devices, cpu_kind=settings.cpu_kind)
    asyncio.run(Agent(settings, devices, say=_to_stderr).run())


def _peer_of(settings: AgentSettings, devices: tuple[LocalDevice, ...]) -> Peer | None:
    """Create the peer that answers `penstock probe` on this node; None where the settings disable it."""
    if settings.probe_port < 0:
        return None
    host = Host(settings.name, tuple(device.offer for device in devices))
    return Peer(join_address(settings.address(), settings.probe_port), host)


def _to_stderr(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()


class Agent:
    """An agent: a state, its children, and the call to the service. ``command`` returns the command of a child."""

    def __init__(
        self,
        settings: AgentSettings,
        devices: tuple[LocalDevice, ...],
        *,
        say: Callable[[str], None],
        command: Command = penstock_command,
    ) -> None:
        self._settings = settings
        self._devices = {device.offer.id: device for device in devices}
        self._say = say
        self._command = command
        self._address = settings.address()
        self._interface = interface_of(self._address)
        self._peer = _peer_of(settings, devices)
        self._incarnation = secrets.token_hex(8)
        self._name_until = time.monotonic() + settings.name_wait_s
        self._state = State(
            Offer(
                settings.name,
                frozenset(self._devices),
                dict(settings.models),
                settings.allow_any_model,
                settings.outputs(),
                str(settings.directory.resolve()),
            )
        )
        self._children: dict[tuple[str, int, Process], Child] = {}
        self._news = asyncio.Event()
        self._is_leaving = False
        self._over = asyncio.Event()
        self._log_tails: tuple[LogTail, ...] = ()
        self._progress_timer: asyncio.TimerHandle | None = None
        self._was_synced = False
        self._service_is: Literal["unknown", "there", "away"] = "unknown"
        self._broken: ImpossibleStateError | None = None
        self._scratch = self._logs = Path()

    async def run(self) -> None:
        """Synchronize until asked to leave, then end the children and report the departure."""
        remove_handlers = self._on_signals()
        models = ", ".join(self._settings.model_keys())
        self._say(f"agent {self._settings.name}: {len(self._devices)} devices, models {models}, at {self._address}")
        answering = threading.Thread(target=self._peer.serve, name="penstock-probe") if self._peer is not None else None
        if answering is not None:
            answering.start()
        proxied = not is_loopback(urlsplit(self._settings.server).hostname or "")
        alive = asyncio.create_task(self._report_alive())
        with tempfile.TemporaryDirectory(prefix="penstock-agent-") as scratch:
            self._scratch = Path(scratch)
            self._logs = (self._settings.log_directory or self._scratch / "logs").resolve()
            try:
                async with httpx.AsyncClient(
                    base_url=self._settings.server,
                    timeout=httpx.Timeout(HOLD_LIMIT_S),
                    trust_env=proxied,
                    headers=self._settings.credentials(),
                    verify=self._settings.trusted(),
                ) as client:
                    await self._sync_until_over(client)
                    await self._say_goodbye(client)
            finally:
                alive.cancel()
                if self._peer is not None and answering is not None:
                    self._peer.close()
                    answering.join()
                remove_handlers()
                await self._end_children()
        if self._broken is not None:
            raise self._broken

    async def _report_alive(self) -> None:
        """Touch the alive file again and again, whether or not the service answers."""
        path = self._settings.alive_file
        while path is not None:
            try:
                path.touch()
            except OSError as error:
                self._say(f"the alive file {str(path)!r} cannot be touched: {error.strerror}")
                return
            await asyncio.sleep(ALIVE_EVERY_S)

    # The call to the service

    async def _sync_until_over(self, client: httpx.AsyncClient) -> None:
        wait_s = FIRST_WAIT_S
        while not self._over.is_set():
            request = self._request()
            begin = time.monotonic()
            try:
                reply = await self._ask(client, request)
                if reply is not None and request.events and reply.ack < request.events[0].sequence:
                    raise _Retry(f"it has not stored event {request.events[0].sequence}")
            except (httpx.TransportError, _Retry) as error:
                self._say_away(error)
                await _wait(self._over, wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
                continue
            wait_s = FIRST_WAIT_S
            if reply is None:
                continue
            self._say_back()
            self._log_tails = tuple(self._tail(request) for request in reply.log_wishes)
            self._apply(Synced(reply))
            nothing_new = request.hold and reply.state_version == request.state_version and not reply.log_wishes
            if nothing_new and time.monotonic() - begin < SHORTEST_HOLD_S:
                await _wait(self._over, SHORTEST_HOLD_S)

    async def _ask(self, client: httpx.AsyncClient, request: SyncRequest) -> SyncReply | None:
        """Make one call. Cancel it, and return None, at the end, or when it is held and there are events to send."""
        call = asyncio.create_task(self._post(client, request))
        interrupts = [self._over, self._news] if request.hold else [self._over]
        waits = [asyncio.create_task(event.wait()) for event in interrupts]
        try:
            await asyncio.wait({call, *waits}, return_when=asyncio.FIRST_COMPLETED)
            return await call if call.done() else None
        finally:
            for task in (call, *waits):
                task.cancel()
            await asyncio.gather(call, *waits, return_exceptions=True)

    def _request(self, *, leaving: bool = False) -> SyncRequest:
        self._news.clear()
        box, events = self._state.outbox.take(MAX_REQUEST_BYTES)
        self._state = replace(self._state, outbox=box)
        return SyncRequest(
            incarnation=self._incarnation,
            state_version=self._state.state_version,
            devices=tuple(device.offer for device in self._devices.values()),
            models=self._settings.model_keys(),
            address=self._address,
            probe_address=self._peer.address if self._peer is not None else None,
            events=events,
            log_tails=self._log_tails,
            hold=not (events or self._log_tails or leaving) and self._was_synced,
            leaving=leaving,
        )

    async def _post(self, client: httpx.AsyncClient, request: SyncRequest) -> SyncReply:
        path = f"/v1/agents/{quote(self._settings.name, safe='')}:sync"
        body = request.model_dump_json().encode()
        answer = await client.post(path, content=body, headers={"content-type": "application/json"})
        if answer.status_code != httpx.codes.OK:
            self._refuse_or_retry(answer)
        try:
            reply = SyncReply.model_validate_json(answer.content)
        except ValidationError as error:
            raise _Retry(f"its answer does not come from a Penstock service: {error.errors()[0]['msg']}") from None
        self._was_synced = True
        return reply

    def _refuse_or_retry(self, answer: httpx.Response) -> None:
        """Raise the error of an answer: _Retry for errors that may pass, otherwise the error that ends the agent."""
        name, server = self._settings.name, self._settings.server
        detail = _problem(answer)
        if answer.status_code == httpx.codes.CONFLICT:
            if not self._was_synced and time.monotonic() < self._name_until:
                raise _Retry(f"status 409: {detail}")
            raise Conflict(
                f"the service at {server} already has a living agent with the name {name!r}: {detail}",
                remedy="give this agent another --name, or stop the other agent",
            )
        if answer.status_code in (401, 403):
            raise Unreachable(
                f"{server} does not accept agent {name!r} (status {answer.status_code}): {detail}",
                remedy="give the agent a key that `penstock keys create --scope agent` has made: token in its "
                "settings, or "
                "PENSTOCK_AGENT_TOKEN",
            )
        is_ours = not self._was_synced
        if 400 <= answer.status_code < 500 and answer.status_code not in (408, 425, 429) and is_ours:
            raise Unreachable(
                f"{server} refused agent {name!r} with status {answer.status_code}: {detail}",
                remedy="check that --server is the address of `penstock serve`",
            )
        raise _Retry(f"status {answer.status_code}: {detail}")

    async def _say_goodbye(self, client: httpx.AsyncClient) -> None:
        """Send the remaining events, for a few seconds at most."""
        if not self._was_synced:
            return
        with contextlib.suppress(httpx.TransportError, TimeoutError, _Retry, PenstockError):
            async with asyncio.timeout(FAREWELL_S):
                self._apply(Synced(await self._post(client, self._request(leaving=True))))
                while self._state.outbox:
                    self._apply(Synced(await self._post(client, self._request(leaving=True))))

    def _say_away(self, error: Exception) -> None:
        if self._service_is != "away":
            what = str(error) or type(error).__name__
            running = "; what runs goes on" if self._state.is_living else ""
            self._say(f"no answer from {self._settings.server} ({what}); trying again every few seconds{running}")
        self._service_is = "away"

    def _say_back(self) -> None:
        if self._service_is != "there":
            self._say(f"{self._settings.server} answers")
        self._service_is = "there"

    # Execution of the state machine's decisions

    def _apply(self, stimulus: Stimulus) -> None:
        before = self._state.outbox
        try:
            self._state, actions = step(self._state, stimulus)
        except ImpossibleStateError as error:
            self._broken = self._broken or error
            self._over.set()
            return
        for action in actions:
            self._do(action)
        if self._is_leaving and not self._state.is_living:
            self._over.set()
        after = self._state.outbox
        if after.next_sequence > before.next_sequence:
            for event in after.events:
                if event.sequence >= before.next_sequence and event.kind not in ("progress", "trace"):
                    self._say(f"run {event.run}: {event.kind}{_in_short(event.data)}")
            self._news.set()
        elif after.waiting and self._progress_timer is None:
            self._progress_timer = asyncio.get_running_loop().call_later(PROGRESS_EVERY_S, self._report_progress)

    def _report_progress(self) -> None:
        self._progress_timer = None
        self._news.set()

    def _do(self, action: Action) -> None:
        match action:
            case Start():
                self._start(action)
            case Stop(run, generation, gently):
                for (other, of, process), child in self._children.items():
                    if (other, of) == (run, generation) and (process.kind == "rank" or not gently):
                        child.stop(self._settings.stop_grace_s) if gently else child.kill()
            case SetTimer(run, generation, delay_ns):
                loop = asyncio.get_running_loop()
                loop.call_later(delay_ns / 1e9, self._apply, GraceOver(run, generation))

    def _start(self, start: Start) -> None:
        key = run, generation, process = start.run, start.generation, start.process
        offer, assignment, device = self._state.offer, start.assignment, None
        if assignment is None:
            line = dict(start.arguments) | {"directory": offer.directory, "outputs": offer.outputs}
        else:
            device = self._devices[assignment.device]
            assignment = replace(
                assignment,
                device="cpu" if device.gpu is None else "cuda:0",
                timeout_s=self._settings.peer_timeout_s,
                mark=self._marked(self._scratch / f"{run}-{generation}-{process.rank}"),
            )
            line = assignment.to_json()

        def on_message(message: dict[str, Any]) -> None:
            self._apply(ChildMessage(run, generation, process, message))

        def on_exit(code: int, last_lines: tuple[str, ...]) -> None:
            del self._children[key]
            at = None
            if assignment is not None and assignment.mark is not None:
                at = marked_instruction(Path(assignment.mark), assignment.programs, assignment.segments or ())
            self._apply(Exited(run, generation, process, code, last_lines, at))

        command = self._command(process)
        prune(self._logs, self._settings.log_runs)
        self._children[key] = Child(
            [*command, self._address] if process == STORE else command,
            line=line,
            environment=self._environment(device),
            directory=offer.directory,
            limit_s=self._settings.prepare_limit_s if process == CHECK else None,
            log=LogFile(log_path(self._logs, run, generation, process), self._settings.log_bytes, self._say),
            on_message=on_message,
            on_exit=on_exit,
        )

    @staticmethod
    def _marked(mark: Path) -> str | None:
        """Create a mark. Return None on a full disk: the last instruction of a killed rank is then unknown."""
        try:
            write_mark(mark)
        except OSError:
            return None
        return str(mark)

    def _environment(self, device: LocalDevice | None) -> dict[str, str]:
        environment = dict(os.environ) | {"PYTHONUNBUFFERED": "1"}
        if self._interface is not None:
            for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                environment.setdefault(variable, self._interface)
        return environment | (device.environment() if device is not None else {})

    def _tail(self, request: LogRequest) -> LogTail:
        path = log_path(self._logs, request.run, request.generation, Process("rank", request.rank))
        text = tail(path, request.max_bytes)
        return LogTail(number=request.number, path=None if text is None else str(path), text=text or "")

    async def _end_children(self) -> None:
        """Kill the children that are left when the agent ends by an error."""
        for child in list(self._children.values()):
            child.kill()
        tasks = [child.task for child in self._children.values()]
        if tasks:
            await asyncio.gather(*tasks)

    def _on_signals(self) -> Callable[[], None]:
        """Leave on SIGINT or SIGTERM; a second signal kills at once. Only the main thread may handle signals."""
        if threading.current_thread() is not threading.main_thread():
            return lambda: None
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self.leave)

        def remove() -> None:
            for number in numbers:
                loop.remove_signal_handler(number)

        return remove

    def leave(self) -> None:
        """End the agent, after its ranks, which may save first. A second call kills them at once."""
        if self._is_leaving:
            for child in list(self._children.values()):
                child.kill()
            return
        self._say(f"agent {self._settings.name} is leaving")
        self._is_leaving = True
        self._apply(Drain("it was asked to end"))


class _Retry(Exception):
    """An answer of the service without the requested result; a later call may succeed."""


async def _wait(event: asyncio.Event, limit_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), limit_s)


def _problem(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200] or answer.reason_phrase


def _in_short(data: Mapping[str, Any]) -> str:
    if not data:
        return ""
    chosen = {key: data[key] for key in ("rank", "ranks", "reason", "signal", "address") if data.get(key) is not None}
    return " " + json.dumps(chosen) if chosen else ""
