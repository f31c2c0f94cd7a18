"""Assignments of ranks, with values for all that a test does not care about."""

from __future__ import annotations

from typing import Any

from penstock.schemas.ranks.assignment import RankAssignment

PLAIN: dict[str, Any] = {
    "rank": 0,
    "world_size": 1,
    "programs": (),
    "segments": None,
    "steps": 1,
    "job": "",
    "directory": None,
    "options": {},
    "plan_hash": None,
    "layers": None,
    "boundaries": None,
    "seed": 5,
    "check": False,
    "trace_steps": 0,
    "store": "",
    "prefix": "",
    "device": "cpu",
}


def assigned(**fields: Any) -> RankAssignment:
    """Return an assignment with these fields."""
    return RankAssignment.from_json(PLAIN | fields)
