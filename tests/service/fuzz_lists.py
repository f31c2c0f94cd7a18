"""Fuzzer that sends long lists of wrong values at every field of every body.

Usage: ``python tests/service/fuzz_lists.py --bodies 10000``.

Each has to be answered soon and briefly, whatever it is answered.
"""

# ruff: noqa: T201  (it is a command as well)

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from in_process import in_process

MOST_S = 2.0
MOST_BYTES = 100_000
LONGEST_BYTES = 2**18
"""Most bytes of the list in a body."""

CHILDREN = (
    "/v1/plans:explain",
    "/v1/plans:compare",
    "/v1/topologies:import",
    "/v1/placements",
    "/v1/profiles:calibrate",
    "/v1/profiles:calibrate-throughput",
)
"""Routes whose requests start a process, which is slow by itself: only their refusals are timed."""

VALUES: tuple[Any, ...] = (
    *(0, -1, 2**53, 0.5, True, None, "", "a", "node0/0", "25 Gbit/s", "\0", [], [0], ["a", 1], {}, {"a": []}),
    *({"id": 0}, {"name": "", "devices": [0, ""]}, {"sequence": "a", "data": [1]}, "\u202e", "a" * 300, "NaN", "twice"),
)
Place = tuple[str | int, ...]


@dataclass
class Findings:
    """The result of a run."""

    answers: Counter[int] = field(default_factory=Counter)
    slowest: tuple[float, str, str] = (0.0, "", "")
    """Seconds, and which body took them."""
    longest: tuple[int, str, str] = (0, "", "")
    """Bytes, and what was answered with them."""
    paths: set[str] = field(default_factory=set)
    cut: int = 0
    """Answers that say how many faults they do not list."""


def targets(openapi: dict[str, Any]) -> list[tuple[str, Any, list[Place]]]:
    """Return path, good body, and every place of the body's schema, of each route that takes a body."""
    routes = []
    for path, methods in openapi["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json")
        if content is not None:
            places = sorted(set(_places(content["schema"], openapi["components"]["schemas"], ())), key=str)
            routes.append((path.replace("{id}", "node0"), content["example"], places))
    return routes


def _places(schema: dict[str, Any], models: dict[str, Any], met: tuple[str, ...]) -> Iterator[Place]:
    """Yield every step from a document to one of its fields; the first item of a list stands for all of them."""
    if (name := schema.get("$ref", "").rpartition("/")[2]) and name not in met:
        yield from _places(models[name], models, (*met, name))
    for one in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _places(one, models, met)
    for name, one in schema.get("properties", {}).items():
        yield (name,)
        yield from ((name, *more) for more in _places(one, models, met))
    if "items" in schema:
        yield (0,)
        yield from ((0, *more) for more in _places(schema["items"], models, met))


def bodies(openapi: dict[str, Any], seed: int, count: int) -> Iterator[tuple[str, str, bytes]]:
    """Yield ``count`` paths, the changes of their bodies, and the bodies: every path in turn, its places at random."""
    rng = random.Random(seed)
    routes = targets(openapi)
    for number in range(count):
        path, good, places = routes[number % len(routes)]
        place = rng.choice(places)
        values = rng.sample(VALUES, rng.choice((1, 1, 1, 3)))
        unit = max(1, len(json.dumps(values)))
        times = max(1, int(rng.choice((0.02, 0.1, 0.3, 1.0)) * LONGEST_BYTES) // unit)
        text = json.dumps(_with(good, place, ["LIST"])).encode()
        items = json.dumps(values * times)[1:-1].replace('"NaN"', "NaN").replace('"twice"', '{"a":1,"a":1}')
        yield path, f"{'/'.join(map(str, place))} = {times} times {values}", text.replace(b'"LIST"', items.encode())


def _with(good: Any, place: Place, value: Any) -> Any:
    """Return a copy of a body with another value at a place; missing containers on the way are created."""
    body = here = copy.deepcopy(good)
    for step, following in zip(place, [*place[1:], None], strict=True):
        fresh = value if following is None else [] if isinstance(following, int) else {}
        if isinstance(here, list):
            here[:] = here or [fresh]
            step = 0
        if following is None or not isinstance(here[step] if isinstance(here, list) else here.get(step), type(fresh)):
            here[step] = fresh
        here = here[step]
    return body


async def fuzz(seed: int, count: int, directory: Path) -> Findings:
    """Send ``count`` bodies, one after the other."""
    findings = Findings()
    async with in_process(directory, max_solve_s=10) as client:
        openapi = (await client.get("/openapi.json")).json()
        for path, what, body in bodies(openapi, seed, count):
            began = time.process_time()
            answer = await client.post(path, content=body, headers={"Content-Type": "application/json"})
            took_s = time.process_time() - began
            findings.answers[answer.status_code] += 1
            findings.paths.add(path)
            if answer.status_code >= 400:
                findings.cut += "not listed" in answer.text
                findings.longest = max(findings.longest, (len(answer.content), f"{path} {what}", answer.text[:300]))
            if answer.status_code >= 400 or path not in CHILDREN:
                findings.slowest = max(
                    findings.slowest, (took_s, f"{path} {what} {answer.status_code}", answer.text[:300])
                )
    return findings


def main() -> int:
    """Print the findings; return 1 where a body took too long, or had too long an answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bodies", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        findings = asyncio.run(fuzz(options.seed, options.bodies, Path(directory)))
    print(
        f"{sum(findings.answers.values())} bodies: {dict(sorted(findings.answers.items()))}, "
        f"{findings.cut} reports were cut"
    )
    print(f"slowest: {findings.slowest[0]:.2f} s of this process, {findings.slowest[1]}: {findings.slowest[2]}")
    print(f"longest: {findings.longest[0]} bytes, {findings.longest[1]}: {findings.longest[2]}")
    return int(findings.slowest[0] > MOST_S or findings.longest[0] > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
