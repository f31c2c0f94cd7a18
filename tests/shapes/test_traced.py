"""One GPU's part of a shipped layer under torch's tensor parallelism, traced without GPUs, against the closed form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from penstock.examples.llama import Block, Config
from penstock.examples.shapes import SHAPES
from penstock.executor.profiling.device_table import device_facts
from penstock.executor.profiling.meta_cost import FusedKernels
from penstock.shapes import parameters
from penstock.shapes.costs.case import Case
from penstock.shapes.costs.layers import costs_of
from penstock.shapes.layout import Layout

SHAPE = SHAPES["llama-3-8b"].model_copy(update={"sequence_length": 1024})
CONFIG = Config(blocks=1, width=4096, heads=32, key_value_heads=8, inner=14_336, length=1024)
GATHERED = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
PLAN = {
    "norm_attention": SequenceParallel(), "attention": GATHERED,
    "attention.query": ColwiseParallel(), "attention.key": ColwiseParallel(), "attention.value": ColwiseParallel(),
    "attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "norm_feed_forward": SequenceParallel(), "feed_forward": GATHERED,
    "feed_forward.gate": ColwiseParallel(), "feed_forward.up": ColwiseParallel(),
    "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
}  # fmt: skip
"""The usual plan of a LLaMA's block, as torchtitan has it."""

NAMES = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
NOT_SENT = {"wait_tensor", "_wrap_tensor_autograd"}


class _Local(TorchDispatchMode):
    """Counts what one rank does: FLOPs of matrix products, and its collectives by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.product_flops = 0
        self.collectives: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.mm:
            self.product_flops += int(flop_registry[func.overloadpacket](*args, out_val=result))
        if func.namespace == "_c10d_functional" and func.overloadpacket.__name__ not in NOT_SENT:
            self.collectives[func.overloadpacket.__name__] += 1
        return result


class _Traced(NamedTuple):
    forward: _Local
    backward: _Local
    kept_bytes: int


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return getattr(local, "elem", local).untyped_storage()


@pytest.fixture(params=[2, 8])
def tensor(request: pytest.FixtureRequest) -> Iterator[int]:
    """A degree, with ranks that do not exist."""
    dist.init_process_group("fake", rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


def _trace(tensor: int) -> _Traced:
    """The second pass: in the first, new operations are also run on whole shapes, to see how they are divided."""
    with torch.device("meta"):
        block = Block(CONFIG).to(torch.bfloat16)
    parallelize_module(block, init_device_mesh("cpu", (tensor,)), PLAN)
    own = {_storage(parameter)._cdata for parameter in block.parameters()}
    for _ in range(2):
        kept: dict[int, torch.UntypedStorage] = {}

        def keep(found: Tensor, kept: dict[int, torch.UntypedStorage] = kept) -> Tensor:
            storage = _storage(found)
            kept.update({} if storage._cdata in own else {storage._cdata: storage})
            return found

        data = torch.empty(1, CONFIG.length // tensor, CONFIG.width, device="meta", dtype=torch.bfloat16)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda found: found), FusedKernels(), _Local() as forward:
            result = block(data.requires_grad_())
        with _Local() as backward:
            result.backward(torch.empty_like(result))
    return _Traced(forward, backward, sum(storage.nbytes() for storage in kept.values()))


def test_a_block_is_divided_as_the_closed_form_says(tensor: int) -> None:
    traced = _trace(tensor)
    layout = Layout(tensor=tensor, framework="torch")
    cost = costs_of(Case(SHAPE, layout, device_facts("H100")))["dense"]
    for phase, seen in (("forward", traced.forward), ("backward", traced.backward)):
        wanted = {NAMES[each.operation]: each.count for each in cost.collectives if each.phase == phase}
        assert seen.collectives == wanted
    weights = sum(rows * columns for rows, columns in parameters.matrices(SHAPE, dense=True))
    flops = 2 * weights * SHAPE.sequence_length // tensor
    assert (traced.forward.product_flops, traced.backward.product_flops) == (flops, 2 * flops)
    tables = 4 * 2 * SHAPE.sequence_length * SHAPE.head_width // 2
    assert traced.kept_bytes - tables == pytest.approx(cost.stash_bytes, rel=1e-3), "rotary tables are beside it"
