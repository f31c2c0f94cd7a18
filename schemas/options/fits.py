"""Options of a fits request."""

from __future__ import annotations

from functools import partial

from penstock.schemas.options.option import DEGREES, OUTPUT, TRAINING, Option, described
from penstock.schemas.options.planning import CAPACITY_FACTOR, CONTEXT_KIND, ROUTING_IMBALANCE, SEQUENCE_LENGTH

VALUES = "N[,N...]|all"
"""The metavar of a degree: one value, several, or all that are legal."""

FITS_OPTIONS = {
    "sequence_length": SEQUENCE_LENGTH,
    "tensor": Option(
        panel=DEGREES,
        help="GPUs that share each layer",
        default="all within a node",
        label="Tensor",
        flag="--tensor",
        metavar=VALUES,
        is_repeatable=True,
    ),
    "context": Option(
        panel=DEGREES,
        help="GPUs that share each sequence",
        default="1",
        label="Context",
        flag="--context",
        metavar=VALUES,
        is_repeatable=True,
    ),
    "context_kind": CONTEXT_KIND,
    "routing_imbalance": ROUTING_IMBALANCE,
    "capacity_factor": CAPACITY_FACTOR,
    "expert": Option(
        panel=DEGREES,
        help="GPUs that share the experts",
        default="all; 1 in a model without experts",
        label="Expert",
        flag="--expert",
        metavar=VALUES,
        is_repeatable=True,
    ),
    "expert_tensor": Option(
        panel=DEGREES, help="GPUs that share each expert", default="1", flag="--expert-tensor", metavar="N"
    ),
    "pipeline": Option(
        panel=DEGREES,
        help="stages of the pipeline",
        default="all",
        label="Pipeline",
        flag="--pipeline",
        metavar=VALUES,
        is_repeatable=True,
    ),
    "virtual_stages": Option(
        panel=DEGREES,
        help="stages that each GPU has in turn, interleaving",
        default="1",
        label="Virtual stages",
        flag="--virtual-stages",
        metavar=VALUES,
        is_repeatable=True,
    ),
    "micro_batch_size": Option(
        panel=TRAINING,
        help="samples of a micro-batch on one replica",
        default="1",
        label="Micro-batch",
        flag="--micro-batch-size",
        metavar=VALUES,
        is_repeatable=True,
    ),
    "global_batch_size": Option(
        panel=TRAINING,
        help="samples of a step, which decide how many micro-batches are in flight",
        default="enough to fill the pipeline",
        label="Global batch",
        flag="--global-batch-size",
        metavar="N",
        kind="whole",
    ),
    "sharding": Option(
        panel=DEGREES,
        help="what replicas share out; parameters_kept gathers them once a step, for pipelines of torch",
        default="optimizer",
        label="Sharding",
        flag="--sharding",
        values={
            "none": "none",
            "optimizer": "optimizer states (ZeRO-1)",
            "gradients": "gradients too (ZeRO-2)",
            "parameters": "parameters too (ZeRO-3, FSDP2)",
            "parameters_kept": "parameters, gathered once a step",
            "all": "each of them",
        },
        kind="choice",
        is_repeatable=True,
    ),
    "recompute": Option(
        panel=TRAINING,
        help="recompute activations in the backward pass: of whole layers, or of modules such as mlp,norm",
        default="none",
        label="Recomputation",
        flag="--recompute",
        metavar="none|full|MODULES",
        values={each: each.replace(",", " and ") for each in ("none", "full", "attention", "mlp", "norm", "mlp,norm")},
        kind="choice",
        is_repeatable=True,
        page="degrees.md#recomputed-modules",
    ),
    "sequence_parallel": Option(
        panel=TRAINING,
        help="whether tensor parallelism also shares norms and dropout",
        default="it does",
        flag="--sequence-parallel/--no-sequence-parallel",
    ),
    "framework": Option(
        panel=TRAINING,
        help="Megatron-Core with Transformer Engine, or PyTorch's modules with FSDP2",
        default="megatron",
        label="Framework",
        flag="--framework",
        values={"megatron": "Megatron-Core", "torch": "PyTorch with FSDP2"},
        kind="choice",
    ),
    "rows": Option(panel=OUTPUT, help="layouts to list", default="12", flag="--rows", metavar="N"),
}
"""Options of a fits request, by its fields."""
about = partial(described, FITS_OPTIONS)
