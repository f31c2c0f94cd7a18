"""Models with a shipped profile: the job that builds each, and the dtype and sizes of its profile. No torch."""

from __future__ import annotations

from typing import NamedTuple

from penstock.facts.device_table import Dtype

FEW = (1, 2, 4, 8, 16)
MANY = (1, 2, 4, 8, 16, 32, 64)


class Model(NamedTuple):
    """A job's reference, the dtype it is costed in, and the micro-batch sizes of its profile (samples)."""

    reference: str
    dtype: Dtype
    micro_batch_sizes: tuple[int, ...]


MODELS: dict[str, Model] = {
    "gpt": Model("examples.gpt:job", "fp32", FEW),
    "gpt2-small": Model("examples.gpt:gpt2_small", "bf16", FEW),
    "gpt2-xl": Model("examples.gpt:gpt2_xl", "bf16", FEW),
    "gpt-20b": Model("examples.gpt:neox_20b", "bf16", FEW),
    "gpt-3-175b": Model("examples.gpt:gpt3_175b", "bf16", FEW),
    "llama-3-8b": Model("examples.llama:llama_8b", "bf16", FEW),
    "llama-3-70b": Model("examples.llama:llama_70b", "bf16", FEW),
    "llama-3.1-405b": Model("examples.llama:llama_405b", "bf16", FEW),
    "bert-base": Model("examples.bert:base", "fp32", MANY),
    "bert-large": Model("examples.bert:large", "fp32", MANY),
    "bert-48": Model("examples.bert:bert_48", "fp32", FEW),
    "bert-72": Model("examples.bert:bert_72", "fp32", FEW),
    "transformer": Model("examples.transformer:base", "fp32", MANY),
    "transformer-big": Model("examples.transformer:big", "fp32", MANY),
    "resnet-50": Model("examples.resnet:resnet_50", "fp32", MANY),
    "resnet-101": Model("examples.resnet:resnet_101", "fp32", MANY),
    "resnet-152": Model("examples.resnet:resnet_152", "fp32", MANY),
    "resnext-50": Model("examples.resnet:resnext_50", "fp32", MANY),
}
