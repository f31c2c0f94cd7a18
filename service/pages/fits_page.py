"""The page that says which degrees of parallelism are legal for a transformer on a cluster, and which fit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from penstock.examples import catalogue
from penstock.examples.shapes import SHAPES
from penstock.schemas.api.fits import FitsAnswer, FitsRequest
from penstock.schemas.errors import PenstockError
from penstock.schemas.transformers.degrees import Framework, Sharding
from penstock.service.pages.form import CLUSTER_FORMS
from penstock.service.security.sizes import Sizes

FIRST = {
    "model": "llama-3-70b",
    "cluster": "8x8xH100",
    "tensor": "all",
    "context": "1",
    "expert": "all",
    "pipeline": "all",
    "virtual_stages": "1",
    "micro_batch_size": "1",
    "global_batch_size": "",
    "sequence_length": "",
    "routing_imbalance": "",
    "capacity_factor": "",
    "sharding": "optimizer",
    "recompute": "none",
    "framework": "megatron",
}
DEGREES = {
    "tensor": ("Tensor", "GPUs that share each layer"),
    "context": ("Context", "GPUs that share each sequence"),
    "expert": ("Expert", "GPUs that share the experts"),
    "pipeline": ("Pipeline", "stages"),
    "virtual_stages": ("Virtual stages", "of each GPU"),
    "micro_batch_size": ("Micro-batch", "samples on one replica"),
}
"""Fields that take a number, several, or ``all``: their labels and hints."""
NUMBERS = {
    "global_batch_size": ("Global batch", "samples of a step; empty: enough to fill the pipeline"),
    "sequence_length": ("Sequence length", "tokens of a sample; empty: the model's"),
    "routing_imbalance": ("Routing imbalance", "tokens of the busiest GPU's experts over the mean; empty: even"),
    "capacity_factor": ("Capacity factor", "tokens of every expert over its even share; empty: none is dropped"),
}
FRAMEWORKS: dict[Framework, str] = {"megatron": "Megatron-Core", "torch": "PyTorch with FSDP2"}
SHARDINGS: dict[Sharding, str] = {
    "none": "none",
    "optimizer": "optimizer states (ZeRO-1)",
    "gradients": "gradients too (ZeRO-2)",
    "parameters": "parameters too (ZeRO-3)",
    "parameters_kept": "parameters, gathered once a step",
}
RECOMPUTED = ("none", "full", "attention", "mlp", "norm", "mlp,norm")


def fits(sizes: Sizes, query: Mapping[str, str]) -> dict[str, Any]:
    """The form with what the address says, and the answer to it or what is wrong."""
    values = FIRST | {name: text.strip() for name, text in query.items() if name in FIRST}
    found: FitsAnswer | None = None
    error: PenstockError | None = None
    try:
        found = _answer(sizes, values)
    except PenstockError as refused:
        error = refused
    return {
        "values": values,
        "found": found,
        "error": error,
        "degrees": DEGREES,
        "numbers": NUMBERS,
        "choices": {
            "framework": ("Framework", FRAMEWORKS.items()),
            "sharding": ("Sharding", [*SHARDINGS.items(), ("all", "each of them")]),
            "recompute": ("Recomputed", [(one, one.replace(",", " and ")) for one in RECOMPUTED]),
        },
        "models": list(SHAPES),
        "clusters": CLUSTER_FORMS,
    }


def _answer(sizes: Sizes, values: Mapping[str, str]) -> FitsAnswer:
    """Raises PenstockError for what is wrong."""
    from penstock.planning.fits import answer

    topology = catalogue.cluster(values["cluster"])
    sizes.check(topology)
    fields: dict[str, Any] = {"shape": catalogue.shape(values["model"]), "topology": topology}
    fields |= {name: _listed(values[name]) for name in (*DEGREES, "sharding")}
    fields |= {name: _number(values[name]) for name in NUMBERS if values[name]}
    recompute = values["recompute"]
    fields["recompute"] = recompute if recompute in ("none", "full") else _listed(recompute)
    return answer(FitsRequest.parse({**fields, "framework": values["framework"]}))


def _listed(text: str) -> str | list[int | float | str]:
    return text if text == "all" else [_number(part.strip()) for part in text.split(",")]


def _number(text: str) -> int | float | str:
    """A number where the text is one; the schema refuses any other text with its place."""
    if text.isdecimal() and len(text) < 20:
        return int(text)
    return float(text) if re.fullmatch(r"\d{1,9}\.\d{1,9}", text) else text
