"""A model that the library `transformers` builds on the meta device, taken apart: embedding, decoder layers, head.

Each piece is the library's own base model with the other parts taken out, so that a layer gets from it what
it gets in training: rotary positions, masks, whatever its family needs.
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
"""The name that attention has in the library: scaled_dot_product_attention without the masks of padding."""
TRAINED = "penstock-trained"
"""The same with windows; what it does not compute, sinks and soft caps, is refused."""
_LAYERS = ("layers", "h")
_NORMS = ("norm", "final_layernorm", "ln_f")
"""What families call these in their base models."""
_BEFORE_LAYERS = ("drop", "embed_dropout", "wpe")
"""What a base model does with the results of its embedding."""


class Pieces:
    """The model of a configuration; each call builds a new piece.

    ``attention``: the library's name of that which layers compute with. In a place other than the meta device
    (``torch.device`` as a context) a piece has numbers, drawn as the library draws them.
    """

    def __init__(self, values: Mapping[str, Any], origin: str, attention: str = COSTED) -> None:
        self.origin = origin
        self._model = _built(values, origin, attention)
        self.base: Any = self._model.base_model
        embedding = self._model.get_input_embeddings()
        self.words = next((name for name, part in self.base.named_children() if part is embedding), "")
        """What the family calls its embedding."""
        self._layers, self._norm = (self._named(names, what) for names, what in _PARTS)
        self._refuse_other_parts()
        self.layers: list[nn.Module] = list(getattr(self.base, self._layers))
        self.config: Any = self._model.config
        prefix = f"{self._model.base_model_prefix}."
        plan: dict[str, str] = dict(self._model._tp_plan or {})
        self.plan = {name.removeprefix(prefix): style for name, style in plan.items()}
        """How the library divides each module, by its path in the base model, or in the whole model."""

    def kind(self, index: int) -> int:
        """The first layer that is built as layer ``index`` is."""
        signs = [_sign(layer) for layer in self.layers[: index + 1]]
        return signs.index(signs[index])

    def embedding(self) -> Piece:
        """Token numbers to vectors, with what the family does before its first layer."""
        base = self._shell()
        if hasattr(base, "rotary_emb"):
            base.rotary_emb = _Nothing()
        for name in (self.words, *_BEFORE_LAYERS):
            if hasattr(self.base, name):
                setattr(base, name, copy.deepcopy(getattr(self.base, name)))
        return self._drawn(Piece(base, ids=True))

    def block(self, index: int) -> Piece:
        """One decoder layer."""
        base = self._shell()
        setattr(base, self._layers, nn.ModuleList([copy.deepcopy(self.layers[index])]))
        base.config = copy.copy(base.config)
        if getattr(base.config, "layer_types", None):
            base.config.layer_types = [self.config.layer_types[index]]
        return self._drawn(Piece(base))

    def head(self) -> Head:
        """The last norm, and scores of words."""
        norm, scores = getattr(self.base, self._norm), self._model.get_output_embeddings()
        return self._drawn(Head(copy.deepcopy(norm), copy.deepcopy(scores)))

    def _drawn(self, piece: P) -> P:
        """The piece where tensors are made by default, its parameters drawn and its buffers computed."""
        place = torch.get_default_device()
        if place.type != "meta":
            piece.to_empty(device=place)
            with torch.no_grad():
                for module in piece.modules():
                    self._model._init_weights(module)
        return piece

    def styles(self, piece: str) -> dict[str, str]:
        """The library's plan within a piece: of "embedding", "block" or "head", with patterns of paths."""
        if piece == "head":
            return {name: style for name, style in self.plan.items() if name == "lm_head"}
        inside = piece == "block"
        return {
            f"base.{name}".replace(".*.", ".0.", 1): style
            for name, style in self.plan.items()
            if name != "lm_head" and name.startswith(f"{self._layers}.") == inside
        }

    def experts(self, index: int) -> dict[str, LibraryExperts]:
        """How ranks share out the experts of a decoder layer, by their path in it; empty where it has none."""
        found = (name for name, part in self.layers[index].named_modules() if _is_experts(part))
        return {f"base.{self._layers}.0.{name}": LibraryExperts() for name in found}

    def modules(self, index: int) -> dict[str, str]:
        """Where in a decoder layer the modules are that plans recompute by themselves.

        Not the norms: a plan frees what they leave, which torch's recomputation keeps for the modules that read it.
        """
        own = dict(self.layers[index].named_children())
        found = {module: next((name for name in names if name in own), None) for module, names in _RECOMPUTED.items()}
        return {module: f"base.{self._layers}.0.{name}" for module, name in found.items() if name is not None}

    def _named(self, names: tuple[str, ...], what: str) -> str:
        found = next((name for name in names if hasattr(self.base, name)), None)
        if found is None:
            raise UnsupportedRequest(
                f"{self.origin}: the model {type(self._model).__name__} has no {what} by the names {', '.join(names)}"
            )
        return found

    def _refuse_other_parts(self) -> None:
        """Raise UnsupportedRequest where the model has parameters elsewhere: each layer would get them."""
        known = {self.words, self._layers, self._norm, *_BEFORE_LAYERS}
        parts = {name.partition(".")[0] for name, _ in self.base.named_parameters()} - known
        if parts:
            raise UnsupportedRequest(
                f"{self.origin}: the model {type(self._model).__name__} has {', '.join(sorted(parts))}, which belongs "
                "to none of its embedding, layers and last norm"
            )

    def _shell(self) -> Any:
        """The base model without its parts."""
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
"""How families call the modules that plans recompute, in a decoder layer."""


class Piece(nn.Module):
    """A base model of which only one part is there."""

    def __init__(self, base: Any, *, ids: bool = False) -> None:
        super().__init__()
        self.base = base
        self.name = "input_ids" if ids else "inputs_embeds"

    def forward(self, x: Tensor) -> Tensor:
        """(samples, positions), or with the hidden width, to (samples, positions, width)."""
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
        """(samples, positions, width) to (samples, positions, words)."""
        out: Tensor = self.lm_head(self.norm(x))
        return out


class _Nothing(nn.Module):
    """Gives no positions, where they are of no use."""

    def forward(self, given: Tensor, *_others: Any, **_more: Any) -> Tensor:
        """A zero."""
        return torch.zeros((), device=given.device)


def divide(piece: nn.Module, mesh: DeviceMesh, styles: Mapping[str, str], config: Any) -> nn.Module:
    """The piece as the library divides it, but for experts that ranks share out already, which get parts of the tokens.

    Raises ValueError where the library's plan says nothing of it.
    """
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    shared = {name.rpartition(".")[0] for name, parameter in piece.named_parameters() if is_expert(parameter)}
    for name in shared:
        in_parts(piece.get_submodule(name), mesh)
    modules, parameters = dict(piece.named_modules()), dict(piece.named_parameters())
    known = {
        name: style
        for name, style in styles.items()
        if (name in modules or name in parameters) and not {name, name.rpartition(".")[0]} & shared
    }
    if not known:
        raise ValueError("the library has no tensor-parallel plan for it")
    for name in parameters:
        if (owner := name.rpartition(".")[0]) in known:
            known.setdefault(name, known[owner])
    piece.config = config
    divided: nn.Module = apply_tensor_parallelism(piece, mesh, known)
    return divided


def _is_experts(part: nn.Module) -> bool:
    """Whether it is a module of experts as the library calls them, with a row of parameters for each."""
    own = [parameter for _name, parameter in part.named_parameters(recurse=False)]
    number = getattr(part, "num_experts", None)
    return len(own) > 1 and all(each.dim() > 1 and len(each) == number for each in own)


def _sign(layer: nn.Module) -> tuple[object, ...]:
    """What decides a layer's costs: the types of its modules, their settings, and the shapes of their parameters."""
    settings = [
        (name, type(module), *((key, value) for key, value in vars(module).items() if _tells(key, value)))
        for name, module in layer.named_modules()
    ]
    return (*settings, *((name, tuple(each.shape)) for name, each in layer.named_parameters()))


def _tells(key: str, value: object) -> bool:
    return key != "layer_idx" and isinstance(value, bool | int | float | str | None)


def _built(values: Mapping[str, Any], origin: str, attention: str) -> Any:
    """The model on the meta device. Raises MissingExtra without the library, InvalidDocument where it refuses."""
    try:
        from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
        from transformers.integrations.moe import ExpertsInterface
    except ImportError as error:
        raise MissingExtra(
            "tracing a Hugging Face model needs the library transformers", remedy="pip install 'penstock[hf]'"
        ) from error
    family = values.get("model_type")
    if not isinstance(family, str):
        raise InvalidDocument(f"{origin} has no 'model_type', so it is no configuration of a Hugging Face model")
    AttentionInterface.register(COSTED, _attention)
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
            f"transformers builds no causal language model of {origin}, of family {family!r}: "
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
    """Causal attention over all positions, as a fused kernel computes it; sinks and windows change no cost."""
    out = functional.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=True
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
    """The same as the family defines it. Raises UnsupportedRequest for soft caps of scores, and for sinks."""
    if softcap is not None or s_aux is not None:
        what = "caps its scores" if s_aux is None else "has sinks"
        raise UnsupportedRequest(
            f"attention of {type(module).__name__} {what}, which is not trained here",
            remedy="train it with the library, or plan without running",
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
