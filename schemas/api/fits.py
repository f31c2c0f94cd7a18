"""Question whether a training job fits, about a transformer, a cluster and degrees of parallelism; and its answer."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from penstock.schemas.document import Document, Part
from penstock.schemas.options.fits import about
from penstock.schemas.quantities import Bytes, ContentHash, Count, Flag, Name, PositiveCount
from penstock.schemas.topology import ClusterTopology
from penstock.schemas.transformers.degrees import ContextKind, Framework, Module, Sharding
from penstock.schemas.transformers.shape import MOST, Ratio, TransformerShape, Width

MOST_VALUES = 64
MOST_ROWS = 1000
USUAL_ROWS = 12

Value = Annotated[int, Field(strict=True, ge=1, le=MOST)]
Degree = Annotated[tuple[Value, ...], Field(min_length=1, max_length=MOST_VALUES)] | Literal["all"]
"""Values to try, or all that the cluster and the model could have."""


class FitsRequest(Document):
    """A transformer, by its shape or by the ``config.json`` of Hugging Face, and the layouts to try on a cluster.

    Every combination of the values is tried, one layout for the whole model: the number of GPUs that share each
    layer (``tensor``), each sequence (``context``) and the experts (``expert``), and of pipeline stages. The GPUs that
    are left make replicas.
    """

    kind: ClassVar[str] = "fits request"

    shape: TransformerShape | None = None
    hugging_face: dict[str, Any] | None = Field(
        default=None, description="the content of a model's config.json, in place of `shape`"
    )
    topology: ClusterTopology | ContentHash
    sequence_length: Width | None = Field(default=None, description=about("sequence_length"))
    tensor: Degree = Field(default="all", description=about("tensor"))
    context: Degree = Field(default=(1,), description=about("context"))
    context_kind: ContextKind | None = Field(default=None, description=about("context_kind"))
    expert: Degree = Field(default="all", description=about("expert"))
    expert_tensor: Value = Field(default=1, description=about("expert_tensor"))
    routing_imbalance: Ratio | None = Field(default=None, description=about("routing_imbalance"))
    capacity_factor: Ratio | None = Field(default=None, description=about("capacity_factor"))
    pipeline: Degree = Field(default="all", description=about("pipeline"))
    virtual_stages: Degree = Field(default=(1,), description=about("virtual_stages"))
    micro_batch_size: Degree = Field(default=(1,), description=about("micro_batch_size"))
    global_batch_size: PositiveCount | None = Field(default=None, description=about("global_batch_size"))
    sharding: Annotated[tuple[Sharding, ...], Field(min_length=1, max_length=MOST_VALUES)] | Literal["all"] = Field(
        default=("optimizer",), description=about("sharding")
    )
    recompute: Annotated[tuple[Module, ...], Field(max_length=MOST_VALUES)] | Literal["none", "full"] = Field(
        default="none", description=about("recompute")
    )
    sequence_parallel: Flag = Field(default=True, description=about("sequence_parallel"))
    framework: Framework = Field(default="megatron", description=about("framework"))
    rows: Annotated[int, Field(strict=True, ge=1, le=MOST_ROWS)] = Field(default=USUAL_ROWS, description=about("rows"))

    @model_validator(mode="after")
    def _one_model(self) -> Self:
        if (self.shape is None) == (self.hugging_face is None):
            raise ValueError("give either `shape` or `hugging_face`")
        return self


class MemoryParts(Part):
    """Memory of one GPU by part."""

    parameters_bytes: Bytes
    gradients_bytes: Bytes
    optimizer_bytes: Bytes = Field(description="states of Adam, with fp32 parameters under Megatron")
    gathered_bytes: Bytes = Field(description="parameters gathered or cast for the computation, a unit's gradient")
    activations_bytes: Bytes
    logits_bytes: Bytes
    dummy_gradients_bytes: Bytes = Field(description="Transformer Engine's, one per shape of weight")
    total_bytes: Bytes


class FitsRow(Part):
    """A legal layout, and its GPU whose memory is fullest."""

    fits: Flag
    tensor: PositiveCount
    context: PositiveCount
    expert: PositiveCount
    pipeline: PositiveCount
    virtual_stages: PositiveCount
    data: PositiveCount
    micro_batch_size: PositiveCount
    micro_batches: PositiveCount | None = Field(
        default=None, description="per replica and step, where the global batch is given"
    )
    sharding: Sharding
    fullest_stage: Count
    memory: MemoryParts
    headroom_bytes: int = Field(description="what is left of the fullest GPU, below 0 where the layout does not fit")


class RefusedLayouts(Part):
    """Layouts that no framework trains, for one reason."""

    rule: Name
    degree: Name = Field(description="the field of the request to change")
    sentence: str = Field(description="the rule with its numbers, of the first of these layouts")
    layouts: PositiveCount


class FitsAnswer(Part):
    """The layouts that are legal, and whether each fits. ``rows`` begins with layouts that fit, most headroom first."""

    model: Name
    parameters: PositiveCount
    gpus: PositiveCount
    available_bytes: Bytes = Field(description="of the smallest GPU, without the context of the driver")
    tried: PositiveCount
    legal: Count
    fitting: Count
    rows: tuple[FitsRow, ...]
    refused: tuple[RefusedLayouts, ...]
    assumptions: tuple[str, ...]
