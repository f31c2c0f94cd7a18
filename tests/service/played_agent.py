"""An agent that a test plays itself, as seen from the wire."""

from __future__ import annotations

import time
from typing import Any

import httpx

from penstock.schemas.api.agents import AgentEvent, Assignment, SyncReply


class Agent:
    """One incarnation of an agent, as seen from the wire."""

    def __init__(self, url: str, name: str, *, devices: int = 1, models: tuple[str, ...] = ("gpt",)) -> None:
        self.http = httpx.Client(base_url=url, timeout=40)
        self.name, self.models = name, models
        self.devices = [{"id": f"{name}/{i}", "kind": "cpu", "memory_bytes": 10**9} for i in range(devices)]
        self.incarnation = f"{name}-{time.monotonic_ns()}"
        self.version = self.sequence = 0
        self.events: list[AgentEvent] = []

    def sync(self, *, hold: bool = False, **changes: Any) -> SyncReply:
        """Call once; remember what was acknowledged."""
        answer = self.post(hold=hold, **changes)
        assert answer.status_code == 200, answer.text
        reply = SyncReply.model_validate_json(answer.content)
        self.version = reply.state_version
        self.events = [event for event in self.events if event.sequence > reply.ack]
        return reply

    def post(self, *, hold: bool = False, **changes: Any) -> httpx.Response:
        body = {
            "incarnation": self.incarnation,
            "state_version": self.version,
            "devices": self.devices,
            "models": self.models,
            "address": "127.0.0.1",
            "events": [event.model_dump() for event in self.events],
            "hold": hold,
        }
        return self.http.post(f"/v1/agents/{self.name}:sync", json=body | changes)

    def tell(self, kind: str, run: str, generation: int = 1, **data: Any) -> None:
        """Note an event for the next call."""
        self.sequence += 1
        self.events.append(
            AgentEvent.model_validate(
                {"sequence": self.sequence, "kind": kind, "run": run, "generation": generation, "data": data}
            )
        )

    def assignment(self, run: str) -> Assignment | None:
        """Return its assignment for a run."""
        return next((one for one in self.sync().assignments if one.run == run), None)


def prepare(agents: list[Agent], run: str, generation: int = 1) -> None:
    """Bring a generation of a run to its start."""
    agents[0].tell("store_ready", run, generation, address="127.0.0.1:4321")
    for agent in agents:
        agent.tell("prepared", run, generation)
        agent.sync()
