"""Tensors that the layers of the library `transformers` keep besides the closed form of torch's own modules.

By operator, in bytes of a sample. A trace of the library's modules keeps the closed form's bytes and these, to a
ten-thousandth. This is the library's code of release 5.23 on one GPU in 16 bits, with experts as grouped products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from penstock.facts.device_table import DeviceFacts
from penstock.schemas.transformers.shape import Experts, TransformerShape
from penstock.shapes.costs.case import Case
from penstock.shapes.costs.layers import costs_of
from penstock.shapes.layout import Layout
from penstock.shapes.roles import WINDOWED, Role, is_dense, roles_of

_BF16, _FP32, _INT64, _MASK = 2, 4, 8, 1
_GEMMA = ("gemma", "gemma2", "gemma3_text")
_GIVEN_ON = ("deepseek_v2", "deepseek_v3")
"""Families whose router works in fp32, as torchtitan's."""
_NAMED = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi", "phi3", "gpt2", "gpt_oss"),
    *(*_GEMMA, *_GIVEN_ON, "granite", "smollm3", "ministral3", "hunyuan_v1_dense"),
)
"""Families whose layers differ from the closed form by the operators below alone."""


class _At(NamedTuple):
    """A role of layer of a model: its config.json, and the shape that this describes."""

    values: Mapping[str, Any]
    shape: TransformerShape
    role: Role

    @property
    def family(self) -> str:
        return str(self.values["model_type"])


Operators = dict[str, Callable[[_At], int]]


def kept_by_the_library(values: Mapping[str, Any], shape: TransformerShape, role: Role) -> dict[str, int]:
    """Return the bytes of one sample in 16 bits that a layer of a role keeps more, or less, by operator.

    Operators without bytes are omitted. ``values`` is the config.json of ``shape``, without a default for its
    ``model_type``.
    """
    at = _At(values, shape, role)
    sizes = {name: of(at) for name, of in OPERATORS.items()}
    return {name: size for name, size in sizes.items() if size}


def explained(values: Mapping[str, Any], shape: TransformerShape, facts: DeviceFacts) -> tuple[str, ...]:
    """Return a sentence for each role of block: how much more or less it keeps on one GPU.

    Operators of 0.05 % and more are named. A family some of whose operators are unknown has no sentences.
    """
    if values["model_type"] not in _NAMED:
        return ()
    sentences = []
    costs = costs_of(Case(shape, Layout(framework="torch"), facts))
    firsts: dict[str, Role] = {}
    for role in roles_of(shape)[1:-1]:
        firsts.setdefault(f"a block with{'out' if is_dense(role) else ''} experts", role)
    for name, role in firsts.items():
        whole = costs[role].stash_bytes
        parts = sorted(kept_by_the_library(values, shape, role).items(), key=lambda part: -abs(part[1]))
        total = sum(size for _, size in parts) / whole
        each = ", ".join(f"{operator} {size / whole:+.1%}" for operator, size in parts if abs(size) >= whole / 2000)
        more = "more" if total > 0 else "less"
        sentences.append(
            f"{name} keeps {abs(total):.1%} {more} than the closed form of torch's own modules says: {each}"
        )
    return tuple(sentences)


def _per_token(of: Callable[[_At], int], *roles: Role) -> Callable[[_At], int]:
    """Return a function that multiplies ``of`` by the tokens of a sample, in layers of these roles."""
    return lambda at: of(at) * at.shape.sequence_length if at.role in roles else 0


def _of_blocks(of: Callable[[_At], int]) -> Callable[[_At], int]:
    """Return such a function for all blocks."""
    return _per_token(of, "dense", "experts", *WINDOWED.values())


def _of_experts(of: Callable[[_At], int]) -> Callable[[_At], int]:
    """Return such a function for blocks with experts."""
    return _per_token(of, "experts", WINDOWED["experts"])


def _rotary(at: _At) -> int:
    """Return the bytes of cosines and sines.

    They have half of a head's width where the library does not repeat them; DeepSeek's are complex.
    """
    shape = at.shape
    if at.family == "gpt2":
        return 0
    if shape.latent is not None:
        return 2 * _BF16 * shape.latent.rotary_width
    halved = at.family in ("phi", "gpt_oss")
    return 2 * _BF16 * (shape.head_width // 2 if halved else shape.head_width)


def _norms(at: _At) -> int:
    """Return the bytes of norms.

    Most cast to 16 bits before they are multiplied by the weight. Gemma's and gpt-oss's multiply in fp32.
    """
    shape = at.shape
    if shape.norm != "rms" or at.family in (*_GEMMA, "gpt_oss") or at.role == "embedding":
        return 0
    if at.role == "head":
        return -_BF16 * shape.hidden
    narrow = 0
    if shape.latent is not None:
        narrow = (shape.latent.query_rank or 0) + shape.latent.key_value_rank
    return -_BF16 * (shape.norms_per_layer * shape.hidden + narrow)


def _weights_of_norms(at: _At) -> int:
    """Return the bytes of Gemma's 1 + weight in fp32."""
    shape = at.shape
    if at.family not in _GEMMA or at.role == "embedding":
        return 0
    heads = 2 * shape.head_width if shape.query_key_norm and at.role != "head" else 0
    return _FP32 * ((1 if at.role == "head" else shape.norms_per_layer) * shape.hidden + heads)


def _norms_of_heads(at: _At) -> int:
    shape = at.shape
    if not shape.query_key_norm:
        return 0
    heads = shape.heads + shape.kv_heads
    return _FP32 * heads - (0 if at.family in _GEMMA else _BF16 * heads * shape.head_width)


def _result_of_attention(at: _At) -> int:
    """Return the bytes of attention's result, which is already in the order of the next projection.

    The closed form has a copy there. Phi makes a copy.
    """
    shape, size = at.shape, _BF16 * at.shape.heads * at.shape.head_width
    if at.family == "phi":
        return size
    copied = shape.latent is None and shape.kv_heads < shape.heads
    return -size if copied and at.family not in ("gpt_oss", "phi3") else 0


def _one_product(at: _At) -> int:
    """Return the bytes of Phi 3's one product for queries, keys and values, and copies of its parts."""
    shape = at.shape
    return _BF16 * (shape.heads + shape.kv_heads) * shape.head_width if at.family == "phi3" else 0


def _gelu(at: _At) -> int:
    """Return the bytes of GELU by tanh in five operations, which keep three tensors more."""
    return 3 * _BF16 * at.shape.ffn if at.family in ("phi", "gpt2") else 0


def _experts(at: _At) -> Experts:
    assert at.shape.experts is not None
    return at.shape.experts


def _router_input(at: _At) -> int:
    """Return the bytes of the router's input, in 16 bits after the norm, where the closed form has a copy in fp32."""
    return 0 if at.family in _GIVEN_ON else -_FP32 * at.shape.hidden


def _router_weight(at: _At) -> int:
    """Return the bytes of the router weight's copy in fp32, the same for all tokens."""
    if at.role not in ("experts", WINDOWED["experts"]) or at.family not in _GIVEN_ON:
        return 0
    return _FP32 * at.shape.hidden * _experts(at).number


def _choice(at: _At) -> int:
    """Return the bytes of the choice: orders of copies, and chosen weights, summed and sorted.

    gpt-oss weighs the chosen experts alone.
    """
    experts = _experts(at)
    chosen = experts.per_token
    if at.family == "gpt_oss":
        return chosen * (_INT64 + 2 * _BF16) - _FP32 * experts.number
    if at.family in ("qwen2_moe", "qwen3_moe"):
        return chosen * _BF16
    return chosen * _FP32


def _groups(at: _At) -> int:
    """Return the bytes of a choice by groups of experts.

    These are the best experts of each group, the chosen groups, and a mask of all experts.
    """
    groups, chosen = at.values.get("n_group"), at.values.get("topk_group")
    best = {"deepseek_v3": 2, "deepseek_v2": 1}.get(at.family, 0)
    if at.family == "deepseek_v2" and at.values.get("topk_method") != "group_limited_greedy":
        return 0
    return _INT64 * (best * groups + chosen) + _MASK * _experts(at).number if groups and chosen and best else 0


def _normalised(at: _At) -> int:
    """Return the bytes of the chosen weights over their sum."""
    usual = {"mixtral": True, "deepseek_v3": True}.get(at.family, False)
    if at.family in ("deepseek_v2", "gpt_oss") or not (
        at.family == "mixtral" or at.values.get("norm_topk_prob", usual)
    ):
        return 0
    return _FP32 * (1 + _experts(at).per_token)


def _activation(at: _At) -> int:
    """Return the bytes of gpt-oss's activation.

    It clamps both factors and gates in four more steps: three tensors of the experts' width.
    """
    experts = _experts(at)
    return 3 * _BF16 * experts.per_token * experts.ffn if at.family == "gpt_oss" else 0


def _returned(at: _At) -> int:
    """Return the bytes of weighing returned copies in 16 bits, where the closed form has fp32."""
    return -_BF16 * at.shape.hidden * _experts(at).per_token


OPERATORS: Operators = {
    "numbers of positions": _per_token(lambda at: _INT64 if at.shape.positions else 0, "embedding"),
    "rotary positions": _of_blocks(_rotary),
    "norms": _per_token(_norms, "dense", "experts", *WINDOWED.values(), "head"),
    "weights of norms": _weights_of_norms,
    "norms of heads": _of_blocks(_norms_of_heads),
    "result of attention": _of_blocks(_result_of_attention),
    "one product for queries, keys and values": _of_blocks(_one_product),
    "GELU": _of_blocks(_gelu),
    "input of the router": _of_experts(_router_input),
    "weight of the router": _router_weight,
    "choice of experts": _of_experts(_choice),
    "groups of experts": _of_experts(_groups),
    "weights of the chosen": _of_experts(_normalised),
    "activation of experts": _of_experts(_activation),
    "copies that come back": _of_experts(_returned),
}
"""The operators by name, in a layer's order."""
