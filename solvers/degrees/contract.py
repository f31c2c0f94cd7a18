"""A request at one choice of degrees, as an ordinary problem: every planner, bound and check works on it unchanged.

Devices are cells. Times are one GPU's times with the exposed time of the collectives inside a pass. Memory is one
GPU's,
the smallest in its cell. Bytes over a cut and bandwidths are one channel's (``cell_network``). Batches are counted in
rows of one sample for each mesh of a cell: a measurement of n samples on a mesh is a measurement of n rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from penstock.solvers.degrees.cell_network import cell_network
from penstock.solvers.degrees.cells import Cells
from penstock.solvers.degrees.inner_times import InnerTimes, TimeFactors, scaled
from penstock.solvers.degrees.one_stage import joined
from penstock.solvers.degrees.planned import asked_at, cells_apart, is_copied, pin_of, planned_cells, whole_rows
from penstock.solvers.degrees.sharding import held_bytes, sharded_rules
from penstock.solvers.degrees.times import cell_times, variant_at
from penstock.solvers.model.degrees import Choice, Degrees, Variant
from penstock.solvers.model.network import Network
from penstock.solvers.model.problem import Copies, Device, Measured, MemoryRules, Problem, frozen, prefix

Problems = dict[Choice, Problem]
"""Choices whose cells lie inside nodes, as problems on some nodes: their times hold on all nodes of the same kinds."""


def contract(problem: Problem, choice: Choice, problems: Problems | None = None) -> Problem:
    """Return the problem at these degrees and this sharding.

    Times between measured sizes are interpolated; above the largest size they are proportional to it. ``problems``: the
    problems of the same request on any number of nodes of the same kinds; new problems are added. Raises
    UnsupportedRequest if the profile lacks the degrees, the cluster has no such cells, or the request excludes them.
    """
    problem = asked_at(problem, choice.excluded, choice.values)
    if not problem.choices and choice._replace(excluded=None) == Choice():
        return problem
    cells = planned_cells(problem, choice)
    if not choice.in_one_stage:
        return _apart(problem, choice, cells, problems)
    return joined(problem, _replicas(problem, choice, problems), _variant(problem, choice), choice)


def with_times(problem: Problem, times: TimeFactors) -> Problem:
    """Return a problem at a choice with passes that take ``times`` as long as its profile says."""
    real, choice = problem.real, problem.choice
    if real is not None and choice is not None and choice.in_one_stage:
        return joined(real, with_times(_replicas(real, choice), times), _variant(real, choice), choice, times)
    if real is None or choice is None:
        measured = {kind: tuple(_longer(each, times) for each in points) for kind, points in problem.measured.items()}
        return replace(problem, measured=measured, _costs={})
    inner = InnerTimes(real, choice.degrees, problem.cells, times)
    step, measured = cell_times(real, variant_at(real, choice.degrees), inner, times)
    update_ns = frozen(problem.update_ns - problem.step_sums_ns + step)
    return replace(problem, update_ns=update_ns, step_collectives_ns=step, measured=measured, _costs={})


def replicas_apart(problem: Problem) -> Problem:
    """Return the problem whose devices are the replicas that share out one stage (``Choice.in_one_stage``).

    Ranks run the stage on all of these; a row of the whole problem is a row on each. Its times exclude what moves
    inside
    passes, and its memory is a sharded optimizer's memory.
    """
    assert problem.real is not None
    assert problem.choice is not None
    return replace(_replicas(problem.real, problem.choice), choices=(problem.choice,), choice=problem.choice)


def _replicas(problem: Problem, choice: Choice, problems: Problems | None = None) -> Problem:
    """Return the problem of the replicas that share out one stage, with at least the optimizer states sharded."""
    cells = cells_apart(problem, choice.degrees)
    return _apart(replace(problem, pins=()), choice._replace(sharding="optimizer"), cells, problems)


def _apart(problem: Problem, choice: Choice, cells: Cells, problems: Problems | None = None) -> Problem:
    """Return the problem whose devices are cells that may each hold a replica of a stage."""
    if problems is None or problem.pins or not inside_nodes(problem, cells):
        return _problem_at(problem, choice, cells)
    if choice not in problems:
        problems[choice] = _problem_at(problem, choice, cells)
    return _moved(problems[choice], problem, cells)


def inside_nodes(problem: Problem, cells: Cells) -> bool:
    """Return whether each cell is inside a node."""
    node_of = problem.network.node_of
    return all(len({node_of[gpu] for gpu in cell}) == 1 for cell in cells)


def _moved(original: Problem, problem: Problem, cells: Cells) -> Problem:
    """Return a problem at a choice on other nodes; both share the costs computed for its layers."""
    if original.degrees == Degrees():
        return replace(original, devices=problem.devices, network=problem.network)
    network = cell_network(problem.network, cells)
    return replace(original, devices=_devices(problem, cells, network), network=network, real=problem, cells=cells)


def _problem_at(problem: Problem, choice: Choice, cells: Cells) -> Problem:
    memory = problem.memory
    if choice.sharding is not None:
        memory = sharded_rules(memory, choice.sharding)
    if choice.degrees == Degrees():
        return replace(
            problem,
            choices=(choice,),
            choice=choice,
            memory=memory,
            parameter_bytes=held_bytes(problem, choice),
        )
    variant = variant_at(problem, choice.degrees)
    inner = InnerTimes(problem, choice.degrees, cells)
    step, measured = cell_times(problem, variant, inner)
    copies = _copies(variant, inner, memory)
    cuts = variant.boundary_tensors
    network = _network_of(problem.network, cells)
    return replace(
        problem,
        parameter_bytes=held_bytes(variant, choice),
        trainable_bytes=variant.trainable_bytes,
        update_ns=frozen(_own_updates_ns(variant, copies, memory) + step),
        forward_bytes=frozen(sum(size for _name, size, _back in cut) for cut in cuts),
        backward_bytes=frozen(sum(back for _name, _size, back in cut) for cut in cuts),
        boundary_tensors=cuts,
        shared_parameters=variant.shared_parameters,
        measured=measured,
        linear=False,
        kind_source={kind: (kind, 1.0) for kind in problem.kind_source},
        devices=_devices(problem, cells, network),
        network=network,
        global_batch_size=problem.global_batch_size // choice.degrees.meshes,
        micro_batch_sizes=whole_rows(problem, choice.degrees.meshes),
        memory=memory,
        pins=tuple(pin_of(problem, pin, cells) for pin in problem.pins),
        choices=(choice,),
        choice=choice,
        real=problem,
        cells=cells,
        copies=copies,
        step_collectives_ns=step,
        update_workspace_bytes=_own_update_workspace(problem, variant, copies, memory),
        copied_bytes=variant.copied_bytes,
        _costs={},
    )


def _variant(problem: Problem, choice: Choice) -> Variant | None:
    """Return the profile's costs of one GPU of a cell; None where a GPU holds whole layers."""
    return None if choice.degrees == Degrees() else variant_at(problem, choice.degrees)


@lru_cache(maxsize=16)
def _network_of(network: Network, cells: Cells) -> Network:
    """Return the network of cells, one for all choices that differ in sharding alone: it caches its routes."""
    return cell_network(network, cells)


def _copies(variant: Variant, inner: InnerTimes, memory: MemoryRules) -> Copies | None:
    """Return the parameters that GPUs of a cell hold alike; None where each GPU has different parameters."""
    if not is_copied(variant):
        return None
    degrees = variant.degrees
    holders, expert_holders = degrees.cell // degrees.tensor, degrees.cell // degrees.expert_group
    trained, experts = np.diff(variant.trainable_bytes), np.diff(variant.expert_bytes)
    owned = -(-(trained - experts) // holders) - (-experts // expert_holders)
    return Copies(prefix(owned), prefix(inner.reduce_ns(trained.tolist(), experts.tolist(), memory)), holders)


def _own_updates_ns(variant: Variant, copies: Copies | None, memory: MemoryRules) -> np.ndarray:
    """Return prefix sums of a GPU's optimizer step time per layer, in ns: of its part, if states are sharded."""
    if copies is None or not memory.shard_states:
        return variant.update_ns
    whole, trained, owned = (np.diff(each) for each in (variant.update_ns, variant.trainable_bytes, copies.owned_bytes))
    return prefix(np.where(trained > 0, -(-whole * owned // np.maximum(1, trained)), whole))


def _own_update_workspace(
    problem: Problem, variant: Variant, copies: Copies | None, memory: MemoryRules
) -> np.ndarray | None:
    """Return each layer's workspace of a step, in bytes: of a whole layer's workspace, the part that a GPU steps."""
    if problem.update_workspace_bytes is None:
        return None
    stepped = copies.owned_bytes if copies is not None and memory.shard_states else variant.trainable_bytes
    sizes = (problem.update_workspace_bytes, np.diff(problem.trainable_bytes), np.diff(stepped))
    each = zip(*(size.tolist() for size in sizes), strict=True)
    return frozen(-(-workspace * stepped_bytes // max(1, whole)) for workspace, whole, stepped_bytes in each)


def _devices(problem: Problem, cells: Cells, network: Network) -> tuple[Device, ...]:
    """Return the cells as devices of the network between them."""
    return tuple(_cell(problem, cell, node) for cell, node in zip(cells, network.node_of, strict=True))


def _cell(problem: Problem, cell: Sequence[int], node: int) -> Device:
    gpus = [problem.devices[gpu] for gpu in cell]
    prices = [gpu.price for gpu in gpus]
    stated = [price for price in prices if price is not None]
    return Device(
        name=gpus[0].name,
        node=node,
        kind=gpus[0].kind,
        memory_bytes=min(gpu.memory_bytes for gpu in gpus),
        context_bytes=max(gpu.context_bytes for gpu in gpus),
        price=sum(stated) if len(stated) == len(prices) else None,
        edge_bytes=max(gpu.edge_bytes for gpu in gpus),
        group_bytes=max(gpu.group_bytes for gpu in gpus),
    )


def _longer(measured: Measured, times: TimeFactors) -> Measured:
    passes = (measured.forward_ns, measured.backward_ns, measured.weight_ns)
    forward_ns, backward_ns, weight_ns = (scaled(each, times.computation) for each in passes)
    return replace(measured, forward_ns=forward_ns, backward_ns=backward_ns, weight_ns=weight_ns)
