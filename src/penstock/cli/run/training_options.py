"""Training options of both ``penstock run`` and ``penstock rank``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from penstock.cli.options import CHECKPOINTS, MEASUREMENT, TRAINING, shown
from penstock.schemas.options.running import RUN_OPTIONS

if TYPE_CHECKING:
    from penstock.schemas.api.run_options import RunOptions


class Precision(StrEnum):
    """Values of ``--precision``."""

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"


class Transport(StrEnum):
    """Values of ``--transport``."""

    AUTO = "auto"
    GLOO = "gloo"
    GLOO_STAGED = "gloo-staged"
    NCCL = "nccl"


class Resume(StrEnum):
    """Values of ``--resume``."""

    NEWEST = "newest"
    AUTO = "auto"


Steps = Annotated[int, shown(RUN_OPTIONS["steps"], min=1)]
Seed = Annotated[int, shown(RUN_OPTIONS["seed"], min=0)]
Transports = Annotated[Transport, shown(RUN_OPTIONS["transport"])]


@dataclass(frozen=True, kw_only=True)
class Training:
    """Options for the computation of the ranks."""

    PANEL: ClassVar[str] = TRAINING

    precision: Annotated[Precision, shown(RUN_OPTIONS["precision"])] = Precision.FP32
    clip_norm: Annotated[float | None, shown(RUN_OPTIONS["clip_norm"])] = None
    evaluate_every: Annotated[int, shown(RUN_OPTIONS["evaluate_every"], min=0)] = 0
    allow_nonfinite_loss: Annotated[bool, shown(RUN_OPTIONS["allow_nonfinite_loss"])] = False
    staleness: Annotated[int, shown(RUN_OPTIONS["staleness"], min=0, max=1)] = 0
    advance_forward: Annotated[bool, shown(RUN_OPTIONS["advance_forward"])] = False


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Options for what is saved, and where training resumes."""

    PANEL: ClassVar[str] = CHECKPOINTS

    checkpoint: Annotated[str | None, shown(RUN_OPTIONS["checkpoint"])] = None
    checkpoint_every: Annotated[int, shown(RUN_OPTIONS["checkpoint_every"], min=0)] = 0
    keep_checkpoints: Annotated[int, shown(RUN_OPTIONS["keep_checkpoints"], min=1)] = 2
    resume: Annotated[Resume | None, shown(RUN_OPTIONS["resume"])] = None


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Options for what is compared and recorded."""

    PANEL: ClassVar[str] = MEASUREMENT

    check: Annotated[bool, shown(RUN_OPTIONS["check"])] = False
    trace: Annotated[str | None, shown(RUN_OPTIONS["trace"])] = None
    trace_steps: Annotated[int, shown(RUN_OPTIONS["trace_steps"], min=1)] = 1
    metrics: Annotated[str | None, shown(RUN_OPTIONS["metrics"])] = None
    tensorboard: Annotated[str | None, shown(RUN_OPTIONS["tensorboard"])] = None


PATHS = ("checkpoint", "metrics", "tensorboard")
"""Options that are paths, which ranks open."""


def run_options(flags: Mapping[str, Any], place: Callable[[str | None], str | None]) -> RunOptions:
    """Return the training options of a command. Raises InvalidDocument.

    ``place`` turns a path into a path that ranks can open.
    """
    from penstock.schemas.api.run_options import RunOptions

    fields = {}
    for name, option in RUN_OPTIONS.items():
        if option.pointer.startswith("/options/"):
            value = place(flags[name]) if name in PATHS else flags[name]
            fields[option.pointer.removeprefix("/options/")] = value.value if isinstance(value, StrEnum) else value
    return RunOptions.parse(fields | {"resume": {None: False, "newest": True, "auto": "auto"}[fields["resume"]]})


def from_the_root(path: str | None) -> str | None:
    """Return the absolute path, since ranks run in the project's directory, not in the current one."""
    return None if path is None else str(Path(path).absolute())
