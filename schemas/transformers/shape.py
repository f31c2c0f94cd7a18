"""The shape of a transformer: the widths that decide its parameters, legal degrees of parallelism and memory."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from penstock.schemas.document import Part
from penstock.schemas.quantities import Count, Flag, Fraction, Name

MOST_LAYERS = 4096
MOST = 2**24
"""Widths, heads, experts and tokens of a sample are below it, which keeps every byte count below 2^53."""

Width = Annotated[int, Field(strict=True, ge=1, le=MOST)]
Ratio = Annotated[float, Field(gt=0, le=MOST, allow_inf_nan=False)]


class Experts(Part):
    """The mixture of experts in every layer but the first ``dense_layers``."""

    number: Width
    per_token: Width = Field(description="experts that each token goes through")
    ffn: Width = Field(description="width within one expert")
    shared_ffn: Annotated[Count, Field(le=MOST)] = Field(
        default=0, description="width of all shared experts together; 0: none"
    )
    dense_layers: Annotated[Count, Field(le=MOST_LAYERS)] = Field(
        default=0, description="layers at the front with an ordinary feed-forward of width `ffn` of the shape"
    )
    router_bias: Flag = False
    biases: Flag = Field(default=False, description="whether the experts' linear layers have biases")
    shared_gate: Flag = Field(default=False, description="whether a gate of width 1 weighs the shared experts")
    capacity_factor: Ratio | None = Field(
        default=None,
        description="tokens of every expert over its even share, dropped or padded to that; left out: none is dropped",
    )
    routing_imbalance: Annotated[Ratio, Field(ge=1)] = Field(
        default=1.0, description="tokens of the busiest GPU's experts over the mean, where none is dropped"
    )

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if self.per_token > self.number:
            raise ValueError(f"{self.per_token} experts per token are more than the {self.number} experts")
        return self


class LatentAttention(Part):
    """Multi-head latent attention (DeepSeek-V2): queries, keys and values go through narrow projections."""

    query_rank: Width | None = Field(default=None, description="left out: queries are projected directly")
    key_value_rank: Width
    plain_width: Width = Field(description="width per head of queries and keys without rotary position")
    rotary_width: Width = Field(description="width of the part with rotary position, shared by all key heads")
    value_width: Width = Field(description="width per head of values")


class Windows(Part):
    """Sliding windows: layers whose attention sees a token's own position and the last ones before it alone."""

    width: Width = Field(description="positions that a token sees, its own among them")
    whole_every: Annotated[int, Field(strict=True, ge=2, le=MOST_LAYERS)] | None = Field(
        default=None, description="of how many layers the last one sees all positions; left out: none does"
    )


class TransformerShape(Part):
    """Widths of a transformer whose layers are alike, but for dense layers before those with experts, and windows."""

    name: Name
    layers: Annotated[int, Field(strict=True, ge=1, le=MOST_LAYERS)]
    hidden: Width
    heads: Width
    kv_heads: Width = Field(description="heads of keys and values; `heads` without grouped-query attention")
    head_width: Width
    ffn: Width = Field(description="width within the feed-forward of a dense layer")
    gated: Flag = Field(description="whether the feed-forward has a gate, as SwiGLU and GeGLU")
    vocabulary: Width
    padded_vocabulary: Width | None = Field(
        default=None, description="rows of the embedding; left out: the framework pads the vocabulary"
    )
    sequence_length: Width = Field(description="tokens of a sample")
    norm: Literal["rms", "layer"] = "rms"
    norms_per_layer: Annotated[int, Field(strict=True, ge=1, le=4)] = 2
    query_key_norm: Flag = Field(default=False, description="whether each head's queries and keys are normalised")
    attention_biases: Literal["none", "qkv", "all"] = "none"
    ffn_biases: Flag = False
    head_bias: Flag = False
    final_norm: Flag = True
    tied: Flag = Field(default=False, description="whether the head's weight is the embedding's")
    outputs: Width | None = Field(default=None, description="scores per token; left out: one per word")
    positions: Annotated[Count, Field(le=MOST)] = Field(default=0, description="learned position vectors; 0: none")
    token_types: Annotated[Count, Field(le=MOST)] = Field(default=0, description="segment vectors, as in BERT")
    embedding_norm: Flag = False
    sinks: Flag = Field(default=False, description="whether each head has a learned attention sink")
    dropout: Fraction = 0.0
    experts: Experts | None = None
    latent: LatentAttention | None = None
    windows: Windows | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.latent is None and self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads are not a multiple of the {self.kv_heads} key and value heads")
        if self.padded_vocabulary is not None and self.padded_vocabulary < self.vocabulary:
            raise ValueError(f"padded_vocabulary {self.padded_vocabulary} is below vocabulary {self.vocabulary}")
        if self.tied and self.outputs is not None:
            raise ValueError(
                f"tied needs one output per word of the vocabulary, but outputs is {self.outputs}; leave one of them "
                "out"
            )
        if self.experts is not None and self.experts.dense_layers > self.layers:
            raise ValueError(f"experts.dense_layers {self.experts.dense_layers} exceeds layers {self.layers}")
        return self
