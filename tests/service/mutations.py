"""Documents that are almost good: each is a sample with one to three changes that people, programs and attackers make.

The same seed gives the same documents.
"""

from __future__ import annotations

import copy
import gzip
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from penstock.examples.tiny import tiny_plan_file, tiny_profile, tiny_request, tiny_sweep, tiny_topology
from penstock.service.http.routes.agents import SYNC_EXAMPLE
from penstock.service.http.routes.runs import RUN_EXAMPLE

SAMPLES: dict[str, Any] = {
    "/v1/plans:validate": tiny_request() | {"planner": "gpipe"},
    "/v1/plans": tiny_request() | {"planner": "gpipe"},
    "/v1/plans:verify": tiny_plan_file(),
    "/v1/plans:simulate": tiny_plan_file(),
    "/v1/plans:explain": tiny_plan_file(),
    "/v1/profiles": tiny_profile(),
    "/v1/topologies": tiny_topology(),
    "/v1/sweeps": tiny_sweep(),
    "/v1/runs": RUN_EXAMPLE,
    "/v1/agents/mutant:sync": SYNC_EXAMPLE,
}
WEIGHTS = {"/v1/plans:explain": 0.1}
"""Targets that start a process for each document are tried less often; all others have weight 1."""

ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**53 - 1,
    2**53,
    2**63,
    2**64,
    -(2**70),
    10**400,
    0.5,
    -0.0,
    1e308,
    5e-324,
    float("nan"),
    float("inf"),
    "",
    " ",
    "\0",
    "\ud800",
    "\u202e\U0001f6b0",
    "a" * 5000,
    "16",
    "25 Gbit/s",
    "sha256:",
    "sha256:" + "7" * 64,
    "../../etc/passwd",
    "file:///etc/passwd",
    "{0.__class__}",
    "'; DROP TABLE jobs; --",
    "(F0)*99999999999",
    "F0 F0 B0",
    [],
    [[]],
    [0, 0],
    [1, 0],
    {},
    {"": {}},
    {"__proto__": 1},
)
WORDS = ("auto", "gpipe", "dapple", "madpipe", "exact", "synchronous", "always", "shared", "V100", "node0/0", "cpu")


@dataclass(frozen=True)
class Mutant:
    """One request that should be answered or refused."""

    path: str
    body: bytes
    headers: dict[str, str]
    changes: tuple[str, ...]


def mutants(seed: int, count: int) -> Iterator[Mutant]:
    """Yield ``count`` requests."""
    rng = random.Random(seed)
    paths = list(SAMPLES)
    weights = [WEIGHTS.get(path, 1.0) for path in paths]
    for _ in range(count):
        path = rng.choices(paths, weights)[0]
        document = copy.deepcopy(SAMPLES[path])
        changes = sorted(
            rng.choices(list(CHANCES), CHANCES.values(), k=rng.choices((1, 2, 3), (6, 2, 1))[0]), key="deep".__eq__
        )  # it cannot be copied
        for name in changes:
            document = CHANGES[name](rng, document)
        spoiling = rng.choices(list(SPOILINGS), [12, 1, 1, 1, 1, 1])[0]
        body, headers = SPOILINGS[spoiling](rng, document)
        yield Mutant(path, body, headers, (*changes, spoiling))


# ---- of the document -------------------------------------------------------------------------------------------------


def _places(document: Any) -> list[tuple[Any, Any]]:
    """Return every container with each of its keys."""
    places: list[tuple[Any, Any]] = []
    left = [document]
    while left:
        here = left.pop()
        keys = list(here) if isinstance(here, dict) else list(range(len(here))) if isinstance(here, list) else []
        places += [(here, key) for key in keys]
        left += [here[key] for key in keys]
    return places


def _at_one_place(change: Callable[[random.Random, Any, Any], None]) -> Callable[[random.Random, Any], Any]:
    def changed(rng: random.Random, document: Any) -> Any:
        places = _places(document)
        if places:
            change(rng, *rng.choice(places))
        return document

    return changed


def _odd(rng: random.Random, here: Any, key: Any) -> None:
    here[key] = copy.deepcopy(rng.choice(ODD))


def _word(rng: random.Random, here: Any, key: Any) -> None:
    here[key] = rng.choice(WORDS)


def _number(rng: random.Random, here: Any, key: Any) -> None:
    if isinstance(here[key], int | float):
        here[key] = rng.choice((-here[key], here[key] * 1000, here[key] / 7, here[key] + 1, str(here[key])))
    else:
        here[key] = rng.randint(-10, 10)


def _missing(rng: random.Random, here: Any, key: Any) -> None:
    del here[key]


def _doubled(rng: random.Random, here: Any, key: Any) -> None:
    if isinstance(here, list):
        here.extend([copy.deepcopy(here[key])] * rng.choice((1, 2, 50)))
    else:
        here[str(key) + "_"] = copy.deepcopy(here[key])


def _wrapped(rng: random.Random, here: Any, key: Any) -> None:
    here[key] = rng.choice(([here[key]], {"value": here[key]}))


def _deep(rng: random.Random, here: Any, key: Any) -> None:
    value: Any = 1
    for _ in range(rng.choice((20, 200, 300))):
        value = rng.choice(([value], {"a": value}))
    here[key] = value


def _swapped(rng: random.Random, document: Any) -> Any:
    """Swap two values of the document."""
    places = _places(document)
    if len(places) > 1:
        (one, a), (other, b) = rng.sample(places, 2)
        one[a], other[b] = copy.deepcopy(other[b]), copy.deepcopy(one[a])
    return document


def _another(rng: random.Random, document: Any) -> Any:
    """Return a good document of another kind."""
    return copy.deepcopy(rng.choice(list(SAMPLES.values())))


CHANCES = {
    "odd": 6,
    "word": 3,
    "number": 6,
    "missing": 2,
    "doubled": 2,
    "wrapped": 1,
    "deep": 1,
    "swapped": 2,
    "another": 1,
}
"""Relative frequency of each change."""

CHANGES: dict[str, Callable[[random.Random, Any], Any]] = {
    "odd": _at_one_place(_odd),
    "word": _at_one_place(_word),
    "number": _at_one_place(_number),
    "missing": _at_one_place(_missing),
    "doubled": _at_one_place(_doubled),
    "wrapped": _at_one_place(_wrapped),
    "deep": _at_one_place(_deep),
    "swapped": _swapped,
    "another": _another,
}


# ---- of its text -----------------------------------------------------------------------------------------------------

JSON = {"Content-Type": "application/json"}


def _text(document: Any) -> bytes:
    return json.dumps(document).encode()


def _whole(rng: random.Random, document: Any) -> tuple[bytes, dict[str, str]]:
    return _text(document), JSON


def _truncated(rng: random.Random, document: Any) -> tuple[bytes, dict[str, str]]:
    text = _text(document)
    return text[: rng.randrange(len(text) + 1)], JSON


def _flipped(rng: random.Random, document: Any) -> tuple[bytes, dict[str, str]]:
    text = bytearray(_text(document) or b" ")
    for _ in range(rng.randint(1, 8)):
        text[rng.randrange(len(text))] = rng.randrange(256)
    return bytes(text), JSON


def _twice(rng: random.Random, document: Any) -> tuple[bytes, dict[str, str]]:
    """Write the first key of every object twice."""
    return _text(document).replace(b'{"', b'{"schema_version": 1, "schema_version": 1, "', rng.choice((1, -1))), JSON


def _zipped(rng: random.Random, document: Any) -> tuple[bytes, dict[str, str]]:
    zipped = gzip.compress(_text(document))
    cut = rng.choice((len(zipped), rng.randrange(len(zipped))))
    return zipped[:cut], JSON | {"Content-Encoding": rng.choice(("gzip", "deflate", "br"))}


def _typed(rng: random.Random, document: Any) -> tuple[bytes, dict[str, str]]:
    kinds = (
        "text/plain",
        "application/xml",
        "application/msgpack",
        "application/json; charset=utf-16",
        "nonsense",
        "application/x+json",
    )
    return _text(document), {"Content-Type": rng.choice(kinds)}


SPOILINGS: dict[str, Callable[[random.Random, Any], tuple[bytes, dict[str, str]]]] = {
    "whole": _whole,
    "truncated": _truncated,
    "flipped": _flipped,
    "twice": _twice,
    "zipped": _zipped,
    "typed": _typed,
}
