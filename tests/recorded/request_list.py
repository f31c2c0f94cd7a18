"""The sixty requests whose answers are recorded: every planner by name, shipped examples, refusals, and drawn ones."""

from __future__ import annotations

from drawn_request import RULES, Document, drawn
from paper_models import MODELS, profile

from penstock.planning.inputs import find_profile, find_topology
from penstock.schemas.request import PlanRequest

DRAWN = 29
MOST_PLANS = 12
"""Most plans that each planner may have judged for a shipped example; no time limit, so answers are deterministic."""

SHIPPED: tuple[tuple[str, str, str, int, Document], ...] = (
    # name, model, cluster, global batch, more
    ("auto-shared", "gpt2-small", "4x1xV100", 32, {"micro_batch_sizes": [4]}),
    ("auto-private", "gpt2-small", "2x2xA100", 32, {"micro_batch_sizes": [2, 4], "network": "private"}),
    ("auto-every-rule", "transformer", "2x1xA100", 24, {"micro_batch_sizes": [4, 5], "update_rules": list(RULES)}),
    ("auto-recompute", "bert-base", "2x2xV100", 16, {"recompute": "always", "micro_batch_sizes": [2, 4]}),
    ("auto-wide", "gpt2-small", "2x8xA100", 64, {}),
    ("auto-wide-private", "gnmt-16", "2x8xV100", 64, {"network": "private"}),
    ("auto-wide-rules", "resnet-50", "2x8xV100", 256, {"update_rules": list(RULES)}),
    ("auto-pinned", "awd-lstm", "2x2xV100", 40, {"pins": [{"layers": [0, 0], "devices": ["node1/0", "node1/1"]}]}),
    ("auto-infeasible", "gpt-20b", "2x1xV100", 8, {"micro_batch_sizes": [1], "recompute": "always"}),
    ("dp", "resnet-50", "2x2xV100", 64, {"planner": "dp"}),
    ("gpipe", "bert-base", "2x2xV100", 16, {"planner": "gpipe", "micro_batch_sizes": [2]}),
    ("auto-one-device", "resnet-50", "1x1xV100", 32, {"recompute": "never", "micro_batch_sizes": [32]}),
    ("model-parallel", "gnmt-16", "4x1xV100", 64, {"planner": "model-parallel"}),
    ("dapple", "vgg-19", "dapple-config-b", 64, {"planner": "dapple", "micro_batch_sizes": [8, 16]}),
    ("hetpipe", "vgg-19", "2x4xV100", 64, {"planner": "hetpipe", "micro_batch_sizes": [8, 16]}),
    ("even", "gpt2-small", "4xA100", 32, {"planner": "even", "micro_batch_sizes": [4]}),
    ("interleaved", "gpt2-small", "4xA100", 32, {"planner": "interleaved", "micro_batch_sizes": [4]}),
    ("zero-bubble", "gpt2-small", "4x1xV100", 32, {"planner": "zero-bubble", "micro_batch_sizes": [4]}),
    ("chimera", "bert-base", "4x1xV100", 32, {"planner": "chimera", "micro_batch_sizes": [4]}),
    ("spp", "inception-v3", "spp-testbed-1", 32, {"planner": "spp", "network": "private"}),
    ("relax", "awd-lstm", "2x2xV100", 40, {"planner": "relax"}),
    ("spread", "gpt2-xl", "2x8xH100", 64, {"planner": "spread", "micro_batch_sizes": [4]}),
    ("pipedream", "awd-lstm", "2x2xV100", 40, {"planner": "pipedream", "update_rules": ["weight_stashing"]}),
    ("pipedream-2bw", "gpt", "4x1xV100", 16, {"planner": "pipedream-2bw", "update_rules": ["double_buffered"]}),
    ("wpipe", "transformer-big", "wpipe-env-1", 32, {"planner": "wpipe", "update_rules": ["double_grouped"]}),
    ("avgpipe", "awd-lstm", "avgpipe-3x2", 40, {"planner": "avgpipe", "update_rules": ["elastic_averaging"]}),
    ("madpipe", "resnet-50", "4xV100", 32, {"planner": "madpipe", "update_rules": ["double_buffered"]}),
    ("exact", "awd-lstm", "2x1xV100", 40, {"planner": "exact", "micro_batch_sizes": [4, 8]}),
    ("uniform-megatron", "gpt2-small", "4xA100", 32, {"planner": "uniform", "target": "megatron"}),
    ("auto-torchtitan", "llama-3-8b", "4xH100", 16, {"target": "torchtitan", "termination": {"max_plans": 90}}),
    ("auto-deepspeed", "bert-base", "2x2xV100", 32, {"target": "deepspeed", "micro_batch_sizes": [2, 4]}),
    ("refused-rule", "awd-lstm", "2x1xV100", 40, {"planner": "madpipe"}),
)


def document_of(name: str) -> Document:
    """Return the request called ``name``, with shipped documents by name."""
    if name.startswith("drawn-"):
        return drawn(int(name.removeprefix("drawn-")))
    model, cluster, batch, more = next(row[1:] for row in SHIPPED if row[0] == name)
    common = {"global_batch_size": batch, "termination": {"max_plans": MOST_PLANS}}
    return {"profile": model, "topology": cluster, **common, **more}


def request_of(name: str) -> PlanRequest:
    """Return the request called ``name``; its profile and topology are inline."""
    document = document_of(name)
    if isinstance(document["profile"], str):
        model = document["profile"]
        document["profile"] = profile(model) if model in MODELS else find_profile(model)
        document["topology"] = find_topology(document["topology"])
    return PlanRequest.parse(document, units=True)


NAMES = (*(row[0] for row in SHIPPED), *(f"drawn-{number}" for number in range(DRAWN)))
