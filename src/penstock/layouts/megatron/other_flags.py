"""Megatron-Core's flags that change a pipeline's time or memory and are not modelled: an answer names them.

.. [1] Megatron-LM, ``training/arguments.py``.
"""

from __future__ import annotations

CHANGING: dict[str, str] = {
    "tp-comm-overlap": "tensor parallel exchanges run during matrix products",
    "fp8": "matrix products in 8 bits",
    "fp8-param-gather": "parameters are gathered in 8 bits",
    "fp8-param": "parameters are kept in 8 bits",
    "fp8-dot-product-attention": "attention in 8 bits",
    "fp8-multi-head-attention": "attention in 8 bits",
    "fp4": "matrix products in 4 bits",
    "fp4-param-gather": "parameters are gathered in 4 bits",
    "fp4-param": "parameters are kept in 4 bits",
    "overlap-param-gather": "parameters are gathered during the next step's forwards",
    "overlap-param-gather-with-optimizer-step": "parameters are gathered during the update",
    "num-distributed-optimizer-instances": "optimizer states are shared out over fewer replicas",
    "outer-dp-sharding-strategy": "what is sharded over groups of replicas",
    "enable-full-sharding-in-hsdp": "what is sharded over groups of replicas",
    "use-precision-aware-optimizer": "optimizer states in other widths",
    "main-params-dtype": "width of the master copy",
    "exp-avg-dtype": "width of an optimizer state",
    "exp-avg-sq-dtype": "width of an optimizer state",
    "optimizer": "another optimizer than Adam",
    "optimizer-cpu-offload": "optimizer states on the host",
    "cpu-offloading": "activations on the host",
    "fine-grained-activation-offloading": "activations on the host",
    "distribute-saved-activations": "stashes are split over tensor parallel ranks",
    "overlap-moe-expert-parallel-comm": "one more forward ahead of the first backward on each rank",
    "delay-wgrad-compute": "backwards in two halves",
    "overlap-dispatch-backward-with-experts-wgrad": "experts' weight gradients run during the all-to-all",
    "defer-embedding-wgrad-compute": "the embedding's weight gradients at the end of the step",
    "no-overlap-p2p-communication": "sends and receives of interleaved 1F1B do not overlap with computing",
    "overlap-p2p-comm-warmup-flush": "sends and receives overlap with computing while the pipeline fills",
    "use-ring-exchange-p2p": "another way to send",
    "ddp-bucket-size": "how the all-reduce is cut",
    "ddp-num-buckets": "how the all-reduce is cut",
    "ddp-reduce-scatter-with-fp32-accumulation": "another reduction of gradients",
    "reduce-scatter-with-fp32-accumulation": "another reduction of gradients",
    "nccl-ub": "collectives on registered buffers",
    "use-nccl-ub": "collectives on registered buffers",
    "use-sharp": "reductions in the switches",
    "step-batch-size-schedule": "the batch changes in the course of the training",
    "rampup-batch-size": "the batch grows in the course of the training",
    "decrease-batch-size-if-needed": "the batch may be smaller",
    "variable-seq-lengths": "samples of other lengths than --seq-length",
    "sft": "samples of other lengths than --seq-length",
    "perform-rl-step": "a step that generates as well",
    "moe-token-dispatcher-type": "another dispatcher than the all-to-all",
    "moe-flex-dispatcher-backend": "dispatch by DeepEP or HybridEP",
    "moe-enable-deepep": "dispatch by DeepEP",
    "moe-shared-expert-overlap": "shared experts run during the all-to-all",
    "moe-expert-rank-capacity-factor": "tokens beyond a rank's capacity are dropped",
    "moe-latent-size": "experts of another width than the model",
    "moe-extended-tp": "experts are cut over more ranks",
    "moe-paged-stash": "stashes of experts in pages",
    "moe-use-legacy-grouped-gemm": "other kernels of the experts",
    "hierarchical-context-parallel-sizes": "context parallel exchanges in two levels",
    "hybrid-context-parallel": "samples of different lengths share context parallel ranks",
    "window-size": "attention over a window",
    "window-attn-skip-freq": "attention over a window in some layers",
    "experimental-attention-variant": "another attention",
    "linear-attention-freq": "layers of linear attention",
    "attention-output-gate": "a gate after the attention",
    "heterogeneous-layers-config-path": "layers that differ",
    "heterogeneous-layers-config-encoded-json": "layers that differ",
    "enable-mhc-connections": "several residual streams",
    "mtp-standalone": "multi-token prediction on stages of its own",
    "mtp-use-repeated-layer": "layers of multi-token prediction share weights",
    "transformer-impl": "other kernels",
    "attention-backend": "attention that keeps its scores",
    "cuda-graph-impl": "kernels are launched as graphs",
    "enable-cuda-graph": "kernels are launched as graphs",
    "external-cuda-graph": "kernels are launched as graphs",
    "optimizer-cuda-graph": "kernels are launched as graphs",
    "use-transformer-engine-op-fuser": "other kernels",
    "use-kitchen": "other kernels",
    "deterministic-mode": "slower kernels",
    "batch-invariant-mode": "slower kernels",
    "fp32-residual-connection": "activations between layers in fp32",
    "no-gradient-accumulation-fusion": "weight gradients are added up by kernels of their own",
    "gtp-weight-remat-size": "weights are gathered from other ranks",
    "expert-gtp-weight-remat-size": "weights of experts are gathered from other ranks",
    "tensor-parallel-num-weight-shards": "weights are cut further",
    "expert-tensor-parallel-num-weight-shards": "weights of experts are cut further",
    "freeze-all-layers": "layers that are not trained",
    "mlp-chunks-for-training": "feed-forwards in parts",
    "spec": "layers by a specification of their own",
    "yaml-cfg": "another file has more settings",
    "use-checkpoint-args": "a checkpoint's own values count",
    "use-mp-args-from-checkpoint-args": "a checkpoint's own degrees count",
    "fp8-format": "matrix products in 8 bits",
    "fp4-format": "matrix products in 4 bits",
    "overlap-p2p-communication-warmup-flush": "sends and receives overlap with computing while the pipeline fills",
    "pipeline-model-parallel-split-rank": "a second stack of layers",
}
"""The change that each flag makes."""
_LOWERING = """
    fp8 fp8-param-gather fp8-param fp4 fp4-param-gather fp4-param use-precision-aware-optimizer main-params-dtype
    exp-avg-dtype exp-avg-sq-dtype optimizer optimizer-cpu-offload cpu-offloading fine-grained-activation-offloading
    distribute-saved-activations moe-expert-rank-capacity-factor moe-paged-stash gtp-weight-remat-size
    expert-gtp-weight-remat-size tensor-parallel-num-weight-shards expert-tensor-parallel-num-weight-shards
    freeze-all-layers mlp-chunks-for-training
"""
LOWERING = frozenset(_LOWERING.split())
"""Flags with which a GPU holds less than is counted."""
_ONE = (
    "expert-gtp-weight-remat-size",
    "expert-tensor-parallel-num-weight-shards",
    "gtp-weight-remat-size",
    "mlp-chunks-for-training",
    "num-distributed-optimizer-instances",
    "tensor-parallel-num-weight-shards",
)
"""Flags that change nothing where they are 1."""
HARMLESS: dict[str, tuple[str, ...]] = {
    "attention-backend": ("auto", "flash", "fused", "attnbackend.flash", "attnbackend.fused", "attnbackend.auto"),
    "cuda-graph-impl": ("none",),
    **dict.fromkeys(_ONE, ("1",)),
    "exp-avg-dtype": ("fp32", "float32"),
    "exp-avg-sq-dtype": ("fp32", "float32"),
    "main-params-dtype": ("fp32", "float32"),
    "moe-token-dispatcher-type": ("alltoall",),
    "optimizer": ("adam", "adamw"),
    "outer-dp-sharding-strategy": ("no_shard",),
    "transformer-impl": ("transformer_engine",),
}
"""Values with which a plan is judged."""
FLAGS_ONLY = frozenset(("optimizer", "sft", "spec"))
"""Words with other meanings where they are no flags."""


def changing_sentence(names: list[str]) -> str:
    """Name all of the flags, each with the change that it makes."""
    listed = "; ".join(f"--{name} ({CHANGING[name]})" for name in names)
    return f"not understood, judged as if absent, and able to change the answer: {listed}"
