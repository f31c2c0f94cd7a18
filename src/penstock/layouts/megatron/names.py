"""The names of Megatron-Core's flags that are read, and their other names in configurations."""

from __future__ import annotations

LAYOUT = "pipeline-model-parallel-layout"
RANKS = "pipeline-model-parallel-size"
GROUP = "microbatch-group-size-per-virtual-pipeline-stage"
OTHER_ORDER = "use-tp-pp-dp-mapping"
MODULES = "recompute-modules"
SEQUENCE = "sequence-parallel"
DEGREES = (
    "tensor-model-parallel-size",
    "context-parallel-size",
    "expert-model-parallel-size",
    "expert-tensor-parallel-size",
)
"""Kinds of parallelism other than pipeline and data parallelism."""
TENSOR, CONTEXT, EXPERT, EXPERT_TENSOR = DEGREES
SIZES = ("hidden-size", "num-attention-heads", "seq-length", "num-experts", "vocab-size")
"""Sizes with which a profile was measured."""
GRADIENTS = ("bf16", "fp16", "grad-reduce-in-bf16", "accumulate-allreduce-grads-in-fp32", "grad-reduce-in-fp32")
MAIN_GRADIENTS = "main-grads-dtype"
FSDP = ("use-megatron-fsdp", "use-custom-fsdp", "use-torch-fsdp2")
STRATEGY = "data-parallel-sharding-strategy"
OTHER_STACKS = (
    "hybrid-layer-pattern",
    "hybrid-override-pattern",
    "hybrid-attention-ratio",
    "hybrid-mlp-ratio",
    "is-hybrid-model",
    "decoder-num-layers",
    "encoder-num-layers",
)
"""Models that are no stack of equal transformer layers."""
CUTS = (
    RANKS,
    "num-layers",
    "mtp-num-layers",
    "num-layers-per-virtual-pipeline-stage",
    "num-virtual-stages-per-pipeline-rank",
    "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers",
    GROUP,
    *DEGREES,
)
WIDTHS = (
    "ffn-hidden-size",
    "kv-channels",
    "num-query-groups",
    "max-position-embeddings",
    "make-vocab-size-divisible-by",
    "padded-vocab-size",
    "moe-ffn-hidden-size",
    "moe-router-topk",
    "moe-shared-expert-intermediate-size",
    "q-lora-rank",
    "kv-lora-rank",
    "qk-head-dim",
    "qk-pos-emb-head-dim",
    "v-head-dim",
)
"""Further sizes of a model."""
NUMBERS = (
    *CUTS,
    "micro-batch-size",
    "global-batch-size",
    "recompute-num-layers",
    *SIZES,
    *WIDTHS,
    "nnodes",
    "nproc-per-node",
)
SHAPE = frozenset((*(name for name in CUTS if name != GROUP), LAYOUT))
"""Flags of which Megatron starts with at least one."""
MODEL_WORDS = (
    "normalization",
    "position-embedding-type",
    "softmax-type",
    "hidden-dropout",
    "moe-layer-freq",
    "moe-expert-capacity-factor",
    "tokenizer-type",
)
WORDS = (LAYOUT, "recompute-granularity", "recompute-method", MODULES, "cp-comm-type", STRATEGY, *MODEL_WORDS)
MODEL_SWITCHES = (
    "swiglu",
    "quick-geglu",
    "gated-linear-unit",
    "add-qkv-bias",
    "disable-bias-linear",
    "add-bias-linear",
    "qk-layernorm",
    "untie-embeddings-and-output-weights",
    "share-embeddings-and-output-weights",
    "group-query-attention",
    "multi-latent-attention",
    "use-rotary-position-embeddings",
    "moe-shared-expert-gate",
    "moe-pad-expert-input-to-capacity",
)
SWITCHES = (
    *GRADIENTS,
    "overlap-grad-reduce",
    "use-distributed-optimizer",
    "recompute-activations",
    "moe-layer-recompute",
    "account-for-embedding-in-pipeline-split",
    "account-for-loss-in-pipeline-split",
    OTHER_ORDER,
    SEQUENCE,
    *FSDP,
    *MODEL_SWITCHES,
)
OTHERWISE = {
    "virtual-pipeline-model-parallel-size": "num-virtual-stages-per-pipeline-rank",
    "num-layers-in-first-pipeline-stage": "decoder-first-pipeline-num-layers",
    "num-layers-in-last-pipeline-stage": "decoder-last-pipeline-num-layers",
    "microbatch-group-size-per-vp-stage": GROUP,
    "activations-checkpoint-granularity": "recompute-granularity",
    "activations-checkpoint-method": "recompute-method",
    "activations-checkpoint-num-layers": "recompute-num-layers",
    "num-moe-experts": "num-experts",
    "encoder-seq-length": "seq-length",
    "decoder-seq-length": "seq-length",
    "overlap-grad-sync": "overlap-grad-reduce",
    "overlap-param-sync": "overlap-param-gather",
    "ub-tp-comm-overlap": "tp-comm-overlap",
    "grad-sync-dtype": MAIN_GRADIENTS,
}
"""Names in configurations of NeMo and Megatron-Core."""
READ = frozenset((*NUMBERS, *WORDS, MAIN_GRADIENTS, *SWITCHES, *OTHERWISE, *OTHER_STACKS))
"""All names that are read."""
_LAUNCHER = """
    nnodes nproc-per-node node-rank master-addr master-port rdzv-id rdzv-backend rdzv-endpoint rdzv-conf max-restarts
    log-dir redirects tee local-ranks-filter run-path standalone module start-method role monitor-interval
"""
STARTED_BY = frozenset(_LAUNCHER.split())
"""Flags of torchrun."""
