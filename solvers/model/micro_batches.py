"""The cut of a global batch into micro-batches and of these into slices, and the numbers of micro-batches tried.

No sample is lost. Planners try DAPPLE's rule, powers of two, and the sizes that were measured (ALGORITHMS 1.2 and R-1):
the number of micro-batches follows from the replication, ``Z = min_slice × max replicas`` and ``M = ceil(GB / Z)``; the
rows of the last micro-batches are uneven.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem

T = TypeVar("T")
MAX_CANDIDATES = 24
SMALL_CLUSTER = 16


def num_micro_batches(global_batch_size: int, micro_batch_size: int) -> int:
    """Return the number of micro-batches needed when none has more than ``micro_batch_size`` samples."""
    return -(-global_batch_size // micro_batch_size)


def micro_batch_rows(global_batch_size: int, num_micro_batches: int, micro_batch: int) -> int:
    """Return the samples of one micro-batch: sizes differ by at most one, the larger ones come first."""
    base, larger = divmod(global_batch_size, num_micro_batches)
    return base + 1 if micro_batch < larger else base


def row_classes(global_batch_size: int, num_micro_batches: int) -> tuple[tuple[int, int], ...]:
    """Return the one or two distinct sizes as (rows, number of micro-batches), larger first."""
    base, larger = divmod(global_batch_size, num_micro_batches)
    if larger == 0:
        return ((base, num_micro_batches),)
    return ((base + 1, larger), (base, num_micro_batches - larger))


def most_rows(problem: Problem, allocation: Allocation) -> int:
    """Return the samples of the largest micro-batch."""
    return -(-problem.global_batch_size // allocation.num_micro_batches)


def slice_bounds(rows: int, replicas: int, replica: int) -> tuple[int, int]:
    """Return the rows [low, high) of a micro-batch that one of ``replicas`` holds (DAPPLE, section V-B2)."""
    return rows * replica // replicas, rows * (replica + 1) // replicas


def largest_slice(rows: int, replicas: int) -> int:
    """Return the number of rows of the largest slice."""
    return -(-rows // replicas)


class Batch(NamedTuple):
    """A batch of ``num_micro_batches``; the largest has ``most_rows`` samples, the smallest ``least_rows``."""

    num_micro_batches: int
    most_rows: int
    least_rows: int

    def replicas_fed(self, min_slice: int) -> int:
        """Return the largest number of replicas that each get ``min_slice`` rows of every micro-batch."""
        return self.least_rows // min_slice


def batch_of(problem: Problem, micro_batch_size: int) -> Batch:
    """Return the batch whose micro-batches have at most ``micro_batch_size`` samples."""
    number = num_micro_batches(problem.global_batch_size, micro_batch_size)
    return Batch(number, -(-problem.global_batch_size // number), problem.global_batch_size // number)


def candidates(problem: Problem, replicas: Iterable[int] = (1,)) -> tuple[Batch, ...]:
    """Return the batches worth trying, the largest micro-batches first, each number of micro-batches once.

    ``replicas``: how many replicas the stages may have; each gives the sizes that feed it evenly. When the request
    names ``micro_batch_sizes``, only those are taken. Batches whose smallest micro-batch is below ``min_slice`` are
    left out.
    """
    sizes = set(problem.micro_batch_sizes) or _generated(problem, sorted(set(replicas)))
    batches = {batch_of(problem, size) for size in sizes}
    fed = sorted((b for b in batches if b.least_rows >= problem.min_slice), key=lambda b: b.num_micro_batches)
    return tuple(fed if problem.micro_batch_sizes else evenly(fed, MAX_CANDIDATES))


def equal_batches(problem: Problem, replicas: int) -> list[Batch]:
    """Return batches of equal micro-batches that give each replica the same number of rows, ``min_slice`` at least."""
    whole = problem.global_batch_size
    if problem.micro_batch_sizes:
        sizes = [size for size in problem.micro_batch_sizes if whole % size == 0]
    else:
        sizes = [rows * replicas for rows in divisors(whole // replicas) if whole % replicas == 0]
    fed = [size for size in sizes if size % replicas == 0 and size // replicas >= problem.min_slice]
    return [batch_of(problem, size) for size in evenly(fed, MAX_CANDIDATES)]


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def evenly(values: Sequence[T], most: int) -> list[T]:
    """Return all values, or ``most`` of them at even distances, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def batches_tried(problem: Problem) -> tuple[Batch, ...]:
    """Return the numbers of micro-batches that planners of a single pipeline try."""
    batches = {*candidates(problem, dapple_replicas(problem)), *candidates(problem, (1, problem.num_devices))}
    return tuple(sorted({*batches, *candidates(problem)}))


def dapple_replicas(problem: Problem) -> tuple[int, ...]:
    """Return the replication factors whose even micro-batches DAPPLE's search tries."""
    devices = problem.num_devices
    if devices <= SMALL_CLUSTER:
        return tuple(range(1, devices + 1))
    return tuple(sorted({1, devices - 1, devices, *(len(node) for node in problem.nodes())}))


def _generated(problem: Problem, replicas: list[int]) -> set[int]:
    """Return sizes up to the batch: powers of two from ``min_slice``, measured, DAPPLE's ``min_slice × replicas``."""
    most = problem.global_batch_size
    measured = measured_rows(problem)
    sizes = {most}
    for size in _doubled(problem.min_slice, most):
        sizes.add(size)
    for factor in replicas:
        sizes.update(size * factor for size in measured if size * factor <= most)
        sizes.add(min(most, problem.min_slice * factor))
    sizes.update(_doubled(problem.min_slice * max(replicas), most))
    return sizes


def measured_rows(problem: Problem) -> tuple[int, ...]:
    """Return the sizes of micro-batches for which the profile has costs."""
    return tuple(sorted({point.rows for points in problem.measured.values() for point in points}))


def _doubled(size: int, most: int) -> list[int]:
    doubled = []
    while size <= most:
        doubled.append(size)
        size *= 2
    return doubled


def size_of(problem: Problem) -> int:
    """Return layers × devices × numbers of micro-batches: the size with which the planners' work grows."""
    return problem.num_layers * problem.num_devices * len(candidates(problem))
