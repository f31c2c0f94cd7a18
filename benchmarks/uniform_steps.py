"""The time of a training step under a uniform layout, composed of the closed forms by the formula of 1F1B.

With p stages and M micro-batches a step takes (M - 1) × the slowest stage + the sum of all stages + reductions and
update: a stage computes, runs its collectives and passes its tensors on, one after the other. Collectives are hidden
only where the costs of layers say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from penstock.facts.device_table import DeviceFacts, Dtype
from penstock.schemas.profile import DividedCost
from penstock.schemas.transformers.degrees import Collective, Operation
from penstock.schemas.transformers.shape import TransformerShape
from penstock.shapes.costs.case import Case
from penstock.shapes.costs.layers import costs_of, layers_of, local_parameters
from penstock.shapes.layout import Layout, layers_of_stages
from penstock.shapes.roles import Role, roles_of
from penstock.solvers.costs.collectives import Group, Ring


class Links(NamedTuple):
    """The reach of collectives and messages: bytes/s of a GPU and ns from one to the next, inside nodes and between."""

    inside: tuple[int, int]
    between: tuple[int, int]
    node: int
    """The GPUs of a node."""
    exchange: tuple[int, int] | None = None
    """The reach of all-to-all inside nodes, if it is measured."""

    def ring(self, size: int, stride: int, operation: Operation | None = None) -> Group:
        """Return a ring whose neighbours are ``stride`` ranks apart; between nodes every GPU has its card."""
        inside = self.exchange if operation == "all_to_all" and self.exchange else self.inside
        bytes_per_s, latency_ns = inside if size * stride <= self.node else self.between
        ring = Ring(size, bytes_per_s, latency_ns)
        return Group(ring, ((ring,),), ())


class Step(NamedTuple):
    """A layout of a shape on one kind of device: Megatron's order of ranks, tensor fastest, then replicas."""

    shape: TransformerShape
    layout: Layout
    facts: DeviceFacts
    links: Links
    dtype: Dtype = "bf16"
    recompute: bool = False
    gradient_bytes: int = 4
    """The bytes of a parameter's gradient when it is reduced."""

    @property
    def time_ns(self) -> float:
        """The time of one step, 1F1B."""
        layout, case = self.layout, Case(self.shape, self.layout, self.facts, self.dtype)
        costs = {role: self._pass_ns(cost, block=cost.modules is not None) for role, cost in costs_of(case).items()}
        assert layout.micro_batches is not None
        split = self._stages()
        stages = [sum(costs[role] for role in stage) for stage in split]
        if layout.pipeline > 1:
            stages = [stage + self._message_ns() for stage in stages]
        return (layout.micro_batches - 1) * max(stages) + sum(stages) + self._after_ns(case, split)

    def _stages(self) -> list[tuple[Role, ...]]:
        """Return the roles of every stage's layers."""
        split, roles = layers_of_stages(self.shape.layers, self.layout), roles_of(self.shape)
        assert split is not None
        ends = [*accumulate(split, initial=1)]
        ends[0], ends[-1] = 0, len(roles)
        return [roles[first:last] for first, last in pairwise(ends)]

    def _pass_ns(self, cost: DividedCost, *, block: bool) -> float:
        layout = self.layout
        rings = {
            "tensor": (layout.tensor, 1),
            "context": (layout.context, layout.tensor),
            "expert": (layout.expert * layout.expert_tensor, 1),
        }
        forward, backward = (
            alone_ns + self._exposed_ns(rings, cost.collectives, phase)
            for alone_ns, phase in ((cost.forward_ns, "forward"), (cost.backward_ns, "backward"))
        )
        again = forward if self.recompute and block else 0
        return forward + again + backward

    def _exposed_ns(self, rings: Mapping[str, tuple[int, int]], collectives: Sequence[Collective], phase: str) -> int:
        exposed_ns = 0
        for each in collectives:
            if each.phase == phase:
                ring = self.links.ring(*rings[each.over], each.operation)
                moved = self.layout.micro_batch_size * each.bytes_per_sample
                exposed_ns += max(0, ring.time_ns(each.operation, moved, each.count) - each.hidden_ns)
        return exposed_ns

    def _message_ns(self) -> float:
        """Return the time of a micro-batch's tensor and its gradient, once each per stage.

        Each GPU of the stage sends a part. Without sequence parallelism Megatron scatters the tensor before it sends,
        and gathers it again.
        """
        layout = self.layout
        size = 2 * self.shape.sequence_length * layout.micro_batch_size * self.shape.hidden
        mesh = layout.tensor * layout.context
        size //= mesh
        ring = self.links.ring(2, mesh * layout.data)
        return 2 * ring.time_ns("send", size)

    def _after_ns(self, case: Case, split: Sequence[Sequence[Role]]) -> float:
        """Return the time after the last backward.

        Gradients are reduced by GPUs with the same parameters, then the update runs, and parameters are gathered if
        sharded.
        """
        layout, parameters, updates = self.layout, local_parameters(self.shape, self.layout), layers_of(case)
        groups = (
            (layout.shards, layout.tensor, {role: each.others for role, each in parameters.items()}),
            (
                layout.expert_shards,
                layout.expert * layout.expert_tensor,
                {role: each.experts for role, each in parameters.items()},
            ),
        )
        times_ns = []
        for stage in split:
            time = 0.0
            for size, stride, each in groups:
                time += self._reduced_ns(self.links.ring(size, stride), sum(each[role] for role in stage))
                update = sum(updates[role].update_ns * each[role] / parameters[role].total for role in stage)
                time += update / (size if layout.sharding == "optimizer" else 1)
            times_ns.append(time)
        return max(times_ns)

    def _reduced_ns(self, ring: Group, parameters: int) -> int:
        if ring.ring.size <= 1 or not parameters:
            return 0
        gradients = self.gradient_bytes * parameters
        if self.layout.sharding == "optimizer":
            return ring.time_ns("reduce_scatter", gradients) + ring.time_ns("all_gather", 2 * parameters)
        return ring.time_ns("all_reduce", gradients)
