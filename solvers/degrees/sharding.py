"""The bytes of a model on one GPU under each sharding (Rajbhandari et al., ZeRO, 2020, section 5; FSDP2).

With parameters P, gradients G and optimizer states O over D replicas:

* ``none``: P + G + O.
* ``optimizer``: P + G + O/D.
* ``parameters_kept``: the same. P is the gathered copy that stays until the step. O/D includes the sharded fp32
  parameters, or, where states have no copy in fp32, additional parameters in their present width.
* ``gradients``: P + (G + O)/D.
* ``parameters``: (G + O)/D, and P/D where states have no such copy or the trainer keeps both.

Layers that are not trained have no states: each replica keeps its part of them, under ``parameters_kept`` all of it
besides the copy. Each replica makes the copies of parameters in 16 bits (autocast) from its whole parameters, and frees
them with these: no copy moves, and no copy is shared out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from penstock.solvers.model.degrees import Choice, Sharding, Variant
from penstock.solvers.model.problem import MemoryRules, Problem, frozen


class Parts(NamedTuple):
    """Bytes of each layer, (L,), on one of the replicas that share out one stage.

    ``resident``: parameters held all the time. ``kept``: parameters whose gradients and optimizer states the replica
    keeps.
    ``gathered``: a GPU's part of a gathered layer.
    """

    resident: np.ndarray
    kept: np.ndarray
    gathered: np.ndarray


def sharded_rules(memory: MemoryRules, sharding: Sharding | None) -> MemoryRules:
    """Return the rules of a stage's memory under a sharding; None: as they are."""
    if sharding is None:
        return memory
    more = memory.shard_factor if sharding == "parameters_kept" else 0
    return replace(memory, shard_states=sharding != "none", master_factor=memory.master_factor + more)


def held_bytes(model: Problem | Variant, choice: Choice) -> np.ndarray:
    """Return prefix sums (L + 1,) of the parameters that a replica of a stage holds all the time, with their copies."""
    if choice.sharding != "parameters_kept":
        return model.parameter_bytes
    return frozen(2 * model.parameter_bytes - copied_bytes(model) - model.trainable_bytes)


def copied_bytes(model: Problem | Variant) -> np.ndarray:
    """Return prefix sums (L + 1,) of the copies that are among the parameters."""
    return np.zeros_like(model.parameter_bytes) if model.copied_bytes is None else model.copied_bytes


def parts(apart: Problem, replicas: int, choice: Choice) -> Parts:
    """Return the bytes of each layer on one of the replicas that share out one stage."""
    whole, copied, trained, owned = (
        np.diff(each) for each in (apart.parameter_bytes, copied_bytes(apart), apart.trainable_bytes, apart.owned_bytes)
    )
    holders = 1 if apart.copies is None else apart.copies.holders
    untrained = -(-(whole - copied - trained) // holders)
    resident = whole
    if choice.sharding == "parameters":
        resident = -(-(owned * apart.memory.shard_factor + untrained) // replicas)
    return Parts(resident, -(-owned // replicas), owned + untrained)
