"""A checkpoint that two ranks have written, and its forgery: what someone makes who may write to the directory."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import run_jobs
from pipelines import Part, programs_of
from rank_pool import RankPool

from penstock.executor.checkpoints.checkpoint import INDEX, MARKER, _own_digest

TWO = [Part(3, (0,)), Part(3, (1,))]


def run(pool: RankPool, directory: Path, steps: int, **options: Any) -> list[dict[str, Any]]:
    """Train ``run_jobs.momentum`` on two ranks with checkpoints; the last events of the ranks."""
    programs = programs_of(run_jobs.momentum, TWO, 4)
    options = {"checkpoint_directory": str(directory), "checkpoint_every": 1, **options}
    return pool.train(programs, "run_jobs:momentum", steps=steps, check=False, options=options)


def sign(step: Path) -> None:
    """Rewrite the marker with lengths and digests of the present files."""
    marker = json.loads((step / MARKER).read_text())
    files = {one.name: one.read_bytes() for one in step.iterdir() if one.name != MARKER}
    marker["files"] = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()
    }
    sign_marker(step, marker)


def sign_marker(step: Path, marker: dict[str, Any]) -> None:
    """Write a marker with its digest."""
    marker.pop("sha256", None)
    (step / MARKER).write_text(json.dumps(marker | {"sha256": _own_digest(marker)}))


def put(step: Path, entry: str, data: bytes) -> None:
    """Make an entry consist of these bytes, which are put at the end of the file that it is in."""
    entries = json.loads((step / INDEX).read_text())
    chunk = entries[entry]["chunks"][0]
    file = step / chunk["file"]
    chunk["at"] = [file.stat().st_size, len(data)]
    with file.open("ab") as stream:
        stream.write(data)
    (step / INDEX).write_text(json.dumps(entries))
    sign(step)
