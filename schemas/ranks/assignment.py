"""The assignment of one rank, which a local run, an agent or a launcher gives it. Standard library alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

BoundarySizes = tuple[tuple[tuple[str, int, int], ...], ...]
"""The tensors of each cut: name, bytes per sample, bytes per sample of the gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAssignment:
    """The training of one rank, its peers and its place. Everyone who starts ranks states the fields without a default.

    ``programs``: this rank's, run one after the other (`schemas.program.Program.to_json`). With several,
    ``segments`` has the order of their numbers from ``first_step`` on (None: from step 0); without ``segments`` they
    are a ladder. Training goes up to step ``steps``. ``layers`` and ``boundaries`` are compared with the model (None:
    not compared). ``options``: `schemas.api.run_options.RunOptions` as JSON. ``job``: ``module:attribute``, found in
    ``directory``. Ranks meet at ``store`` (host:port) under ``prefix``; the rank that hosts it gets its socket's
    descriptor, ``listening``. ``device``: torch's name. ``timeout_s``: a peer silent for longer is taken for dead.
    ``outputs``: directories below which alone the run may write. ``mark``: the file that keeps the step and the index
    of the instruction (`executor.program.mark`). ``host``: ranks with the same text share a clock (None: this
    machine's). ``kinds_differ``: devices may be of other kinds than planned. ``count_memory``: count tensors, slowly.
    """

    rank: int
    world_size: int
    programs: tuple[Mapping[str, Any], ...]
    segments: tuple[int, ...] | None
    steps: int
    job: str
    directory: str | None
    options: Mapping[str, Any]
    plan_hash: str | None
    layers: tuple[str, ...] | None
    boundaries: BoundarySizes | None
    seed: int
    check: bool
    trace_steps: int
    store: str
    prefix: str
    device: str
    transport: str = "auto"
    first_step: int | None = None
    timeout_s: float | None = None
    outputs: tuple[str, ...] | None = None
    listening: int | None = None
    mark: str | None = None
    host: str | None = None
    kinds_differ: bool = False
    count_memory: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the fields for ``json.dumps``."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the assignment that ``to_json`` wrote. Raises TypeError for other fields."""
        return cls(**{name: _as_tuples(value) for name, value in data.items()})


def _as_tuples(value: Any) -> Any:
    """Return lists, and the lists in them, as tuples; objects stay as they are."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
