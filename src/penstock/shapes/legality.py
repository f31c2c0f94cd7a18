"""Rules of the layouts that a framework can train: a function per rule, which states the fault and the nearest values.

The rules are the checks of Megatron-Core's arguments, of its transformer and of its groups of ranks, and torchtitan's
requirements on the same degrees. ``docs/fits.md`` lists them.

Megatron finds some of them late: arguments, configuration, groups and batch pass its checks, and the job fails when
layers are built or in the first step [1]_. Each broken rule has the moment, so that the verdict of each check is known.

.. [1] Megatron-LM, ``core.transformer.transformer_block`` (get_num_layers_to_build), ``core.tensor_parallel``
   (layers, mappings), ``core.transformer.moe.moe_layer`` (MoELayer.forward).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from penstock.schemas.transformers.shape import TransformerShape
from penstock.shapes.layout import Layout, divisors, layers_of_stages

_NEAR = 3
"""The number of legal values that a sentence names."""


Moment = Literal["start", "model", "step", "never"]
"""The moment at which Megatron-LM itself refuses.

``start``: its checks before anything is built; ``model``: the model's construction. ``step``: the first step;
``never``: Megatron may run it, but Penstock has no plans for it.
"""
LATE: dict[str, Moment] = {
    "feed_forward": "model",
    "vocabulary": "model",
    "expert_width": "model",
    "context_heads": "step",
    "context_sinks": "step",
    "sequence_parallel": "step",
    "expert_sequence_parallel": "step",
    "cells": "never",
    "sharding": "never",
}
"""The rules that Megatron's checks at the start do not find; ``layers`` with virtual stages is another one."""
_LATE_SENTENCES = {
    "model": " (Megatron's checks at the start let it pass, and building the layers fails)",
    "step": " (Megatron's checks at the start let it pass, and the first step fails)",
}


class Broken(NamedTuple):
    """A rule that a layout breaks: its name, the degree to change, a sentence with the numbers, Megatron's moment."""

    rule: str
    degree: str
    sentence: str
    moment: Moment = "start"


@dataclass(frozen=True, slots=True)
class Case:
    """A layout of a shape on a number of GPUs."""

    shape: TransformerShape
    layout: Layout
    gpus: int


Rule = Callable[[Case], tuple[str, str] | None]
"""The degree to change and a sentence, or None where the rule holds."""


def broken(shape: TransformerShape, layout: Layout, gpus: int) -> list[Broken]:
    """Return every rule that the layout breaks."""
    case = Case(shape, layout, gpus)
    return [_broken_rule(rule.__name__, case, *problem) for rule in RULES if (problem := rule(case)) is not None]


def _broken_rule(rule: str, case: Case, degree: str, sentence: str) -> Broken:
    """Build the broken rule with its moment, which the sentence states where Megatron fails late."""
    late: Moment = "model" if rule == "layers" and case.layout.virtual_stages > 1 else "start"
    moment = LATE.get(rule, late) if case.layout.framework == "megatron" else "start"
    what, semicolon, near = sentence.partition(";")
    return Broken(rule, degree, f"{what}{_LATE_SENTENCES.get(moment, '')}{semicolon}{near}", moment)


def product(case: Case) -> tuple[str, str] | None:
    """Require that tensor × context × pipeline divides the GPUs."""
    one = case.layout
    group = one.tensor * one.context * one.pipeline
    if case.gpus % group == 0:
        return None
    parts = [("tensor", one.tensor), ("context", one.context), ("pipeline", one.pipeline)]
    degree, value = max(parts, key=lambda part: part[1])
    rest = group // value
    allowed = divisors(case.gpus // rest) if case.gpus % rest == 0 else ()
    factors = [f"{name} {number}" for name, number in parts if number > 1]
    factors_text = factors[0] if len(factors) == 1 else f"{' × '.join(factors)} = {group}"
    return degree, (f"{factors_text} does not divide {_counted(case.gpus, 'GPU')}{_nearest(degree, value, allowed)}")


def heads(case: Case) -> tuple[str, str] | None:
    """Require that the tensor degree divides the attention heads."""
    tensor, number = case.layout.tensor, case.shape.heads
    if number % tensor == 0:
        return None
    return (
        "tensor",
        f"tensor {tensor} does not divide {number} attention heads{_nearest('tensor', tensor, divisors(number))}",
    )


def key_value_heads(case: Case) -> tuple[str, str] | None:
    """Require that the tensor degree divides the key and value heads.

    Megatron also copies the heads where their number divides the tensor degree.
    """
    tensor, number = case.layout.tensor, case.shape.kv_heads
    if case.shape.latent is not None or number == case.shape.heads or number % tensor == 0:
        return None
    if case.layout.framework == "megatron" and tensor % number == 0:
        return None
    nearest = _nearest("tensor", tensor, divisors(number))
    return "tensor", f"tensor {tensor} does not divide {number} key and value heads{nearest}"


def feed_forward(case: Case) -> tuple[str, str] | None:
    """Require that the tensor degree divides the width of the feed-forward, and of shared experts."""
    tensor, shape = case.layout.tensor, case.shape
    widths = [shape.ffn] if shape.experts is None or shape.experts.dense_layers else []
    widths += [shape.experts.shared_ffn] if shape.experts is not None and shape.experts.shared_ffn else []
    wrong = next((width for width in widths if width % tensor), None)
    if wrong is None:
        return None
    nearest = _nearest("tensor", tensor, divisors(wrong))
    return "tensor", f"tensor {tensor} does not divide the feed-forward width {wrong}{nearest}"


def vocabulary(case: Case) -> tuple[str, str] | None:
    """Require that the tensor degree divides a padded vocabulary of the shape; frameworks pad any other vocabulary."""
    tensor, rows = case.layout.tensor, case.shape.padded_vocabulary
    if rows is None or rows % tensor == 0:
        return None
    nearest = _nearest("tensor", tensor, divisors(rows))
    return "tensor", f"tensor {tensor} does not divide the padded vocabulary of {rows} rows{nearest}"


def context(case: Case) -> tuple[str, str] | None:
    """Require that twice the context degree divides the sequence: each GPU has a front and a back part."""
    degree, length = case.layout.context, case.shape.sequence_length
    if degree == 1 or length % (2 * degree) == 0:
        return None
    legal = divisors(length // 2) if length % 2 == 0 else (1,)
    nearest = _nearest("context", degree, legal)
    return "context", f"2 × context {degree} does not divide a sequence of {length} tokens{nearest}"


def context_heads(case: Case) -> tuple[str, str] | None:
    """Require for all-to-all that the context degree divides a tensor-parallel GPU's heads of queries and keys."""
    one, shape = case.layout, case.shape
    if one.context == 1 or one.context_by != "all_to_all":
        return None
    copied = shape.heads if shape.latent is not None else max(shape.kv_heads, one.tensor)
    both = math.gcd(shape.heads, copied)
    legal = divisors(both // one.tensor) if both % one.tensor == 0 else ()
    for number, noun in ((shape.heads, "attention heads"), (copied, "key and value heads")):
        if number % (one.tensor * one.context):
            nearest = _nearest("context", one.context, legal)
            return "context", (
                f"all-to-all: tensor {one.tensor} × context {one.context} = {one.tensor * one.context} does not divide "
                f"{number} {noun}{nearest}"
            )
    return None


def context_sinks(case: Case) -> tuple[str, str] | None:
    """Refuse attention sinks where Transformer Engine lacks them: in shared sequences, unless heads are exchanged."""
    one = case.layout
    if not case.shape.sinks or one.context == 1 or one.framework == "torch" or one.context_by == "all_to_all":
        return None
    return "context", (
        f"{case.shape.name} has attention sinks, which Megatron has with context {one.context} by all-to-all only; "
        "nearest: context 1"
    )


def sequence_parallel(case: Case) -> tuple[str, str] | None:
    """Require with sequence parallelism that the tensor degree divides the tokens of a GPU."""
    one, length = case.layout, case.shape.sequence_length
    if one.tensor == 1 or not one.sequence_parallel or length % one.context or length // one.context % one.tensor == 0:
        return None
    tokens = length // one.context
    nearest = _nearest("tensor", one.tensor, divisors(tokens))
    return "tensor", f"sequence parallelism: tensor {one.tensor} does not divide {tokens} tokens of a GPU{nearest}"


def layers(case: Case) -> tuple[str, str] | None:
    """Require that the layers can be split over all virtual stages."""
    one = case.layout
    if layers_of_stages(case.shape.layers, one) is not None:
        return None
    stages, number = one.pipeline * one.virtual_stages, case.shape.layers
    degree, value = ("virtual_stages", one.virtual_stages) if one.virtual_stages > 1 else ("pipeline", one.pipeline)
    rest = stages // value
    with_ends = divisors(number + 2) if one.ends_as_layers else ()
    even = {*divisors(number), *with_ends} if one.framework == "megatron" else {number // rest * rest}
    nearest = _nearest(degree, value, {each // rest for each in even if each % rest == 0 and each > 0})
    if stages > number:
        return degree, f"{number} layers are fewer than {stages} stages{nearest}"
    text = f"pipeline {one.pipeline}" + (f" × virtual stages {one.virtual_stages}" if one.virtual_stages > 1 else "")
    if not one.ends_as_layers:
        return degree, f"{text} does not divide {number} layers{nearest}"
    return degree, (
        f"{text} divides neither {number} layers nor {number + 2}, with embedding and head counted as layers{nearest}"
    )


def interleaving(case: Case) -> tuple[str, str] | None:
    """Require a pipeline for virtual stages."""
    one = case.layout
    if one.virtual_stages == 1 or one.pipeline > 1:
        return None
    return "virtual_stages", f"virtual stages {one.virtual_stages} need a pipeline of at least 2 stages; nearest: 1"


def batch(case: Case) -> tuple[str, str] | None:
    """Require that micro-batch size × replicas divides the global batch; context parallelism adds no samples."""
    one = case.layout
    if one.global_batch_size is None or one.data == 0:
        return None
    each = one.micro_batch_size * one.data
    if one.global_batch_size % each == 0:
        return None
    near = sorted({max(each, one.global_batch_size // each * each), -(-one.global_batch_size // each) * each})
    return "global_batch_size", (
        f"micro-batch size {one.micro_batch_size} × {_counted(one.data, 'replica')} = {each} does not divide a global "
        f"batch of {one.global_batch_size}; nearest: {' or '.join(map(str, near))}"
    )


def experts(case: Case) -> tuple[str, str] | None:
    """Require that the expert degree divides the experts, and that it is 1 in a model without experts."""
    degree, shape = case.layout.expert, case.shape
    if shape.experts is None:
        degrees = {"expert": degree, "expert_tensor": case.layout.expert_tensor}
        wrong = next((name for name, value in degrees.items() if value > 1), None)
        if wrong is None:
            return None
        return wrong, f"{wrong.replace('_', ' ')} {degrees[wrong]}: {shape.name} has no experts; nearest: 1"
    if shape.experts.number % degree == 0:
        return None
    nearest = _nearest("expert", degree, divisors(shape.experts.number))
    return "expert", f"expert {degree} does not divide {shape.experts.number} experts{nearest}"


def expert_groups(case: Case) -> tuple[str, str] | None:
    """Require that expert × expert tensor × pipeline divides the GPUs."""
    one = case.layout
    group = one.expert * one.expert_tensor * one.pipeline
    if case.shape.experts is None or case.gpus % group == 0:
        return None
    rest = one.expert_tensor * one.pipeline
    allowed = [each for each in divisors(case.gpus // rest) if case.shape.experts.number % each == 0]
    nearest = _nearest("expert", one.expert, allowed if case.gpus % rest == 0 else ())
    return "expert", (
        f"expert {one.expert} × expert tensor {one.expert_tensor} × pipeline {one.pipeline} = {group} does not divide "
        f"{_counted(case.gpus, 'GPU')}{nearest}"
    )


def expert_width(case: Case) -> tuple[str, str] | None:
    """Require that the expert tensor degree divides the width of an expert."""
    degree, shape = case.layout.expert_tensor, case.shape
    if shape.experts is None or shape.experts.ffn % degree == 0:
        return None
    nearest = _nearest("expert tensor", degree, divisors(shape.experts.ffn))
    return "expert_tensor", f"expert tensor {degree} does not divide the expert width {shape.experts.ffn}{nearest}"


def expert_tensor(case: Case) -> tuple[str, str] | None:
    """Refuse an expert tensor degree in torch: only Megatron splits each expert over GPUs."""
    degree = case.layout.expert_tensor
    if case.shape.experts is None or degree == 1 or case.layout.framework == "megatron":
        return None
    return "expert_tensor", f"expert tensor {degree}: torchtitan's experts are whole on a GPU; nearest with torch: 1"


def expert_sequence_parallel(case: Case) -> tuple[str, str] | None:
    """Require sequence parallelism for experts with tensor parallelism."""
    one = case.layout
    if case.shape.experts is None or one.tensor == 1 or one.sequence_parallel:
        return None
    return "tensor", f"experts with tensor {one.tensor} need sequence parallelism; leave it on, or nearest: tensor 1"


def cells(case: Case) -> tuple[str, str] | None:
    """Require that tensor × context and expert × expert tensor divide one another: groups of neighbouring GPUs nest."""
    one = case.layout
    if case.shape.experts is None:
        return None
    dense, expert = one.tensor * one.context, one.expert * one.expert_tensor
    if dense % expert == 0 or expert % dense == 0:
        return None
    legal = [
        each
        for each in divisors(case.shape.experts.number)
        if dense % (each * one.expert_tensor) == 0 or (each * one.expert_tensor) % dense == 0
    ]
    nearest = _nearest("expert", one.expert, legal)
    return "expert", (
        f"tensor × context = {dense} and expert × expert tensor = {expert}: neither divides the other, so their groups "
        f"of neighbouring GPUs overlap{nearest}"
    )


def sharding(case: Case) -> tuple[str, str] | None:
    """Require a sharding that the framework has and that a pipeline gathers or reduces once per step."""
    one = case.layout
    if one.sharding == "parameters_kept" and one.framework == "megatron":
        return "sharding", "parameters_kept is a sharding of torch's FSDP2; nearest with megatron: optimizer"
    if one.pipeline == 1 or one.sharding not in ("gradients", "parameters"):
        return None
    if one.sharding == "parameters":
        other = "parameters_kept" if one.framework == "torch" else "optimizer"
        reason = "parameters would be gathered again for every micro-batch"
    else:
        other, reason = "optimizer", "gradients would be reduced again for every micro-batch"
    return "sharding", f"sharding {one.sharding} with pipeline {one.pipeline}: {reason}; nearest: {other}"


RULES: tuple[Rule, ...] = (
    product,
    heads,
    key_value_heads,
    feed_forward,
    vocabulary,
    context,
    context_heads,
    context_sinks,
    sequence_parallel,
    layers,
    interleaving,
    batch,
    experts,
    expert_groups,
    expert_width,
    expert_tensor,
    expert_sequence_parallel,
    cells,
    sharding,
)


def _nearest(degree: str, value: int, legal: Iterable[int]) -> str:
    """Name the legal values nearest to ``value``, smaller ones first."""
    near = sorted(sorted(legal, key=lambda each: (abs(each - value), each))[:_NEAR])
    if not near:
        return ""
    return f"; nearest: {degree.replace('_', ' ')} {', '.join(map(str, near))}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
