"""The arrays that the kernel reads and fills, grouped; numba takes named tuples apart at no cost."""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Places(NamedTuple):
    """Occupancies and transitions (``placement.Geometry``), with the memo key of each transition.

    ``by_used``: the states from the emptiest on. Keys of state s are ``keys_of[first_key[s] : first_key[s + 1]]``;
    the last key is the empty prefix.
    """

    states: np.ndarray
    used: np.ndarray
    first: np.ndarray
    target: np.ndarray
    replicas: np.ndarray
    take: np.ndarray
    order: np.ndarray
    node_device: np.ndarray
    node_size: np.ndarray
    node_of: np.ndarray
    by_used: np.ndarray
    key_of: np.ndarray
    keys_of: np.ndarray
    first_key: np.ndarray


class SetCosts(NamedTuple):
    """Costs per set of devices.

    ``room_bytes``: free memory for a stage; ``kinds``: the kinds of its devices as a bit mask. An all-reduce takes
    ``reduce_ns_per_byte`` and, per bucket, ``reduce_fixed_ns``.
    """

    room_bytes: np.ndarray
    kinds: np.ndarray
    reduce_ns_per_byte: np.ndarray
    reduce_fixed_ns: np.ndarray


class Layers(NamedTuple):
    """Layers: prefix sums [kind, share, layer] for the largest slice of every number of replicas, and the rest [layer].

    ``share_of[r]`` numbers the slice of r replicas, ``rows`` gives its rows. ``workspace_bytes`` is per layer,
    ``workspace_from`` its maximum from a layer on. ``least_work_ns[i]``: the least device time of layers from i on;
    ``least_stages[i]``: the least stages for their parameters and states. ``fixed_bytes``, ``state_bytes``: [i, j], of
    layers i … j - 1.
    """

    share_of: np.ndarray
    rows: np.ndarray
    forward_ns: np.ndarray
    backward_ns: np.ndarray
    kept_bytes: np.ndarray
    workspace_bytes: np.ndarray
    workspace_from: np.ndarray
    least_work_ns: np.ndarray
    least_stages: np.ndarray
    trained_bytes: np.ndarray
    sent_bytes: np.ndarray
    returned_bytes: np.ndarray
    cut: np.ndarray
    fixed_bytes: np.ndarray
    state_bytes: np.ndarray


class Settings(NamedTuple):
    """Numbers that rule a search; flags are booleans, choices small integers (``search`` has the tables)."""

    mode: int
    channel: int
    micro_batches: int
    rows: int
    fed: int
    recompute: int
    lenient: bool
    sharded: bool
    buffers: bool
    overlap: bool
    bucket: int
    max_stages: int
    total: int
    unused: bool
    labels: bool
    prune: bool


class Memo(NamedTuple):
    """The prefixes by [key, cut, slot]: five numbers, rank and latency, and the label or the last stage's times."""

    info: np.ndarray
    rank: np.ndarray
    label: np.ndarray
    times: np.ndarray
    overflow: np.ndarray


class Scratch(NamedTuple):
    """The kernel's working arrays."""

    source: np.ndarray
    target: np.ndarray
    load: np.ndarray
    touched: np.ndarray
    line: np.ndarray
    legal: np.ndarray
    widest: np.ndarray
