"""A model that the library `transformers` builds on the meta device, split into embedding, decoder layers, head.

Each piece is the library's base model without the other parts, so that a layer gets the same inputs from it as in
training: rotary positions, masks, and others that its family needs.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.executor.divided.context import positions, whole_length
from penstock.executor.divided.division import is_expert
from penstock.executor.hugging_face.experts import GROUPED, LibraryExperts, grouped, in_parts
from penstock.schemas.errors import InvalidDocument, MissingExtra, UnsupportedRequest

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

P = TypeVar("P", bound=nn.Module)

COSTED = "penstock"
"""The library's name for attention with the cost of scaled_dot_product_attention, without masks of padding."""
TRAINED = "penstock-trained"
"""The library's name for attention with windows; sinks and soft caps are refused."""
_LAYERS = ("layers", "h")
_NORMS = ("norm", "final_layernorm", "ln_f")
"""The names of these parts in families' base models."""
_BEFORE_LAYERS = ("drop", "embed_dropout", "wpe")
"""The parts of a base model between its embedding and its layers."""


class Pieces:
    """The pieces of the model of a configuration; each call builds a new piece.

    ``attention``: the library's name of the attention in layers. On a device other than meta (``torch.device`` as a
    context) a piece has numbers, drawn as the library draws them.
    """

    def __init__(self, values: Mapping[str, Any], origin: str, attention: str = COSTED) -> None:
        self.origin = origin
        self._model = _built(values, origin, attention)
        self.base: Any = self._model.base_model
        embedding = self._model.get_input_embeddings()
        self.words = next((name for name, part in self.base.named_children() if part is embedding), "")
        """The family's name for its embedding."""
        self._layers, self._norm = (self._named(names, what) for names, what in _PARTS)
        self._refuse_other_parts()
        self.layers: list[nn.Module] = list(getattr(self.base, self._layers))
        self.config: Any = self._model.config
        prefix = f"{self._model.base_model_prefix}."
        plan: dict[str, str] = dict(self._model._tp_plan or {})
        self.plan = {name.removeprefix(prefix): style for name, style in plan.items()}
        """The library's style for each module, by its path in the base model, or in the whole model."""

    def kind(self, index: int) -> int:
        """Return the first layer that is built like layer ``index``."""
        signs = [_sign(layer) for layer in self.layers[: index + 1]]
        return signs.index(signs[index])

    def embedding(self) -> Piece:
        """Build the embedding, from token numbers to vectors, with the family's operations before its first layer."""
        base = self._shell()
        if hasattr(base, "rotary_emb"):
            base.rotary_emb = _Nothing()
        for name in (self.words, *_BEFORE_LAYERS):
            if hasattr(self.base, name):
                setattr(base, name, copy.deepcopy(getattr(self.base, name)))
        return self._drawn(Piece(base, ids=True))

    def block(self, index: int) -> Piece:
        """Build one decoder layer."""
        base = self._shell()
        setattr(base, self._layers, nn.ModuleList([copy.deepcopy(self.layers[index])]))
        base.config = copy.copy(base.config)
        if getattr(base.config, "layer_types", None):
            base.config.layer_types = [self.config.layer_types[index]]
        return self._drawn(Piece(base))

    def head(self) -> Head:
        """Build the last norm and the scores of words."""
        norm, scores = getattr(self.base, self._norm), self._model.get_output_embeddings()
        return self._drawn(Head(copy.deepcopy(norm), copy.deepcopy(scores)))

    def _drawn(self, piece: P) -> P:
        """Move a piece to the default device, draw its parameters, and compute its buffers."""
        place = torch.get_default_device()
        if place.type != "meta":
            piece.to_empty(device=place)
            with torch.no_grad():
                for module in piece.modules():
                    self._model._init_weights(module)
        return piece

    def styles(self, piece: str) -> dict[str, str]:
        """Return the library's plan within a piece, "embedding", "block" or "head", by patterns of paths."""
        if piece == "head":
            return {name: style for name, style in self.plan.items() if name == "lm_head"}
        inside = piece == "block"
        return {
            f"base.{name}".replace(".*.", ".0.", 1): style
            for name, style in self.plan.items()
            if name != "lm_head" and name.startswith(f"{self._layers}.") == inside
        }

    def experts(self, index: int) -> dict[str, LibraryExperts]:
        """Return the styles of a decoder layer's experts, by their path in it; empty for a layer without experts."""
        names = (name for name, part in self.layers[index].named_modules() if _is_experts(part))
        return {f"base.{self._layers}.0.{name}": LibraryExperts() for name in names}

    def modules(self, index: int) -> dict[str, str]:
        """Return the paths of a decoder layer's modules that plans recompute separately.

        Norms are excluded: a plan frees their results, which torch's recomputation keeps for their readers.
        """
        children = dict(self.layers[index].named_children())
        matches = {
            module: next((name for name in names if name in children), None) for module, names in _RECOMPUTED.items()
        }
        return {module: f"base.{self._layers}.0.{name}" for module, name in matches.items() if name is not None}

    def _named(self, names: tuple[str, ...], what: str) -> str:
        match = next((name for name in names if hasattr(self.base, name)), None)
        if match is None:
            raise UnsupportedRequest(
                f"{self.origin}: the model {type(self._model).__name__} has no {what} named {' or '.join(names)}"
            )
        return match

    def _refuse_other_parts(self) -> None:
        """Raise UnsupportedRequest where the model has parameters elsewhere: each layer would get them."""
        expected = {self.words, self._layers, self._norm, *_BEFORE_LAYERS}
        parts = {name.partition(".")[0] for name, _ in self.base.named_parameters()} - expected
        if parts:
            raise UnsupportedRequest(
                f"{self.origin}: the model {type(self._model).__name__} has {', '.join(sorted(parts))}, which is "
                "not part of its embedding, layers or last norm"
            )

    def _shell(self) -> Any:
        """Copy the base model without its parts."""
        parts = dict(self.base._modules)
        for name in (self.words, self._norm, *_BEFORE_LAYERS):
            if name in parts:
                self.base._modules[name] = _Nothing() if name == "wpe" else nn.Identity()
        self.base._modules[self._layers] = nn.ModuleList()
        try:
            return copy.deepcopy(self.base)
        finally:
            self.base._modules.update(parts)


_PARTS = ((_LAYERS, "layers"), (_NORMS, "last norm"))


_RECOMPUTED = {
    "attention": ("self_attn", "attn", "attention"),
    "mlp": ("mlp", "block_sparse_moe", "feed_forward"),
}
"""Families' names for the modules that plans recompute, in a decoder layer."""


class Piece(nn.Module):
    """A base model with only one of its parts."""

    def __init__(self, base: Any, *, ids: bool = False) -> None:
        super().__init__()
        self.base = base
        self.name = "input_ids" if ids else "inputs_embeds"

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, positions), or (samples, positions, width), to (samples, positions, width)."""
        places = positions(x.shape[1], device=x.device).unsqueeze(0)
        out: Tensor = self.base(**{self.name: x}, position_ids=places, use_cache=False)[0]
        return out


class Head(nn.Module):
    """The last norm and the scores."""

    def __init__(self, norm: nn.Module, lm_head: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.lm_head = lm_head

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, positions, width) to (samples, positions, words)."""
        out: Tensor = self.lm_head(self.norm(x))
        return out


class _Nothing(nn.Module):
    """A replacement for position embeddings where they are not needed."""

    def forward(self, x: Tensor, *_others: Any, **_more: Any) -> Tensor:
        """Return a zero."""
        return torch.zeros((), device=x.device)


def divide(piece: nn.Module, mesh: DeviceMesh, styles: Mapping[str, str], config: Any) -> nn.Module:
    """Divide a piece by the library's plan; experts that ranks share out already get parts of the tokens.

    Raises ValueError where the library's plan does not cover it.
    """
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    shared = {name.rpartition(".")[0] for name, parameter in piece.named_parameters() if is_expert(parameter)}
    for name in shared:
        in_parts(piece.get_submodule(name), mesh)
    modules, parameters = dict(piece.named_modules()), dict(piece.named_parameters())
    covered = {
        name: style
        for name, style in styles.items()
        if (name in modules or name in parameters) and not {name, name.rpartition(".")[0]} & shared
    }
    if not covered:
        raise ValueError("the library has no tensor-parallel plan for it")
    for name in parameters:
        if (owner := name.rpartition(".")[0]) in covered:
            covered.setdefault(name, covered[owner])
    piece.config = config
    divided: nn.Module = apply_tensor_parallelism(piece, mesh, covered)
    return divided


def _is_experts(part: nn.Module) -> bool:
    """Return whether a part is a module of experts as in the library, whose parameters have a row for each expert."""
    parameters = [parameter for _name, parameter in part.named_parameters(recurse=False)]
    number = getattr(part, "num_experts", None)
    return len(parameters) > 1 and all(each.dim() > 1 and len(each) == number for each in parameters)


def _sign(layer: nn.Module) -> tuple[object, ...]:
    """Return all that decides a layer's costs: types and settings of its modules, and shapes of its parameters."""
    settings = [
        (name, type(module), *((key, value) for key, value in vars(module).items() if _tells(key, value)))
        for name, module in layer.named_modules()
    ]
    return (*settings, *((name, tuple(each.shape)) for name, each in layer.named_parameters()))


def _tells(key: str, value: object) -> bool:
    return key != "layer_idx" and isinstance(value, bool | int | float | str | None)


def _built(values: Mapping[str, Any], origin: str, attention: str) -> Any:
    """Build the model on the meta device. MissingExtra without the library, InvalidDocument where it refuses."""
    try:
        from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
        from transformers.integrations.moe import ExpertsInterface
    except ImportError as error:
        raise MissingExtra(
            "tracing a Hugging Face model needs the library transformers", remedy="pip install 'penstock[hf]'"
        ) from error
    family = values.get("model_type")
    if not isinstance(family, str):
        raise InvalidDocument(f"{origin} has no 'model_type', so it is not the configuration of a Hugging Face model")
    AttentionInterface.register(COSTED, _costed_attention)
    AttentionInterface.register(TRAINED, _exact_attention)
    ExpertsInterface.register(GROUPED, grouped)
    try:
        config = AutoConfig.for_model(**values)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
            if model._can_set_experts_implementation():
                model.set_experts_implementation(GROUPED)
            return model
    except Exception as error:
        why = str(error).strip().splitlines()
        raise InvalidDocument(
            f"transformers cannot build a causal language model of family {family!r} from {origin}: "
            f"{type(error).__name__}: {why[0] if why else ''}"
        ) from error


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_others: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention over all positions, as a fused kernel does."""
    out = functional.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


def _costed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_others: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the operations and bytes of a window; sinks do not change costs.

    Of n positions in windows of w, each query counts w·(2n - w)/n keys, twice the mean, because causal attention counts
    as the square. Parts of sequences that ranks share count all keys.
    """
    length = query.shape[-2]
    if sliding_window is None or sliding_window >= length or whole_length(length) > length:
        return _attention(module, query, key, value, attention_mask, scaling, dropout)
    seen = -(-sliding_window * (2 * length - sliding_window) // length)
    out = functional.scaled_dot_product_attention(
        query, key[..., :seen, :], value[..., :seen, :], dropout_p=dropout, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


def _exact_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention as the family defines it. UnsupportedRequest for soft caps of scores, and for sinks."""
    if softcap is not None or s_aux is not None:
        what = "caps its scores" if s_aux is None else "has sinks"
        raise UnsupportedRequest(
            f"attention of {type(module).__name__} {what}, which Penstock cannot train",
            remedy="train the model with transformers, or plan without running",
        )
    if sliding_window is None or sliding_window >= whole_length(query.shape[-2]):
        return _attention(module, query, key, value, attention_mask, scaling, dropout)
    place = torch.arange(query.shape[-2], device=query.device)
    ahead = place[:, None] - place
    out = functional.scaled_dot_product_attention(
        *(query, key, value),
        attn_mask=(ahead >= 0) & (ahead < sliding_window),
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=True,
    )
    return out.transpose(1, 2).contiguous(), None
