"""Placement of ranks on agents: a plan's devices are the agents' devices, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.schemas.api.agents import AgentOut
from penstock.schemas.errors import Conflict

ANY_MODEL = "*"


@dataclass(frozen=True)
class Place:
    """A device as its agent names it."""

    agent: str
    device: str


def place(devices: Sequence[str], agents: Iterable[AgentOut], model: str, busy: Mapping[Place, str]) -> list[Place]:
    """Return the place of each of a plan's devices: the device of this name, or ``device`` of agent ``node``.

    ``busy`` names the run that a device belongs to now. Raises Conflict when a device is missing or taken, or when an
    agent does not have the model.
    """
    alive = [agent for agent in agents if agent.alive]
    place_of: dict[str, Place] = {}
    for agent in alive:
        for device in agent.devices:
            place_of[f"{agent.id}/{device.id}"] = place_of[device.id] = Place(agent.id, device.id)
    missing = [device for device in devices if device not in place_of]
    if missing:
        offered = sorted({device.id for agent in alive for device in agent.devices})
        raise Conflict(
            f"no living agent offers {_some(missing)}; "
            + (f"offered are {_some(offered)}" if offered else "no agent offers a device"),
            remedy="start `penstock agent` under the node's name on each node of the plan, or plan for the devices "
            "that GET /v1/agents lists",
        )
    places = [place_of[device] for device in devices]
    occupied = [(device, busy[spot]) for device, spot in zip(devices, places, strict=True) if spot in busy]
    if occupied:
        raise Conflict(
            f"device {occupied[0][0]!r} is in use by run {occupied[0][1]!r}",
            remedy=f"wait until the run ends, or POST /v1/runs/{occupied[0][1]}:cancel",
        )
    used = {spot.agent for spot in places}
    for agent in alive:
        if agent.id in used and model not in agent.models and ANY_MODEL not in agent.models:
            raise Conflict(
                f"agent {agent.id!r} has no model {model!r} in its configuration; it has {_some(sorted(agent.models))}",
                remedy=f"start the agent with --job {model}=module:attribute, or name a model that it has",
            )
    return places


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:8]))
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown or "none"
