"""Flags that say how ranks train, whoever starts them: the same for ``penstock run`` and ``penstock rank``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from penstock.schemas.api.run_options import RunOptions


class Precision(StrEnum):
    """Values of ``--precision``."""

    FP32 = "fp32"
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


Directory = Annotated[str | None, typer.Option(help="Where the training project lies.")]
Check = Annotated[bool, typer.Option("--check", help="Compare loss and gradients with a single process.")]
TraceSteps = Annotated[int, typer.Option("--trace-steps", min=1, help="How many of the last steps.")]
Transports = Annotated[Transport, typer.Option(help="What ranks send over; auto: by device.")]
Precisions = Annotated[Precision, typer.Option(help="Of the computation; fp16 scales the loss.")]
ClipNorm = Annotated[float | None, typer.Option(help="Largest norm of the whole gradient.")]
CheckpointEvery = Annotated[int, typer.Option(min=0, help="Steps between them; 0: at the end.")]
KeepCheckpoints = Annotated[int, typer.Option(min=1, help="How many of them are kept.")]
Resumes = Annotated[Resume | None, typer.Option(help="From the newest one; auto: or anew if there is none.")]
EvaluateEvery = Annotated[int, typer.Option(min=0, help="Steps between evaluations; 0: none.")]
Staleness = Annotated[int, typer.Option(min=0, max=1, help="Elastic averaging: age of the reference.")]
AdvanceForward = Annotated[
    bool, typer.Option("--advance-forward", help="Search while training how far forwards run ahead.")
]


def run_options(flags: Mapping[str, Any], place: Callable[[str | None], str | None]) -> RunOptions:
    """What a command's flags say of training; ``place``: a path as ranks are told it. Raises InvalidDocument."""
    from penstock.schemas.api.run_options import RunOptions

    same = ("clip_norm", "checkpoint_every", "keep_checkpoints", "evaluate_every", "staleness", "advance_forward")
    resume = flags["resume"]
    return RunOptions.parse(
        {name: flags[name] for name in same}
        | {
            "precision": Precision(flags["precision"]).value,
            "checkpoint_directory": place(flags["checkpoint"]),
            "resume": False if resume is None else {Resume.NEWEST: True, Resume.AUTO: "auto"}[Resume(resume)],
            "metrics_path": place(flags["metrics"]),
            "tensorboard_directory": place(flags["tensorboard"]),
        }
    )


def from_the_root(path: str | None) -> str | None:
    """Ranks run in the project's directory, so what they read or write has to be said from the root."""
    return None if path is None else str(Path(path).absolute())
