"""The cost of a layer without running it: its operations on the meta device, one by one.

Each ATen operation is recorded with its floating-point operations (torch's flop formulas) and the bytes that it has to
read and write; views cost nothing. Attention is recorded as the fused kernel that accelerators run (FlashAttention),
which keeps no matrix of positions by positions. An LSTM is recorded as cuDNN runs it, as matrix products over all
positions.

.. [1] Williams, Waterman, Patterson, Roofline (CACM 2009): time is bound by arithmetic or by memory traffic.
.. [2] Dao et al., FlashAttention (2022), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from penstock.facts.device_table import DeviceFacts, Dtype

_aten = torch.ops.aten
_GATHERS = {_aten.embedding, _aten.index_select, _aten.index, _aten.gather}
_LSTM_ARGUMENTS = 9
_ATTENTION = {
    *(_aten._scaled_dot_product_flash_attention, _aten._scaled_dot_product_flash_attention_backward),
    *(_aten._scaled_dot_product_efficient_attention, _aten._scaled_dot_product_efficient_attention_backward),
}
_OF_16_BITS: dict[torch.dtype, Dtype] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_FREE = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}


class Operation(NamedTuple):
    """One kernel: floating-point operations, and bytes read and written.

    ``dtype``: the type of its factors where they have 16 bits; None: the type of the model.
    """

    flops: int
    bytes: int
    dtype: Dtype | None = None


def time_ns(operations: Iterable[Operation], device: DeviceFacts, dtype: Dtype) -> int:
    """Sum the roofline times of all operations on a device, at least one launch each; rounded up."""
    bytes_per_s, launch_s = device.bytes_per_s(), device.launch_ns / 1e9
    flops_per_s = {each: device.flops_per_s(each or dtype) for each in (None, *_OF_16_BITS.values())}
    seconds = sum(max(launch_s, op.flops / flops_per_s[op.dtype], op.bytes / bytes_per_s) for op in operations)
    return math.ceil(seconds * 1e9)


class OperationRecorder(TorchDispatchMode):
    """A mode that records every operation that runs within it in ``operations``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.record(func, args, kwargs, result)
        return result

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any) -> None:
        """Record one operation that has run."""
        traffic = _traffic(func, args, kwargs or {}, result)
        flops = _flops(func, args, kwargs or {}, result)
        if traffic or flops:
            self.operations.append(Operation(flops, traffic, _factors(args) if flops else None))


class FusedKernels(TorchFunctionMode):
    """A mode that replaces attention and LSTMs by accelerators' kernels; the meta device would choose plain forms."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.scaled_dot_product_attention:
            return _fused_attention(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "lstm" and not kwargs and _is_plain_lstm(args):
            return _fused_lstm(*args)
        return func(*args, **(kwargs or {}))


class SavedStorages:
    """The storages that autograd keeps from forward to backward, each once, except storages that are left out."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Exclude the storages of ``tensors``, such as parameters and buffers, from the count."""
        for tensor in tensors:
            self._note(tensor)

    @contextmanager
    def counting(self) -> Iterator[Callable[[], int]]:
        """Count saved tensors within this context. Yields a function that returns the bytes that were new."""
        total = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal total
            total += self._note(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield lambda: total

    def __contains__(self, tensor: Tensor) -> bool:
        return storage_of(tensor)._cdata in self._seen

    def _note(self, tensor: Tensor) -> int:
        storage = storage_of(tensor)
        if storage._cdata in self._seen:
            return 0
        self._seen[storage._cdata] = storage
        return storage.nbytes()


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Return a tensor's storage: of a DTensor this GPU's storage, of an asynchronous tensor its result's."""
    local = getattr(tensor, "_local_tensor", tensor)
    storage: torch.UntypedStorage = getattr(local, "elem", local).untyped_storage()
    return storage


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if isinstance(attn_mask, CausalBias):
        attn_mask, is_causal = None, True
    if attn_mask is None and value.shape[-1] != query.shape[-1]:
        wide: Tensor = _aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, dropout_p, is_causal, scale=scale
        )[0]
        return wide
    if attn_mask is None:
        out: Tensor = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return out
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    bias = attn_mask.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
    masked: Tensor = _aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, dropout_p, is_causal, scale=scale
    )[0]
    return masked


def _is_plain_lstm(args: tuple[Any, ...]) -> bool:
    """Return whether these are `torch.lstm`'s arguments for a padded batch without projections."""
    if len(args) != _LSTM_ARGUMENTS:
        return False
    _, _, weights, has_biases, num_layers, _, _, bidirectional, _ = args
    per_direction = 4 if has_biases else 2
    return isinstance(weights, list) and len(weights) == num_layers * (1 + bidirectional) * per_direction


def _fused_lstm(
    x: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the work of an LSTM without its order in time: both products over all positions, then the gates."""
    directions, step = (2 if bidirectional else 1), (4 if has_biases else 2)
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            at = (layer * directions + direction) * step
            of_input, of_hidden = weights[at : at + 2]
            biases = weights[at + 2 : at + 4] if has_biases else (None, None)
            first = functional.linear(x, of_input, biases[0])
            gates = first + functional.linear(first[..., : of_hidden.shape[1]], of_hidden, biases[1])
            cell = torch.sigmoid(gates)
            outputs.append(torch.tanh(cell.chunk(4, dim=-1)[0]) * cell.chunk(4, dim=-1)[1])
        x = torch.cat(outputs, dim=-1) if bidirectional else outputs[0]
    return x, state[0], state[1]


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    if func.overloadpacket in _ATTENTION:
        return _attention_flops(func, args, kwargs)
    if func.overloadpacket is _aten._grouped_mm:
        return _grouped_flops(*args[:2])
    formula = flop_registry.get(func.overloadpacket)
    return int(formula(*args, **kwargs, out_val=result)) if formula else 0


def _attention_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Count scores and results forward; scores again and four gradients backward. Heads of queries may share keys.

    Causal attention of the last q positions to k keys counts twice the visible pairs, by the convention for a square.
    """
    names = [each.name for each in func._schema.arguments]
    arguments = dict(zip(names, args, strict=False)) | kwargs
    query, key, value = arguments["query"], arguments["key"], arguments["value"]
    scores, results = (1, 1) if names[0] == "query" else (3, 2)
    queries, keys = query.shape[-2], key.shape[-2]
    pairs = query.shape[:-1].numel() * keys
    flops = int(2 * pairs * (scores * query.shape[-1] + results * value.shape[-1]))
    return flops * (2 * keys - queries) // keys if arguments.get("is_causal") else flops


def _grouped_flops(left: Tensor, right: Tensor) -> int:
    """Count the products of groups of rows, as of experts, each with its matrix: every row is in one group."""
    rows = left[0] if left.dim() > right.dim() else left
    return 2 * rows.numel() * right.shape[-1]


def _factors(args: tuple[Any, ...]) -> Dtype | None:
    """Return the 16-bit type of the first tensor; None where it has another type."""
    first = next((leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)), None)
    return None if first is None else _OF_16_BITS.get(first.dtype)


def _traffic(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    if func.is_view or func.overloadpacket in _FREE:
        return 0
    read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    if not func._schema.is_mutable:
        sources = {tensor.untyped_storage()._cdata for tensor in read}
        written = [tensor for tensor in written if tensor.untyped_storage()._cdata not in sources]
        if not written:
            return 0
    elif not written:
        written = read[:1]
    out = sum(map(_size, written))
    return 2 * out if func.overloadpacket in _GATHERS else out + sum(map(_size, read))


def _size(tensor: Tensor) -> int:
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())
