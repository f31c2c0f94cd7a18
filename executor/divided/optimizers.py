"""Whether an optimizer can step the parts that ranks have of shared parameters as it would step the whole ones."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from penstock.executor.run.job import Job
from penstock.schemas.errors import UnsupportedRequest


def refuse_whole_tensor_optimizer(job: Job, parts: Iterable[nn.Parameter]) -> None:
    """Raise UnsupportedRequest where the job's optimizer keeps states that are no part of whole parameters' states.

    ``parts``: what this rank has of parameters of which other ranks have other parts. States have the parameter's
    shape, or are single numbers; those of rows and columns, say, are of whole tensors. They are found by stepping a
    small parameter of each number of dimensions.
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
                    f"parameter of shape {tuple(trial.shape)}: it works on whole tensors, and ranks have parts of them",
                    remedy="train with an optimizer that steps each number by itself, such as AdamW, or plan with "
                    "--tensor 1 and --sharding none",
                )
