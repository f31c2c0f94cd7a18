"""A profile without the device: exact parameters, boundaries and stash from the meta device, times from a table.

A layer's time is the sum over its operations of the roofline ``max(FLOPs / reached FLOP/s, bytes / reached bytes/s)``,
and at least one kernel launch per operation. What a device reaches is stated in `device_table`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.executor.profiling.assembly import assemble, checked_sizes
from penstock.executor.profiling.device_table import ANALYTIC_EXPECTED_ERROR, DeviceFacts, Dtype, device_facts
from penstock.executor.profiling.meta_cost import FusedKernels, Operation, OperationRecorder, SavedStorages
from penstock.executor.run.chain import Chain, TensorShape, tensor_shape
from penstock.executor.run.job import Job
from penstock.schemas.errors import InvalidDocument, ModelMismatch
from penstock.schemas.profile import LayerMeasurement, Measurement, ModelProfile, ProfileSource

TORCH_DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class _LayerCost(NamedTuple):
    forward: list[Operation]
    backward: list[Operation]
    stash_bytes: int


class _Run(NamedTuple):
    costs: list[_LayerCost]
    shapes: list[dict[str, TensorShape]]


def analytic_profile(
    job: Job,
    device_kind: str | Sequence[str],
    micro_batch_sizes: Sequence[int],
    dtype: Dtype = "fp32",
    *,
    update_kind: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> ModelProfile:
    """The profile of ``job`` on one kind of device, or several, at each micro-batch size (samples).

    The loss belongs to the last layer, as the executor runs it. A layer has one update time for all kinds: that on
    ``update_kind``, or on the first. Raises NotFound for an unknown kind,
    InvalidDocument for sizes or a dtype that make no sense, ModelMismatch for a model that does not run on the meta
    device.
    """
    kinds = (device_kind,) if isinstance(device_kind, str) else tuple(device_kind)
    facts = [device_facts(kind) for kind in kinds]
    sizes = checked_sizes(micro_batch_sizes)
    if dtype not in TORCH_DTYPES:
        raise InvalidDocument(f"the dtype {dtype!r} is none of {', '.join(TORCH_DTYPES)}")
    chain = Chain(job)
    modules = [chain.build_layer(i, device="meta").to(TORCH_DTYPES[dtype]) for i in range(len(chain.specs))]
    runs = []
    for size in sizes:
        if progress is not None:
            progress(f"{job.name}: {len(modules)} layers at {size} samples on the meta device")
        runs.append(_run(chain, modules, size, TORCH_DTYPES[dtype]))
    update_bytes = [_update_bytes(job, module) for module in modules]
    update_facts = device_facts(update_kind or kinds[0])
    return assemble(
        chain,
        modules,
        runs[-1].shapes,
        [math.ceil(update / update_facts.bytes_per_s() * 1e9) for update in update_bytes],
        [
            Measurement(
                device_kind=device.kind,
                micro_batch_size=size,
                layers=tuple(_measured(cost, device, dtype) for cost in run.costs),
            )
            for device in facts
            for size, run in zip(sizes, runs, strict=True)
        ],
        source=ProfileSource(
            method="analytic",
            description=f"operations on the meta device in {dtype}, times from the table of {', '.join(kinds)}",
            expected_error=ANALYTIC_EXPECTED_ERROR,
        ),
        dtype=dtype,
        assumptions=(
            f"update_ns is one fused step of the job's optimizer on {update_facts.kind}",
            "the loss belongs to the last layer; attention and LSTMs run as fused kernels",
        ),
    )


def _run(chain: Chain, modules: list[nn.Module], size: int, dtype: torch.dtype) -> _Run:
    env = {name: _as(tensor, dtype) for name, tensor in chain.batch_inputs(range(size)).items()}
    targets = _to_meta(chain.job.batch(0, range(size))[1])
    storages = SavedStorages()
    costs, shapes = [], []
    for i, (spec, module) in enumerate(zip(chain.specs, modules, strict=True)):
        storages.leave_out([*module.parameters(), *module.buffers()])
        try:
            results, cost = _trace_layer(chain, i, module, [env[name] for name in spec.reads], env, storages, targets)
        except ModelMismatch:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise ModelMismatch(
                f"layer {spec.name!r} does not run on the meta device: {why}",
                remedy="measure the profile instead of computing it",
            ) from error
        costs.append(cost)
        for name, tensor in zip(spec.writes, results, strict=True):
            env[name] = tensor.detach().requires_grad_(tensor.requires_grad)
        if i < len(chain.cuts):
            shapes.append({name: tensor_shape(env[name]) for name in chain.cuts[i]})
    return _Run(costs, shapes)


def _trace_layer(
    chain: Chain,
    index: int,
    module: nn.Module,
    arguments: list[Tensor],
    env: dict[str, Tensor],
    storages: SavedStorages,
    targets: Any,
) -> tuple[tuple[Tensor, ...], _LayerCost]:
    leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in arguments]
    for parameter in module.parameters():
        parameter.grad = torch.empty_like(parameter)
    with storages.counting() as kept:
        with FusedKernels(), OperationRecorder() as forward:
            results = chain.call(index, module, leaves)
            roots = [tensor for tensor in results if tensor.requires_grad]
            if index == len(chain.specs) - 1:
                roots = _loss(chain, env | dict(zip(chain.specs[index].writes, results, strict=True)), targets) or roots
        stash_bytes = kept()
    with OperationRecorder() as backward:
        if roots:
            torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
    return results, _LayerCost(forward.operations, backward.operations, stash_bytes)


def _loss(chain: Chain, env: dict[str, Tensor], targets: Any) -> list[Tensor]:
    total, _ = chain.job.loss({name: env[name] for name in chain.outputs}, targets)
    return [total] if total.requires_grad else []


def _to_meta(targets: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, targets)


def _update_bytes(job: Job, module: nn.Module) -> int:
    """Traffic of one fused optimizer step: parameters and states read and written, gradients read."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not parameters:
        return 0
    optimizer = job.optimizer(parameters)
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    held = sum(parameter.numel() * parameter.itemsize for parameter in parameters)
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return 3 * held + 2 * sum(state.numel() * state.itemsize for state in states)


def _measured(cost: _LayerCost, device: DeviceFacts, dtype: Dtype) -> LayerMeasurement:
    return LayerMeasurement(
        forward_ns=_time_ns(cost.forward, device, dtype),
        backward_ns=_time_ns(cost.backward, device, dtype),
        stash_bytes=cost.stash_bytes,
    )


def _time_ns(operations: Iterable[Operation], device: DeviceFacts, dtype: Dtype) -> int:
    flops_per_s, bytes_per_s, launch_s = device.flops_per_s(dtype), device.bytes_per_s(), device.launch_ns / 1e9
    seconds = sum(max(launch_s, op.flops / flops_per_s, op.bytes / bytes_per_s) for op in operations)
    return math.ceil(seconds * 1e9)


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
