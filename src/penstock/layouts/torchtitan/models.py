"""The models of torchtitan's registries, by family and flavor, and the one that a configuration names.

.. [1] torchtitan, ``models/llama3/__init__.py`` and its neighbours, of releases 0.2.2 and 0.3.0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.examples.shapes import SHAPES
from penstock.layouts.torchtitan.settings import LENGTH, Settings
from penstock.schemas.errors import InvalidDocument, UnsupportedRequest
from penstock.schemas.transformers.shape import Experts, LatentAttention, TransformerShape

_LENGTH = 2048
"""Tokens of a sample where ``training.seq_len`` is left out, in both releases."""
_WORDS = 128_256
_SAME_SIZES = re.compile(r"(?<!_)(?:_(?:flex|flash|varlen|sdpa|attn|non|fused|qkv)){1,20}$")
"""Endings of a flavor's name that state no size but how attention is computed."""
_OTHERS = ("flux", "kimi_k2_7", "llama3_ft", "llama4", "muse_glimmer", "qwen3_5", "qwen3_vl")
"""Families with layers of several kinds, and families without shapes here."""
_TIED = ("0.6B", "1.7B", "4B", "debugmodel")


def _llama(layers: int, hidden: int, heads: int, ffn: int, **more: Any) -> TransformerShape:
    sizes = {"kv_heads": 8, "vocabulary": _WORDS, **more}
    return TransformerShape(
        name="llama3",
        layers=layers,
        hidden=hidden,
        heads=heads,
        head_width=hidden // heads,
        ffn=ffn,
        gated=True,
        sequence_length=_LENGTH,
        **sizes,
    )


def _qwen(layers: int, hidden: int, heads: int, ffn: int, *, tied: bool, words: int = 151_936) -> TransformerShape:
    plain = _llama(layers, hidden, heads, ffn, vocabulary=words, tied=tied, query_key_norm=True)
    return plain.model_copy(update={"head_width": 128})


def _flavors() -> Iterator[tuple[str, str, TransformerShape]]:
    yield "llama3", "debugmodel", _llama(6, 256, 16, 768, kv_heads=16, vocabulary=2048)
    yield "llama3", "1B", _llama(16, 2048, 32, 8192, tied=True)
    yield "llama3", "3B", _llama(28, 3072, 24, 8192, tied=True)
    dense = {
        "debugmodel": (8, 256, 16, 3072),
        "0.6B": (28, 1024, 16, 3072),
        "1.7B": (28, 2048, 16, 6144),
        "4B": (36, 2560, 32, 9728),
        "8B": (36, 4096, 32, 12_288),
        "14B": (40, 5120, 40, 17_408),
        "32B": (64, 5120, 64, 25_600),
    }
    for flavor, sizes in dense.items():
        words = 2048 if flavor == "debugmodel" else 151_936
        yield "qwen3", flavor, _qwen(*sizes, tied=flavor in _TIED, words=words)
    experts = Experts(number=64, per_token=8, ffn=768)
    small = _qwen(8, 256, 16, 3072, tied=False, words=2048)
    yield "qwen3", "debugmodel_moe", small.model_copy(update={"experts": experts})
    for family, flavor, name in (
        ("llama3", "8B", "llama-3-8b"),
        ("llama3", "70B", "llama-3-70b"),
        ("llama3", "405B", "llama-3.1-405b"),
        ("qwen3", "30B-A3B", "qwen3-30b-a3b"),
        ("qwen3", "235B-A22B", "qwen3-235b-a22b"),
        ("deepseek_v3", "236B", "deepseek-v2"),
        ("deepseek_v3", "671B", "deepseek-v3"),
        ("gpt_oss", "120b", "gpt-oss-120b"),
    ):
        yield family, flavor, SHAPES[name]
    yield "deepseek_v3", "16B", _deepseek(27, 2048, 10_944, 102_400, Experts(number=64, per_token=6, ffn=1408))
    yield "deepseek_v3", "debugmodel", _deepseek(6, 256, 1024, 2048, Experts(number=8, per_token=3, ffn=256))
    yield "gpt_oss", "20b", _oss(24, 32)


def _deepseek(layers: int, hidden: int, ffn: int, words: int, experts: Experts) -> TransformerShape:
    """Return a shape of sixteen heads with directly projected queries, one dense layer, two shared experts."""
    shared = experts.model_copy(update={"shared_ffn": 2 * experts.ffn, "dense_layers": 1})
    latent = LatentAttention(key_value_rank=512, plain_width=128, rotary_width=64, value_width=128)
    plain = _llama(layers, hidden, 16, ffn, kv_heads=16, vocabulary=words)
    return plain.model_copy(update={"head_width": 192, "experts": shared, "latent": latent})


def _oss(layers: int, number: int) -> TransformerShape:
    large = SHAPES["gpt-oss-120b"]
    assert large.experts is not None
    return large.model_copy(update={"layers": layers, "experts": large.experts.model_copy(update={"number": number})})


FLAVORS: dict[str, dict[str, TransformerShape]] = {}
"""Shapes by family and flavor; lengths of samples are a configuration's, not a flavor's."""
for _family, _flavor, _shape in _flavors():
    FLAVORS.setdefault(_family, {})[_flavor] = _shape.model_copy(update={"name": f"{_family}-{_flavor}"})


@dataclass(frozen=True, slots=True)
class Named:
    """The model that a configuration names; None where it names none."""

    family: str | None
    flavor: str | None


def without_kernels(flavor: str) -> str:
    """Return the flavor of the same sizes without the words on kernels: ``8B_flex`` is ``8B``."""
    return _SAME_SIZES.sub("", flavor)


def named(settings: Settings) -> Named:
    """Return the family and the flavor, of ``[model]`` or of ``model_registry("8B")`` in the module of a family."""
    flavor, family = settings.get("model", "flavor"), settings.get("model", "name")
    if flavor is not None and family is None:
        family = _family_of(settings)
    return Named(None if family is None else str(family), None if flavor is None else str(flavor))


def _family_of(settings: Settings) -> str | None:
    """Return the family that begins the configuration's name, else the only one whose class or module is imported."""
    families = sorted({*FLAVORS, *_OTHERS}, key=len, reverse=True)
    names = (settings.config or "", *(each.rpartition(" ")[2] for each in settings.remarks))
    begun = next((each for each in families for name in names if name.startswith(f"{each}_")), None)
    if begun is not None:
        return begun
    low = settings.text.lower()
    classes = [each for each in families if re.search(rf"\b{each.replace('_', '')}model\b", low)]
    modules = [each for each in families if re.search(rf"\bmodels[./]{each}\b", low)]
    return next((only[0] for only in (classes, modules) if len(only) == 1), None)


def shape_said(settings: Settings, source: str) -> TransformerShape:
    """Return the shape of the model that a configuration names, for samples of its length.

    Raises InvalidDocument where it names none or an unknown one, UnsupportedRequest for a family whose layers differ.
    """
    model = named(settings)
    if model.flavor is None or model.family is None:
        lacking = "model.flavor" if model.flavor is None else "model.name"
        raise InvalidDocument(
            f"{source} does not say the model: it has no {lacking}",
            remedy=f"give the name: --given model.name={model.family or 'llama3'} --given model.flavor="
            f"{model.flavor or '8B'}; or the model: --example, --hf, --profile",
        )
    line = settings.line("flavor") or settings.line(f'"{model.flavor}"')
    at = source if line is None else f"{source}, line {line}"
    if model.family == "llama4":
        raise UnsupportedRequest(
            f"{at}: llama4 {model.flavor} has layers of several kinds, for which Penstock computes no costs",
            remedy="give a profile of the model: --profile",
        )
    flavors = FLAVORS.get(model.family, {})
    shape = flavors.get(without_kernels(model.flavor))
    if shape is None:
        names = FLAVORS if model.family not in FLAVORS else flavors
        raise InvalidDocument(
            f"{at}: torchtitan's model {model.family} {model.flavor} is unknown; known are {', '.join(names)}",
            remedy="describe the model: --hf with its config.json, --example or --profile",
        )
    length = settings.number("training", LENGTH) or settings.number("training", "seq_len") or _LENGTH
    settings.faults.stop()
    return shape.model_copy(update={"sequence_length": length})
