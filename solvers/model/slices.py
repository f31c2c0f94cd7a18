"""How a global batch is cut: micro-batches of a step, slices of a micro-batch. No sample is lost."""

from __future__ import annotations


def num_micro_batches(global_batch_size: int, micro_batch_size: int) -> int:
    """Micro-batches needed when none has more than ``micro_batch_size`` samples."""
    return -(-global_batch_size // micro_batch_size)


def micro_batch_rows(global_batch_size: int, num_micro_batches: int, micro_batch: int) -> int:
    """Samples of one micro-batch: sizes differ by at most one, the larger ones come first."""
    base, larger = divmod(global_batch_size, num_micro_batches)
    return base + 1 if micro_batch < larger else base


def row_classes(global_batch_size: int, num_micro_batches: int) -> tuple[tuple[int, int], ...]:
    """The one or two distinct sizes as (rows, number of micro-batches), larger first."""
    base, larger = divmod(global_batch_size, num_micro_batches)
    if larger == 0:
        return ((base, num_micro_batches),)
    return ((base + 1, larger), (base, num_micro_batches - larger))


def slice_bounds(rows: int, replicas: int, replica: int) -> tuple[int, int]:
    """Rows [low, high) of a micro-batch that one of ``replicas`` holds (DAPPLE, section V-B2)."""
    return rows * replica // replicas, rows * (replica + 1) // replicas


def largest_slice(rows: int, replicas: int) -> int:
    """Rows of the largest slice."""
    return -(-rows // replicas)
