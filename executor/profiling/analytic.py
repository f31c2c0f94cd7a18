"""A profile without the device: exact parameters, boundaries and stash from the meta device, times from a table.

A layer's time is the sum over its operations of the roofline ``max(FLOPs / reached FLOP/s, bytes / reached bytes/s)``,
and at least one kernel launch per operation. What a device reaches is stated in `device_table`. At degrees the
operations are those of one of the GPUs that share each layer, and its collectives are listed apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product

import torch

from penstock.executor.profiling.assembly import assemble, checked_sizes
from penstock.executor.profiling.device_table import (
    ANALYTIC_EXPECTED_ERROR,
    DeviceFacts,
    Dtype,
    Level,
    assumed_level,
    device_facts,
)
from penstock.executor.profiling.meta_cost import time_ns
from penstock.executor.profiling.tracing import LayerCost, Run, Tracer
from penstock.executor.run.chain import Chain
from penstock.executor.run.job import Job
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.profile import LayerMeasurement, Measurement, ModelProfile, ProfileSource
from penstock.schemas.transformers.degrees import Degrees

TORCH_DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def analytic_profile(
    job: Job,
    device_kind: str | Sequence[str],
    micro_batch_sizes: Sequence[int],
    dtype: Dtype = "fp32",
    *,
    tensor_degrees: Sequence[int] = (),
    context_degrees: Sequence[int] = (),
    expert_degrees: Sequence[int] = (),
    update_kind: str | None = None,
    level: Level = "runs",
    counts_workspace: bool = False,
    progress: Callable[[str], None] | None = None,
) -> ModelProfile:
    """The profile of ``job`` on one kind of device, or several, at each micro-batch size (samples).

    The loss belongs to the last layer, as the executor runs it. A layer has one update time for all kinds: that on
    ``update_kind``, or on the first. ``…_degrees``: those besides 1 at which the profile has costs, too, and at all
    products of them whose groups nest. ``level``: of the efficiencies in the table of devices. ``counts_workspace``: of
    what layers need only while they run, as shipped profiles do not. Raises NotFound for a kind that is not known at
    it, InvalidDocument for impossible sizes, degrees or dtype, ModelMismatch for a model that does not run on the meta
    device, UnsupportedRequest for a layer that cannot be divided so, Conflict for degrees in a process with a group.
    """
    kinds = (device_kind,) if isinstance(device_kind, str) else tuple(device_kind)
    facts = [device_facts(kind, level) for kind in kinds]
    sizes, degrees = checked_sizes(micro_batch_sizes), _products(tensor_degrees, context_degrees, expert_degrees)
    if dtype not in TORCH_DTYPES:
        raise InvalidDocument(f"the dtype {dtype!r} is none of {', '.join(TORCH_DTYPES)}")
    chain = Chain(job)
    modules = [chain.build_layer(i, device="meta").to(TORCH_DTYPES[dtype]) for i in range(len(chain.specs))]
    tracer = Tracer(chain, modules, TORCH_DTYPES[dtype], counts_workspace=counts_workspace)
    runs = _runs(tracer, sizes, progress)
    update_facts = device_facts(update_kind or kinds[0], level)
    plain = assemble(
        chain,
        modules,
        runs[sizes[-1]].shapes,
        [_update_ns(tracer.held(i).update_bytes, update_facts) for i in range(len(modules))],
        [
            Measurement(
                device_kind=device.kind,
                micro_batch_size=size,
                layers=tuple(_measured(cost, device, dtype) for cost in run.costs),
            )
            for device in facts
            for size, run in runs.items()
        ],
        source=_source(kinds, dtype),
        dtype=dtype,
        assumptions=(
            f"update_ns is one fused step of the job's optimizer on {update_facts.kind}",
            "the loss belongs to the last layer; attention and LSTMs run as fused kernels",
            *assumed_level(kinds, level),
        ),
    )
    if not degrees:
        return plain
    from penstock.executor.divided.variants import with_variants

    return with_variants(plain, tracer, sizes, degrees, facts, update_facts, progress)


def _source(kinds: Sequence[str], dtype: Dtype) -> ProfileSource:
    return ProfileSource(
        method="analytic",
        description=f"operations on the meta device in {dtype}, times from the table of {', '.join(kinds)}",
        expected_error=ANALYTIC_EXPECTED_ERROR,
    )


def _runs(tracer: Tracer, sizes: Sequence[int], progress: Callable[[str], None] | None) -> dict[int, Run]:
    runs = {}
    for size in sizes:
        if progress is not None:
            names = tracer.chain.names
            progress(f"{tracer.chain.job.name}: {len(names)} layers at {size} samples on the meta device")
        runs[size] = tracer.run(size)
    return runs


def _products(tensor: Sequence[int], context: Sequence[int], expert: Sequence[int]) -> list[Degrees]:
    """The degrees that nest, but for 1 each. Raises InvalidDocument where one is no number of GPUs."""
    for name, degrees in (("tensor", tensor), ("context", context), ("expert", expert)):
        if any(degree < 1 for degree in degrees):
            raise InvalidDocument(f"the {name} degrees {list(degrees)} have to be numbers of at least 1 GPU")
    triples = product(*(sorted({1, *degrees}) for degrees in (expert, context, tensor)))
    found = [Degrees(tensor=t, context=c, expert=x) for x, c, t in triples]
    return [each for each in found if each.gpus > 1 and each.gpus % min(each.tensor * each.context, each.expert) == 0]


def _update_ns(update_bytes: int, device: DeviceFacts) -> int:
    return math.ceil(update_bytes / device.bytes_per_s() * 1e9)


def _measured(cost: LayerCost, device: DeviceFacts, dtype: Dtype) -> LayerMeasurement:
    return LayerMeasurement(
        forward_ns=time_ns(cost.forward, device, dtype),
        backward_ns=time_ns(cost.backward, device, dtype),
        stash_bytes=cost.stash_bytes,
        workspace_bytes=cost.workspace_bytes,
    )
