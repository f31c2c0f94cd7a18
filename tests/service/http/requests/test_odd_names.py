"""Names and ids that no database likes, on both engines: refused or not found, never a fault of the service."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import quote

import pytest
from in_process import in_process

from penstock.examples.tiny import tiny_profile, tiny_request

ODD = ("\0", "a\0b", "\ud7ff", "\u202e", "x" * 120, "' OR 1=1 --", "%", "_")
PATHS = (
    "/v1/plans/{}",
    "/v1/jobs/{}",
    "/v1/plans/{}/plan-file",
    "/v1/jobs/{}/events?poll=1",
    "/v1/jobs?tag={}",
    "/v1/jobs?cursor={}",
    "/v1/jobs?profile={}",
    "/v1/jobs?planner={}",
    "/v1/profiles/{}",
    "/v1/profiles?cursor={}",
    "/v1/topologies?cursor={}-{}",
    "/v1/sweeps/{}",
    "/v1/sweeps?cursor={}",
    "/v1/runs/{}",
    "/v1/runs?cursor={}",
)


@pytest.mark.tier("nightly")
def test_odd_names(tmp_path: Path, engine_url: str):
    asyncio.run(_ask(tmp_path, engine_url))


async def _ask(directory: Path, engine_url: str) -> None:
    async with in_process(directory, database=engine_url) as client:
        for path in PATHS:
            for odd in ODD:
                answer = await client.get(path.replace("{}", quote(odd, safe="")))
                assert answer.status_code in (200, 404, 422), (path, odd, answer.text)
        for odd in ODD:
            answer_to_plan = await client.post(
                "/v1/plans", json=tiny_request() | {"planner": "gpipe"}, params={"tag": odd}
            )
            assert answer_to_plan.status_code in (202, 422), (odd, answer_to_plan.text)
            kept = await client.post("/v1/profiles", json=tiny_profile() | {"name": odd})
            assert kept.status_code == 201, (odd, kept.text)
        names = {item["name"] for item in (await client.get("/v1/profiles")).json()["items"]}
        assert names >= {odd.replace("\0", "\N{REPLACEMENT CHARACTER}") for odd in ODD}
