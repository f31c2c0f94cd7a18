"""A plan to be launched: its bundle, its layout, and the command of each rank."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.manifests.plan_nodes import Layout, layout_of
from penstock.schemas.api.run_options import RunOptions
from penstock.schemas.errors import InvalidDocument, UnsupportedRequest

if TYPE_CHECKING:
    from penstock.schemas.plan import PlanFile
    from penstock.schemas.ranks.launch import LaunchSettings

BUNDLE = "job.json"
PORT = 29500
"""The rendezvous port unless the settings give another: torchrun's own default."""

OF_RANKS = (
    "model",
    "directory",
    "seed",
    "checkpoint",
    "keep_checkpoints",
    "report",
    "environment",
    "command",
    "name",
    "nodes",
)
OF_BUNDLES = (
    "steps",
    "precision",
    "clip_norm",
    "checkpoint",
    "checkpoint_every",
    "evaluate_every",
    "staleness",
    "advance_forward",
    "transport",
)
"""Settings on which a bundle's programs depend: its ranks have to be started with the same values."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of a manifest."""

    name: str
    text: str
    is_executable: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """The input of every target. ``to`` is the target's name; ``any_nodes``: not restricted to the plan's own nodes."""

    to: str
    settings: LaunchSettings
    plan_hash: str
    headline: tuple[str, ...]
    """The plan in trainers' words, its speed, and what is proven."""
    bundle: str
    layout: Layout
    any_nodes: bool

    @property
    def asked_name(self) -> str:
        """Return the requested name of the job, before it is made legal."""
        return self.settings.name or f"penstock-{self.plan_hash.removeprefix('sha256:')[:12]}"

    @property
    def port(self) -> int:
        """Return the rendezvous port."""
        return PORT if self.settings.port is None else self.settings.port

    @property
    def variables(self) -> dict[str, str]:
        """Return the requested environment variables; the last of equal names takes precedence."""
        return dict(assignment.split("=", 1) for assignment in self.settings.environment)

    def penstock(self) -> list[str]:
        """Return the command that calls penstock on the nodes, as words."""
        try:
            words = shlex.split(self.settings.command)
        except ValueError as error:
            raise InvalidDocument(f"the command {self.settings.command!r} cannot be split: {error}") from None
        if not words:
            raise InvalidDocument("the command is empty", remedy="leave it out, or --set command='python -m penstock'")
        return words

    def rank_options(self) -> list[str]:
        """Return the options of ``penstock rank`` after bundle and directory, as words."""
        settings = self.settings
        assert settings.model is not None
        words = ["--job", settings.model]
        for flag, value in (
            ("--steps", settings.steps),
            ("--seed", settings.seed),
            ("--precision", settings.precision),
            ("--clip-norm", settings.clip_norm),
            ("--checkpoint", settings.checkpoint),
            ("--checkpoint-every", settings.checkpoint_every),
            ("--keep-checkpoints", settings.keep_checkpoints),
            ("--resume", settings.checkpoint and "auto"),
            ("--evaluate-every", settings.evaluate_every),
            ("--staleness", settings.staleness),
            ("--report", settings.report),
        ):
            words += [] if value is None else [flag, str(value)]
        words += ["--transport", settings.transport] if settings.transport != "auto" else []
        words += ["--advance-forward"] if settings.advance_forward else []
        return words + (["--any-nodes"] if self.any_nodes else [])

    def facts(self) -> list[str]:
        """Return the plan in trainers' words, for the comments of a file, and a line per node of a job on named nodes.

        Names must have been checked.
        """
        from penstock.manifests.plan_nodes import spans

        lines = [
            *self.headline,
            f"Plan {self.plan_hash}: {self.layout.num_ranks} ranks on {len(self.layout.nodes)} nodes.",
        ]
        for node in () if self.any_nodes else self.layout.nodes:
            lines.append(f"{node.name}: ranks {spans(sorted(node.ranks))}, stages {spans(node.stages)}")
        return lines

    def bundle_file(self) -> File:
        """Return the bundle's file, which is stored next to the script."""
        return File(BUNDLE, self.bundle)

    def refuse(self, what: str, remedy: str) -> UnsupportedRequest:
        """Return an error that states what the target cannot express."""
        return UnsupportedRequest(f"{self.to} cannot express {what}", remedy=remedy)


def job_of(file: PlanFile, to: str, settings: LaunchSettings, any_nodes: bool, steps: int | None = None) -> Job:
    """Lower a plan for ``settings``, and for ``steps`` where the settings state no steps.

    Raises InvalidPlan or UnsupportedRequest for a plan that no ranks can run.
    """
    from penstock.planning.headline import headline, proof, speed
    from penstock.planning.programs.bundles import make_bundle

    bundle = make_bundle(
        file, steps=settings.steps or steps, options=run_options(settings), transport=settings.transport
    )
    return Job(
        to=to,
        settings=settings,
        plan_hash=bundle.plan_hash,
        headline=(headline(file.plan), speed(file.plan), proof(file.plan)),
        bundle=bundle.canonical_json().decode(),
        layout=layout_of(file, bundle),
        any_nodes=any_nodes,
    )


def run_options(settings: LaunchSettings) -> RunOptions:
    """Return the options with which the ranks train. Raises InvalidDocument for contradicting settings."""
    return RunOptions.parse(
        {
            "precision": settings.precision or "fp32",
            "clip_norm": settings.clip_norm,
            "checkpoint_directory": settings.checkpoint,
            "checkpoint_every": settings.checkpoint_every or 0,
            "evaluate_every": settings.evaluate_every or 0,
            "staleness": settings.staleness or 0,
            "advance_forward": settings.advance_forward,
        }
    )
