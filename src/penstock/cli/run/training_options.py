"""Training options of both ``penstock run`` and ``penstock rank``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from penstock.cli.options import CHECKPOINTS, LAUNCH, MEASUREMENT, TRAINING

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


Seed = Annotated[
    int, typer.Option(min=0, help="Seed of the initial parameters and of the data.", rich_help_panel=TRAINING)
]
Transports = Annotated[
    Transport, typer.Option(help="What ranks send tensors over; auto chooses by device.", rich_help_panel=LAUNCH)
]


@dataclass(frozen=True, kw_only=True)
class Training:
    """Options for the computation of the ranks."""

    PANEL: ClassVar[str] = TRAINING

    precision: Annotated[
        Precision,
        typer.Option(help="Precision: tf32 products on GPUs, bf16 or fp16 by autocast; fp16 also scales the loss."),
    ] = Precision.FP32
    clip_norm: Annotated[
        float | None,
        typer.Option(help="Largest norm of the whole gradient, such as 1.0 (default: gradients are not clipped)."),
    ] = None
    evaluate_every: Annotated[
        int, typer.Option(min=0, help="Number of steps between evaluations, such as 100; 0 means none.")
    ] = 0
    allow_nonfinite_loss: Annotated[
        bool,
        typer.Option(
            "--allow-nonfinite-loss",
            help="Train on after a loss that is NaN or infinite; otherwise the run fails there.",
        ),
    ] = False
    staleness: Annotated[
        int,
        typer.Option(min=0, max=1, help="Age in steps of the reference weights under elastic averaging: 0 or 1."),
    ] = 0
    advance_forward: Annotated[
        bool,
        typer.Option("--advance-forward", help="Find out while training how many forwards should run in advance."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Options for what is saved, and where training resumes."""

    PANEL: ClassVar[str] = CHECKPOINTS

    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Directory for checkpoints, which all nodes see (default: none is written)."),
    ] = None
    checkpoint_every: Annotated[
        int, typer.Option(min=0, help="Steps between checkpoints, such as 50; 0 writes one at the end.")
    ] = 0
    keep_checkpoints: Annotated[int, typer.Option(min=1, help="Number of checkpoints that are kept.")] = 2
    resume: Annotated[
        Resume | None,
        typer.Option(
            help="Resume from the newest checkpoint; auto: from step 0 where there is none (default: from step 0)."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Options for what is compared and recorded."""

    PANEL: ClassVar[str] = MEASUREMENT

    check: Annotated[
        bool, typer.Option("--check", help="Compare loss and gradients of the first step with those of one process.")
    ] = False
    trace: Annotated[
        str | None, typer.Option(metavar="FILE", help="JSON file for the trace: when each rank ran each instruction.")
    ] = None
    trace_steps: Annotated[
        int, typer.Option("--trace-steps", min=1, help="Number of steps, the last ones, that --trace records.")
    ] = 1
    metrics: Annotated[
        str | None, typer.Option(metavar="FILE", help="JSON Lines file to which rank 0 appends a line per step.")
    ] = None
    tensorboard: Annotated[
        str | None, typer.Option(metavar="DIR", help="Directory in which rank 0 writes TensorBoard's event files.")
    ] = None


def run_options(flags: Mapping[str, Any], place: Callable[[str | None], str | None]) -> RunOptions:
    """Return the training options of a command. Raises InvalidDocument.

    ``place`` turns a path into a path that ranks can open.
    """
    from penstock.schemas.api.run_options import RunOptions

    same = (
        "clip_norm",
        "checkpoint_every",
        "keep_checkpoints",
        "evaluate_every",
        "allow_nonfinite_loss",
        "staleness",
        "advance_forward",
    )
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
    """Return the absolute path, since ranks run in the project's directory, not in the current one."""
    return None if path is None else str(Path(path).absolute())
