"""Megatron-Core's flags that change what a pipeline takes or holds, and that are not understood: an answer names them.

.. [1] Megatron-LM, ``training/arguments.py``.
"""

from __future__ import annotations

CHANGING: dict[str, str] = {
    "sequence-parallel": "activations between layers are split over tensor parallel ranks",
    "tp-comm-overlap": "tensor parallel exchanges run during matrix products",
    "fp8-format": "matrix products in 8 bits",
    "fp8": "matrix products in 8 bits",
    "fp8-param-gather": "parameters are gathered in 8 bits",
    "fp4-format": "matrix products in 4 bits",
    "overlap-param-gather": "parameters are gathered during the next step's forwards",
    "overlap-param-gather-with-optimizer-step": "parameters are gathered during the update",
    "use-megatron-fsdp": "parameters and gradients may be sharded",
    "use-custom-fsdp": "parameters and gradients may be sharded",
    "use-torch-fsdp2": "parameters and gradients are sharded",
    "data-parallel-sharding-strategy": "what is sharded over the replicas",
    "num-distributed-optimizer-instances": "optimizer states are shared out over fewer replicas",
    "use-precision-aware-optimizer": "optimizer states in other widths",
    "main-params-dtype": "width of the master copy",
    "exp-avg-dtype": "width of an optimizer state",
    "exp-avg-sq-dtype": "width of an optimizer state",
    "optimizer-cpu-offload": "optimizer states on the host",
    "cpu-offloading": "activations on the host",
    "fine-grained-activation-offloading": "activations on the host",
    "distribute-saved-activations": "stashes are split over tensor parallel ranks",
    "overlap-moe-expert-parallel-comm": "one more forward ahead of the first backward on each rank",
    "delay-wgrad-compute": "backwards in two halves",
    "defer-embedding-wgrad-compute": "the embedding's weight gradients at the end of the step",
    "no-overlap-p2p-communication": "sends and receives of interleaved 1F1B do not overlap with computing",
    "overlap-p2p-communication-warmup-flush": "sends and receives overlap with computing while the pipeline fills",
    "ddp-bucket-size": "how the all-reduce is cut",
    "step-batch-size-schedule": "the batch changes in the course of the training",
    "rampup-batch-size": "the batch grows in the course of the training",
    "multi-latent-attention": "another attention than the profile may have",
    "untie-embeddings-and-output-weights": "whether embedding and head share weights is as the profile has it",
    "moe-layer-freq": "which layers have experts",
    "encoder-num-layers": "a second stack of layers",
}
"""What each of them changes."""


def changing_sentence(names: list[str]) -> str:
    """Names all of them, each with what it changes."""
    listed = "; ".join(f"--{name} ({CHANGING[name]})" for name in names)
    return f"not understood, judged as if absent, and able to change the answer: {listed}"
