"""Bundle of a plan for ranks that another launcher starts, without a solver; and the reports of these ranks.

``penstock export PLAN --to bundle`` writes a bundle; ``penstock rank`` runs one rank of it.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from penstock.schemas.api.agents import BoundarySize, digest_of
from penstock.schemas.api.jobs import EvaluationOut
from penstock.schemas.api.run_options import RunOptions
from penstock.schemas.document import Document, Part
from penstock.schemas.errors import InvalidDocument, UnsupportedRequest
from penstock.schemas.program import Transport
from penstock.schemas.quantities import Bytes, ContentHash, Count, Flag, Loss, Name, Nanoseconds, Number, PositiveCount
from penstock.schemas.request import UpdateRule
from penstock.schemas.trace import Hardware


class RankPart(Part):
    """The place of one rank, and its programs."""

    rank: Count
    device: Name = Field(description="node/index, as the plan's topology has it")
    device_kind: Name
    programs: Annotated[tuple[dict[str, Any], ...], Field(min_length=1)] = Field(
        description="`schemas.program.Program.to_json`: one, the rungs of a ladder, or one per length of a segment"
    )
    digest: str = Field(description="SHA-256 of the canonical JSON of `programs`, in hexadecimal digits")

    @property
    def node(self) -> str:
        """The node that the plan gives it to."""
        return self.device.rpartition("/")[0]

    @property
    def index(self) -> str:
        """The device's name within its node, usually a number."""
        return self.device.rpartition("/")[2]

    def refuse_damage(self) -> None:
        """Raise InvalidDocument when the programs differ from the programs that were written."""
        digest = digest_of(self.programs)
        if digest != self.digest:
            raise InvalidDocument(
                f"the programs of rank {self.rank} have the digest {digest}, but the bundle says {self.digest}",
                remedy="export the bundle again; it cannot be edited",
            )


class JobBundle(Document):
    """A plan as its ranks need it."""

    kind: ClassVar[str] = "job bundle"

    plan_hash: ContentHash
    update_rule: UpdateRule
    global_batch_size: PositiveCount
    seed: Count = Field(default=0, description="of parameters and data, unless the launch says another")
    predicted_time_per_global_batch_ns: Nanoseconds | None = None
    layers: tuple[Name, ...] = Field(description="the chain's layer names, to be compared with the model's")
    boundaries: tuple[tuple[BoundarySize, ...], ...] | None = Field(
        default=None, description="the tensors at each cut, where measured; to be compared with the model's"
    )
    programs_are: Literal["whole", "ladder", "segments"] = Field(
        default="whole", description="one per rank for every step; rungs to be searched; or one per length of a segment"
    )
    lowered_for: Transport = Field(description="programs for nccl run over gloo too")
    norm: Flag = Field(default=False, description="programs gather the norm of all gradients, for clipping and fp16")
    staleness: Count = Field(default=0, description="elastic averaging: age of the reference model")
    ranks: Annotated[tuple[RankPart, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _ranks_in_order(self) -> Self:
        for number, part in enumerate(self.ranks):
            if part.rank != number:
                raise ValueError(f"ranks are numbered from 0 in order; entry {number} has rank {part.rank}")
            if len(part.programs) != len(self.ranks[0].programs):
                raise ValueError(
                    f"rank {number} has {len(part.programs)} programs, rank 0 has {len(self.ranks[0].programs)}"
                )
            if not part.node:
                raise ValueError(f"rank {number} runs on {part.device!r}; a device is called node/index")
        return self

    @property
    def batches_per_step(self) -> int:
        """The global batches of one step. Under elastic averaging each pipeline trains its own batch."""
        return int(self.ranks[0].programs[0]["pipelines"]) if self.update_rule == "elastic_averaging" else 1

    def nodes(self) -> dict[str, tuple[int, ...]]:
        """Return the plan's nodes in the order of their first ranks, each with its ranks in the order of its devices.

        Local process k of a node is its k-th rank.
        """
        parts_of_node: dict[str, list[RankPart]] = {}
        for part in self.ranks:
            parts_of_node.setdefault(part.node, []).append(part)
        return {
            node: tuple(part.rank for part in sorted(parts, key=lambda part: (natural(part.index), part.rank)))
            for node, parts in parts_of_node.items()
        }

    def refuse_options(self, options: RunOptions) -> None:
        """Raise UnsupportedRequest for options that need other programs."""
        for wanted, has, flag in (
            (options.needs_norm, self.norm, "--clip-norm or --precision fp16"),
            (options.advance_forward, self.programs_are == "ladder", "--advance-forward"),
            (bool(options.staleness), bool(self.staleness), "--staleness"),
        ):
            if wanted != has:
                raise UnsupportedRequest(
                    f"the bundle was exported {'with' if has else 'without'} {flag}, "
                    f"but its ranks are started {'with' if wanted else 'without'} {flag}",
                    remedy="export the bundle with the options that its ranks are started with",
                )

    def refuse_transport(self, wanted: str) -> None:
        """Raise UnsupportedRequest for a transport that the programs were not lowered for."""
        if wanted == "nccl" and self.lowered_for != "nccl":
            raise UnsupportedRequest(
                "the bundle's programs were lowered for gloo alone, but its ranks are started with --transport nccl",
                remedy="export the bundle with --set transport=nccl; or start penstock rank without --transport, "
                "so that GPU tensors go through host memory",
            )

    def segments(self, rank: int, first_step: int, steps: int, options: RunOptions) -> tuple[int, ...] | None:
        """Return the numbers of the programs that train steps [``first_step``, ``steps``); None where one program
        trains all.

        Raises UnsupportedRequest naming the length that the bundle has no program for.
        """
        if self.programs_are != "segments":
            return None
        number_of = {int(program["batches"]): number for number, program in enumerate(self.ranks[rank].programs)}
        at = first_step
        for length in options.segments(first_step, steps):
            if length not in number_of:
                raise UnsupportedRequest(
                    f"the bundle has no program for {length} steps without interruption, as from step {at} to "
                    f"{at + length}; it has programs for {', '.join(map(str, sorted(number_of)))} (update rule "
                    f"{self.update_rule})",
                    remedy="export the bundle with the --steps, --checkpoint-every and --evaluate-every of its ranks",
                )
            at += length
        return tuple(number_of[length] for length in options.segments(first_step, steps))


class RankReport(Part):
    """The place where a rank ran, and the most memory that it held."""

    rank: Count
    node: Name
    local_rank: Count
    device: Name = Field(description="its name in the plan")
    peak_memory_bytes: Bytes | None = None
    hardware: Hardware | None = None


class LaunchReport(Document):
    """The report of rank 0 about ranks that a launcher has started."""

    kind: ClassVar[str] = "launch report"

    plan_hash: ContentHash
    launcher: Name
    model: Name
    state: Literal["succeeded", "left"] = Field(description="left: asked to end, and saved")
    first_step: Count = Field(description="0, or the step of the checkpoint that it resumed from")
    steps_done: Count
    losses: tuple[Loss, ...] = Field(description="of each step from `first_step` on; a text where it is not finite")
    step_times_ns: tuple[Nanoseconds, ...] = Field(
        description="per global batch; without the first, which warms up, of several"
    )
    predicted_time_per_global_batch_ns: Nanoseconds | None = None
    measured_time_per_global_batch_ns: Nanoseconds | None = None
    gradient_check: Number | None = Field(
        default=None, description="largest difference from one process, over the largest gradient"
    )
    collectives: dict[str, Count] | None = Field(
        default=None, description="how many of each kind ran as predicted on all ranks; null where not compared"
    )
    collectives_differ: str | None = Field(default=None, description="the first that is not as predicted")
    evaluations: tuple[EvaluationOut, ...] = ()
    checkpoint_step: Count | None = Field(default=None, description="steps in the newest checkpoint that it wrote")
    ranks: tuple[RankReport, ...]


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Return a key that sorts names as people do: n2 before n10."""
    return tuple((int(piece), "") if piece.isdecimal() else (-1, piece) for piece in re.split(r"([0-9]+)", name))
