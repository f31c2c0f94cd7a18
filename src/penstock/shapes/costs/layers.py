"""Work and storage of one GPU of the groups that share a layer, for each role of layer that a shape has.

A time is the sum over the operations of `kernels`. ``megatron`` means Transformer Engine's fused norms, activations and
rotary positions and one product for queries, keys and values. ``torch`` means eager modules with flash attention.

A module of a block is recomputed by its whole forward, as Megatron's ``--recompute-modules mlp`` and torch's checkpoint
of a module do. Attention and feed-forward run from the result of the norm before to their output projection and its
reduce-scatter. The norms are recomputed from their own inputs (Megatron's ``layernorm``).

.. [1] Megatron-Core, ``TransformerLayer`` and ``TransformerConfig.recompute_modules``: normal checkpointing of ``mlp``,
   output-discarding of ``layernorm``.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

from penstock.schemas.profile import DividedCost, DividedLayer
from penstock.schemas.transformers.degrees import Collective, ModuleCost
from penstock.schemas.transformers.shape import TransformerShape
from penstock.shapes import parameters
from penstock.shapes.activations import kept_by_modules, kept_results
from penstock.shapes.costs.blocks import block
from penstock.shapes.costs.case import FP32, Case, Times
from penstock.shapes.costs.ends import embedding_collectives, embedding_times, head_collectives, head_times
from penstock.shapes.costs.pieces import collectives_of, module_costs, times_of
from penstock.shapes.costs.storage import stash_bytes, workspace_bytes
from penstock.shapes.gpu_memory import vocabulary_rows
from penstock.shapes.layout import Layout
from penstock.shapes.roles import WINDOWED, Role, is_dense, is_windowed, roles_of

_ADAM_STATES = 2


class LocalParameters(NamedTuple):
    """Parameters of a layer on one GPU: within experts, and all others."""

    others: int
    experts: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.others + self.experts


def costs_of(case: Case) -> dict[Role, DividedCost]:
    """Compute the costs of a layer of each role on one GPU."""
    return {role: _cost(case, role) for role in dict.fromkeys(roles_of(case.shape))}


def layers_of(case: Case) -> dict[Role, DividedLayer]:
    """Return the storage and update of a layer of each role on one GPU.

    A tied weight belongs to the embedding, and the head updates its copy.
    """
    stored = local_parameters(case.shape, case.layout)
    updated = local_parameters(case.shape.model_copy(update={"tied": False}), case.layout)
    return {
        role: DividedLayer(
            parameter_bytes=case.width * parameter_counts.total,
            expert_bytes=case.width * parameter_counts.experts or None,
            update_ns=math.ceil(_update_ns(case, updated[role].total)),
        )
        for role, parameter_counts in stored.items()
    }


def local_parameters(shape: TransformerShape, layout: Layout) -> dict[Role, LocalParameters]:
    """Count the parameters of a layer of each role on one GPU; a tied weight counts with the embedding."""
    rows, roles = vocabulary_rows(shape, layout), dict.fromkeys(roles_of(shape))
    shape = parameters.with_copied_heads(shape, layout.tensor)
    head = parameters.head(shape, rows)
    if shape.tied:
        head = head._replace(dense=head.dense - rows * shape.hidden)
    each: dict[Role, parameters.Parameters] = {
        "embedding": parameters.embedding(shape, rows),
        "dense": parameters.layer(shape, dense=True),
        "experts": parameters.layer(shape, dense=False),
        "head": head,
    }
    each |= {windowed: each[role] for role, windowed in WINDOWED.items()}
    expert_gpus = layout.expert * layout.expert_tensor
    return {
        role: LocalParameters(
            math.ceil(Fraction(each[role].dense, layout.tensor)) + each[role].replicated,
            math.ceil(Fraction(each[role].expert, expert_gpus)),
        )
        for role in roles
    }


def _cost(case: Case, role: Role) -> DividedCost:
    modules: tuple[ModuleCost, ...] | None = None
    times: Times
    collectives: tuple[Collective, ...]
    if role == "embedding":
        times, collectives = embedding_times(case), embedding_collectives(case)
    elif role == "head":
        times, collectives = head_times(case), head_collectives(case)
    else:
        dense = is_dense(role)
        pieces = block(case.windowed() if is_windowed(role) else case, dense=dense)
        times, collectives = times_of(case, pieces), collectives_of(pieces)
        freed = kept_by_modules(case.shape, case.layout, dense=dense)
        kept = {result.name for result in kept_results(case.shape, case.layout.tensor, dense=dense)}
        modules = module_costs(case, pieces, freed, kept)
    return DividedCost(
        forward_ns=math.ceil(times.forward),
        backward_ns=math.ceil(times.backward),
        backward_weight_ns=math.ceil(times.weight),
        stash_bytes=stash_bytes(case, role),
        workspace_bytes=workspace_bytes(case, role),
        collectives=collectives,
        modules=modules,
    )


def _update_ns(case: Case, number: int) -> float:
    """Compute the time of a fused step of Adam.

    It reads and writes parameters and both states, and reads gradients. Megatron's parameters, gradients and states are
    in fp32, and it writes parameters in 16 bits as well.
    """
    each = (3 + 2 * _ADAM_STATES) * (FP32 if case.fused else case.width) + (case.width if case.fused else 0)
    return each * number / case.kernels.bytes_per_ns
