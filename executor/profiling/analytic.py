"""A profile without the device: exact parameters, boundaries and stash from the meta device, times from a table.

A layer's time is the sum over its operations of the roofline ``max(FLOPs / reached FLOP/s, bytes / reached bytes/s)``,
and at least one kernel launch per operation. `device_table` has the rates that devices reach. At degrees above 1 the
operations are the work of one of the GPUs that share each layer, and collectives are listed separately.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import torch

from penstock.executor.profiling.assembly import assemble, checked_sizes
from penstock.executor.profiling.meta_cost import time_ns
from penstock.executor.profiling.tracing import LayerCost, Run, Tracer, update_ns
from penstock.executor.run.chain import Chain
from penstock.executor.run.job import Job
from penstock.executor.runtime.interface import Precision
from penstock.executor.stage.precision import Training
from penstock.facts.device_table import (
    ANALYTIC_EXPECTED_ERROR,
    DeviceFacts,
    Dtype,
    Level,
    assumed_level,
    device_facts,
)
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
    precision: Precision = "fp32",
    tensor_degrees: Sequence[int] = (),
    context_degrees: Sequence[int] = (),
    expert_degrees: Sequence[int] = (),
    update_kind: str | None = None,
    level: Level | None = None,
    counts_workspace: bool = False,
    progress: Callable[[str], None] | None = None,
) -> ModelProfile:
    """Compute the profile of ``job`` on one kind of device, or several, at each micro-batch size (samples).

    The loss belongs to the last layer. A layer has one update time for all kinds, on ``update_kind`` or the first kind.

    ``dtype``: the type of all tensors. ``precision``: bf16 or fp16 under autocast over parameters in fp32, as on ranks.
    ``…_degrees``: further degrees at which the profile has costs, with all products of them whose groups nest.
    ``level``: the level of the efficiencies in the table of devices. ``counts_workspace``: count the bytes that layers
    need only while they run; shipped profiles do not.

    Raises NotFound for a kind that the table does not have at that level, InvalidDocument for impossible sizes,
    degrees, dtype or precision, ModelMismatch for a model that does not run on the meta device, UnsupportedRequest for
    a layer that cannot be divided so, and Conflict for degrees in a process with a group.
    """
    kinds = (device_kind,) if isinstance(device_kind, str) else tuple(device_kind)
    facts = [device_facts(kind, level) for kind in kinds]
    sizes, degrees = checked_sizes(micro_batch_sizes), _products(tensor_degrees, context_degrees, expert_degrees)
    if dtype not in TORCH_DTYPES:
        raise InvalidDocument(f"unknown dtype {dtype!r}; known are {', '.join(TORCH_DTYPES)}")
    training = _training(dtype, precision)
    chain = Chain(job)
    modules = [chain.build_layer(i, device="meta").to(TORCH_DTYPES[dtype]) for i in range(len(chain.specs))]
    tracer = Tracer(chain, modules, TORCH_DTYPES[dtype], counts_workspace=counts_workspace, training=training)
    runs = _runs(tracer, sizes, progress)
    update_facts = device_facts(update_kind or kinds[0], level)
    plain = assemble(
        chain,
        modules,
        runs[sizes[-1]].shapes,
        [update_ns(tracer.sizes(i), cost, update_facts) for i, cost in enumerate(runs[sizes[-1]].costs)],
        [_measurement(size, run, device, dtype) for device in facts for size, run in runs.items()],
        source=_source(kinds, dtype, precision),
        dtype=dtype,
        assumptions=(
            f"update_ns is one fused step of the job's optimizer on {update_facts.kind}",
            "the loss belongs to the last layer; attention and LSTMs run as fused kernels",
            *_assumed_autocast(training),
            *assumed_level(kinds, level),
        ),
        copied_bytes=[cost.copied_bytes for cost in runs[sizes[-1]].costs],
    )
    if not degrees:
        return plain
    from penstock.executor.divided.variants import with_variants

    return with_variants(plain, tracer, sizes, degrees, facts, update_facts, progress)


def _training(dtype: Dtype, precision: Precision) -> Training:
    """Return the training options of a trace. InvalidDocument for a precision without rates, or unfit for ``dtype``."""
    training = Training(precision)
    if training.precision == "tf32":
        raise InvalidDocument(
            "a profile in tf32 cannot be computed, because no table has the rates of tf32",
            remedy="measure the profile with `--precision tf32` instead of computing it",
        )
    if training.lowered and dtype != "fp32":
        raise InvalidDocument(
            f"precision {precision} is autocast over fp32 parameters, but dtype {dtype} stores all tensors in {dtype}",
            remedy="give only one: precision as `penstock run` trains, or dtype as trainers with a master copy do",
        )
    return training


def _assumed_autocast(training: Training) -> tuple[str, ...]:
    return ("tensors have the types that autocast on CPUs gives them",) if training.lowered else ()


def _source(kinds: Sequence[str], dtype: Dtype, precision: Precision) -> ProfileSource:
    how = dtype if precision == "fp32" else f"{dtype} under autocast in {precision}"
    return ProfileSource(
        method="analytic",
        description=f"operations on the meta device in {how}, times from the table of {', '.join(kinds)}",
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
    """Return all degrees whose groups nest, except 1 for each. InvalidDocument where one is no number of GPUs."""
    for name, degrees in (("tensor", tensor), ("context", context), ("expert", expert)):
        if any(degree < 1 for degree in degrees):
            raise InvalidDocument(f"the {name} degrees {list(degrees)} have to be numbers of at least 1 GPU")
    triples = product(*(sorted({1, *degrees}) for degrees in (expert, context, tensor)))
    all_degrees = [Degrees(tensor=t, context=c, expert=x) for x, c, t in triples]
    return [
        each for each in all_degrees if each.gpus > 1 and each.gpus % min(each.tensor * each.context, each.expert) == 0
    ]


def _measurement(size: int, run: Run, device: DeviceFacts, dtype: Dtype) -> Measurement:
    return Measurement(
        device_kind=device.kind,
        micro_batch_size=size,
        layers=tuple(_measured(cost, device, dtype) for cost in run.costs),
    )


def _measured(cost: LayerCost, device: DeviceFacts, dtype: Dtype) -> LayerMeasurement:
    return LayerMeasurement(
        forward_ns=time_ns(cost.forward, device, dtype),
        backward_ns=time_ns(cost.backward, device, dtype),
        stash_bytes=cost.stash_bytes,
        workspace_bytes=cost.workspace_bytes,
    )
