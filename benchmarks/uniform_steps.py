"""The time of a training step under a uniform layout, composed of the closed forms by the formula of 1F1B.

With p stages and M micro-batches a step takes (M - 1) × the slowest stage + the sum of all stages + reductions and
update: a stage computes, runs its collectives and passes its tensors on, one after the other. Hidden is what the costs
of layers say of their collectives, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.executor.profiling.device_table import DeviceFacts, Dtype
from penstock.schemas.profile import DividedCost
from penstock.schemas.transformers.degrees import Collective
from penstock.schemas.transformers.shape import TransformerShape
from penstock.shapes.costs.case import Case
from penstock.shapes.costs.layers import costs_of, layers_of, local_parameters
from penstock.shapes.layout import Layout, layers_of_stages
from penstock.shapes.roles import Role
from penstock.solvers.costs.collectives import Group, Ring


class Links(NamedTuple):
    """What collectives and messages reach: bytes/s of a GPU and ns from one to the next, inside nodes and between."""

    inside: tuple[int, int]
    between: tuple[int, int]
    node: int
    """GPUs of a node."""

    def ring(self, size: int, stride: int) -> Group:
        """A ring whose neighbours are ``stride`` ranks apart; between nodes every GPU has its card."""
        bytes_per_s, latency_ns = self.inside if size * stride <= self.node else self.between
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
    """Of a parameter's gradient when it is reduced."""

    @property
    def time_ns(self) -> float:
        """One step, 1F1B."""
        layout, case = self.layout, Case(self.shape, self.layout, self.facts, self.dtype)
        costs = {role: self._pass_ns(cost, block=role == "dense") for role, cost in costs_of(case).items()}
        split = layers_of_stages(self.shape.layers, layout)
        assert split is not None
        assert layout.micro_batches is not None
        stages = [layers * costs["dense"] for layers in split]
        stages[0] += costs["embedding"]
        stages[-1] += costs["head"]
        if layout.pipeline > 1:
            stages = [stage + self._message_ns() for stage in stages]
        return (layout.micro_batches - 1) * max(stages) + sum(stages) + self._after_ns(case, split)

    def _pass_ns(self, cost: DividedCost, *, block: bool) -> float:
        layout = self.layout
        rings = {
            "tensor": self.links.ring(layout.tensor, 1),
            "context": self.links.ring(layout.context, layout.tensor),
        }
        forward, backward = (
            own + _exposed_ns(rings, cost.collectives, phase, layout.micro_batch_size)
            for own, phase in ((cost.forward_ns, "forward"), (cost.backward_ns, "backward"))
        )
        again = forward if self.recompute and block else 0
        return forward + again + backward

    def _message_ns(self) -> float:
        """A micro-batch's tensor and its gradient, once each per stage, a part by each GPU that shares it.

        Without sequence parallelism Megatron scatters the tensor before it sends, and gathers it again.
        """
        layout = self.layout
        size = 2 * self.shape.sequence_length * layout.micro_batch_size * self.shape.hidden
        mesh = layout.tensor * layout.context
        size //= mesh
        ring = self.links.ring(2, mesh * layout.data)
        return 2 * ring.time_ns("send", size)

    def _after_ns(self, case: Case, split: Sequence[int]) -> float:
        """Gradients reduced by GPUs with the same parameters, then the update, and parameters gathered if sharded."""
        layout, held = self.layout, local_parameters(self.shape, self.layout)
        updates = layers_of(case)
        ring = self.links.ring(layout.shards, layout.tensor)
        sharded = layout.sharding == "optimizer"
        found = []
        for number, layers in enumerate(split):
            first, last = number == 0, number == len(split) - 1
            here: dict[Role, int] = {"embedding": first, "dense": layers, "head": last}
            parameters = sum(held[role].total * times for role, times in here.items())
            update = sum(updates[role].update_ns * times for role, times in here.items())
            gradients = self.gradient_bytes * parameters
            if sharded:
                moved = ring.time_ns("reduce_scatter", gradients) + ring.time_ns("all_gather", 2 * parameters)
            else:
                moved = ring.time_ns("all_reduce", gradients)
            found.append(moved + update / (layout.shards if sharded else 1))
        return max(found)


def _exposed_ns(rings: Mapping[str, Group], collectives: Sequence[Collective], phase: str, rows: int) -> int:
    return sum(
        max(0, rings[each.over].time_ns(each.operation, rows * each.bytes_per_sample, each.count) - each.hidden_ns)
        for each in collectives
        if each.phase == phase
    )
