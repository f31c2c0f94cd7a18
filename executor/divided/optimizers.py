"""A check that an optimizer steps a rank's parts of shared parameters as it would step whole parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from penstock.executor.run.job import Job
from penstock.schemas.errors import UnsupportedRequest


def refuse_whole_tensor_optimizer(job: Job, parts: Iterable[nn.Parameter]) -> None:
    """Raise UnsupportedRequest where the optimizer's states of a part are no part of the whole parameter's states.

    ``parts``: this rank's parts of parameters of which other ranks have other parts. Suitable states have the
    parameter's shape, or are single numbers; a state of rows and columns, say, needs the whole tensor. The check steps
    a small parameter of each number of dimensions.
    """
    for dimensions in sorted({part.dim() for part in parts}):
        trial = nn.Parameter(torch.ones(tuple(range(2, 2 + dimensions))))
        trial.grad = torch.ones_like(trial)
        optimizer = job.optimizer([trial])
        optimizer.step()
        for key, state in optimizer.state[trial].items():
            if isinstance(state, Tensor) and state.numel() > 1 and state.shape != trial.shape:
                raise UnsupportedRequest(
                    f"the optimizer {type(optimizer).__name__} keeps {key!r} of shape {tuple(state.shape)} for a "
                    f"parameter of shape {tuple(trial.shape)}: it works on whole tensors, but ranks hold parts of them",
                    remedy="train with an optimizer that steps each number by itself, such as AdamW, or plan with "
                    "--tensor 1 and --sharding none",
                )
