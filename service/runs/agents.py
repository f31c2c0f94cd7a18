"""Service side of the sync protocol (``schemas.api.agents``): the agents, their reports, and their assignments."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import sqlalchemy as sa
from anyio.to_thread import run_sync

from penstock.schemas.api.agents import AgentOut, LogRequest, LogTail, SyncReply, SyncRequest
from penstock.schemas.errors import Conflict, Unreachable
from penstock.service.db.database import Database
from penstock.service.db.notifier import Listener, Notifier
from penstock.service.db.tables import agents, iso, now_ms, run_agents, runs
from penstock.service.runs.listening import ListeningClock
from penstock.service.runs.run_rows import topic_of
from penstock.service.runs.runs import Runs

RETRY_S = 10.0
"""An agent in good health calls again within a few seconds."""

LOG_LIMIT_S = 10.0
"""Longest wait for an agent to send the end of a log, in seconds."""

REDIAL_S = 2.0
"""An agent with news drops its waiting call and makes a new one: a connection that ended may mean just that."""


@dataclass
class Contact:
    """The contacts of this process with an incarnation. ``last``: the time of its last call, by ``clock``.

    ``waiting_call`` is its call that waits for news. ``gone``: its last connection ended without an answer. ``left``:
    it
    said goodbye. ``log_requests``: ends of logs that a request waits for.
    """

    incarnation: str
    clock: ListeningClock
    last: float
    calls: int = 0
    waiting_call: Listener | None = None
    gone: bool = False
    left: bool = False
    log_requests: dict[int, tuple[LogRequest, asyncio.Future[LogTail]]] = field(default_factory=dict)

    def alive(self) -> bool:
        """Return whether the agent may be given work."""
        return not self.left and (self.waiting_call is not None or self._age_s() < (REDIAL_S if self.gone else RETRY_S))

    def keeps_name(self) -> bool:
        """Return whether another incarnation of the agent's name has to wait."""
        return not (self.left or self.gone) and (self.waiting_call is not None or self._age_s() < RETRY_S)

    def _age_s(self) -> float:
        return self.clock.now() - self.last

    def release(self) -> None:
        """Wake the call that waits, so that it is answered."""
        if self.waiting_call is not None:
            self.waiting_call.wake()


class Agents:
    """The registry of agents. Its coroutines belong to one event loop, whose clock is ``clock``."""

    def __init__(
        self,
        database: Database,
        notifier: Notifier,
        runs: Runs,
        *,
        hold_s: float,
        timeout_s: float,
        clock: ListeningClock,
    ) -> None:
        self._database, self._notifier, self._runs = database, notifier, runs
        self._hold_s, self._timeout_s = hold_s, timeout_s
        self._clock, self._started = clock, clock.now()
        self._contacts: dict[tuple[str, str], Contact] = {}
        """Contacts by tenant and name."""
        self._log_requests_made = 0

    async def sync(
        self, tenant: str, agent_id: str, request: SyncRequest, hung_up: Callable[[], Awaitable[None]]
    ) -> SyncReply:
        """Answer one call of a tenant's agent; ``hung_up`` returns when its connection is gone.

        Raises Conflict when another incarnation of the name is alive.
        """
        contact = self._meet(tenant, agent_id, request.incarnation)
        contact.calls += 1
        call = contact.calls
        for tail in request.log_tails:
            self._hand_over(contact, tail)
        with self._notifier.listen(topic_of(tenant, agent_id)) as listener:
            if request.leaving:
                contact.left = True
                contact.release()
            reply = await run_sync(self._accept, tenant, agent_id, request)
            is_news = reply.state_version != request.state_version or bool(contact.log_requests)
            if request.leaving or request.events or not request.hold or is_news:
                return _with_log_requests(reply, contact)
            if call == contact.calls:
                await self._hold(contact, call, listener, hung_up)
        return _with_log_requests(await run_sync(self._reply, tenant, agent_id), contact)

    async def log_tail(
        self, tenant: str, agent_id: str, run: str, generation: int, rank: int, max_bytes: int
    ) -> LogTail:
        """Return the end of a rank's log, from its agent. Raises Conflict when it is away, Unreachable if silent."""
        contact = self._contacts.get((tenant, agent_id))
        if contact is None or not contact.alive():
            raise Conflict(
                f"agent {agent_id!r} is not connected, so it cannot send the log of rank {rank}",
                remedy=f"look into the agent's log_directory on its node, under {run}/{generation}",
            )
        self._log_requests_made += 1
        request = LogRequest(
            number=self._log_requests_made, run=run, generation=generation, rank=rank, max_bytes=max_bytes
        )
        answer: asyncio.Future[LogTail] = asyncio.get_running_loop().create_future()
        contact.log_requests[request.number] = request, answer
        contact.release()
        try:
            return await asyncio.wait_for(answer, LOG_LIMIT_S)
        except TimeoutError:
            raise Unreachable(
                f"agent {agent_id!r} has not sent the log of rank {rank} within {LOG_LIMIT_S:g} s"
            ) from None
        finally:
            contact.log_requests.pop(request.number, None)

    def is_lost(self, tenant: str, agent_id: str, incarnation: str) -> bool:
        """Return whether an incarnation of an agent has left, was replaced, or has been silent for too long."""
        return self._loss(tenant, agent_id, incarnation) is not None

    def _loss(self, tenant: str, agent_id: str, incarnation: str) -> str | None:
        """Return how an incarnation of an agent was lost, in words; None while it may be there."""
        contact = self._contacts.get((tenant, agent_id))
        last_sync = self._started if contact is None else contact.last
        if contact is not None and contact.incarnation != incarnation:
            return "was restarted"
        if contact is not None and contact.left:
            return "left"
        if contact is not None and contact.waiting_call is not None:
            return None
        is_silent = self._clock.now() - last_sync > self._timeout_s
        return f"was silent for more than {self._timeout_s:g} s" if is_silent else None

    async def watch(self) -> None:
        """End the generations of agents that have gone silent; for ever."""
        while True:
            await asyncio.sleep(min(1.0, self._timeout_s / 4))
            for tenant, agent_id, how in await run_sync(self._lost):
                await run_sync(self._runs.agent_lost, tenant, agent_id, how)

    def _hand_over(self, contact: Contact, tail: LogTail) -> None:
        request = contact.log_requests.pop(tail.number, None)
        if request is not None and not request[1].done():
            request[1].set_result(tail)

    def everybody(self, tenant: str) -> list[AgentOut]:
        """Return all agents of a tenant that have ever synced, by name."""
        with self._database.read() as connection:
            query = sa.select(agents).where(agents.c.tenant == tenant).order_by(agents.c.id)
            rows = connection.execute(query).mappings().all()
            runs_of_agents = connection.execute(
                sa.select(run_agents.c.agent, run_agents.c.run_id)
                .join(runs, runs.c.id == run_agents.c.run_id)
                .where(runs.c.tenant == tenant, run_agents.c.phase != "released")
                .order_by(run_agents.c.run_id)
            ).all()
        return [
            AgentOut(
                id=row["id"],
                incarnation=row["incarnation"],
                alive=(contact := self._contacts.get((tenant, row["id"]))) is not None and contact.alive(),
                last_seen=iso(row["last_seen_ms"]),
                address=row["address"],
                probe_address=row["probe_address"],
                devices=row["devices"],
                models=row["models"],
                runs=tuple(run for agent, run in runs_of_agents if agent == row["id"]),
            )
            for row in rows
        ]

    async def _hold(
        self, contact: Contact, call: int, listener: Listener, hung_up: Callable[[], Awaitable[None]]
    ) -> None:
        """Wait for a change, a newer call, the end of the hold, or the end of the connection."""
        contact.release()
        contact.waiting_call = listener
        gone = asyncio.ensure_future(hung_up())
        news = asyncio.ensure_future(listener.wait(self._hold_s))
        try:
            await asyncio.wait({gone, news}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if contact.waiting_call is listener:
                contact.waiting_call = None
            if call == contact.calls:
                contact.gone = gone.done() and not news.done()
            for task in (gone, news):
                task.cancel()
            contact.last = self._clock.now()

    def _meet(self, tenant: str, agent_id: str, incarnation: str) -> Contact:
        contact = self._contacts.get((tenant, agent_id))
        if contact is not None and contact.incarnation == incarnation:
            contact.last, contact.gone = self._clock.now(), False
            return contact
        if contact is not None and contact.keeps_name():
            raise Conflict(
                f"another process already runs as agent {agent_id!r} (incarnation {contact.incarnation!r})",
                remedy=f"give this agent another name, or end the other process and wait {RETRY_S:.0f} s",
            )
        self._contacts[tenant, agent_id] = contact = Contact(incarnation, self._clock, self._clock.now())
        return contact

    def _accept(self, tenant: str, agent_id: str, request: SyncRequest) -> SyncReply:
        """Store the call and its events in one transaction, and return the agent's assignments."""
        offer = {
            "incarnation": request.incarnation,
            "devices": [device.model_dump() for device in request.devices],
            "models": list(request.models),
            "address": request.address,
            "probe_address": request.probe_address,
            "last_seen_ms": now_ms(),
        }
        with self._database.write() as connection:
            here = sa.and_(agents.c.tenant == tenant, agents.c.id == agent_id)
            row = connection.execute(sa.select(agents).where(here)).mappings().first()
            ack = 0
            if row is None:
                new = {"tenant": tenant, "id": agent_id, "ack": 0, "state_version": now_ms()}
                connection.execute(agents.insert().values(**new, **offer))
            elif row["incarnation"] != request.incarnation:
                self._runs.lose_agent(connection, tenant, agent_id, "was restarted", replaced=True)
                connection.execute(agents.update().where(here).values(ack=0, **offer))
            else:
                ack = row["ack"]
                connection.execute(agents.update().where(here).values(**offer))
            for event in request.events:
                if event.sequence > ack:
                    self._runs.take(connection, tenant, agent_id, event)
                    ack = event.sequence
            if request.events:
                connection.execute(agents.update().where(here).values(ack=ack))
            return self._runs.reply(connection, tenant, agent_id)

    def _reply(self, tenant: str, agent_id: str) -> SyncReply:
        with self._database.read() as connection:
            return self._runs.reply(connection, tenant, agent_id)

    def _lost(self) -> list[tuple[str, str, str]]:
        """Return the lost agents with ranks, and how each was lost; silence counts from the start of this service."""
        query = (
            sa.select(runs.c.tenant, run_agents.c.agent, run_agents.c.incarnation)
            .join(run_agents, run_agents.c.run_id == runs.c.id)
            .where(run_agents.c.phase.not_in(("released", "save", "stop")))
            .distinct()
        )
        with self._database.read() as connection:
            busy = connection.execute(query).all()
        return sorted((tenant, agent, how) for tenant, agent, one in busy if (how := self._loss(tenant, agent, one)))


def _with_log_requests(reply: SyncReply, contact: Contact) -> SyncReply:
    requests = tuple(request for request, _ in contact.log_requests.values())
    return reply.model_copy(update={"log_wishes": requests}) if requests else reply
