"""Consecutive layers of a chain with tensors to run them on, like a rank's stage of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.executor.run.chain import Chain, derived_seed
from penstock.executor.run.job import Job, LayerSpec
from penstock.executor.runtime.cpu import CPU
from penstock.executor.runtime.interface import Runtime
from penstock.executor.stage.precision import FULL, Training
from penstock.schemas.errors import ModelMismatch


@dataclass(slots=True)
class Share:
    """The layers ``first`` to ``last`` with their inputs; ``env``: the tensors from earlier layers, by name."""

    chain: Chain
    first: int
    last: int
    modules: list[nn.Module]
    env: dict[str, Tensor]
    targets: Any
    size: int
    runtime: Runtime = CPU
    training: Training = FULL

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        """The tensors that its layers read and write."""
        return self.chain.specs[self.first : self.last + 1]

    @property
    def ends_chain(self) -> bool:
        """True if the last layer, and so the loss, belongs to the share."""
        return self.last == len(self.chain.specs) - 1

    def forward(self, after: Callable[[int, list[Tensor]], None]) -> list[Tensor]:
        """Run the layers, and call ``after`` with each layer's results. Return the tensors where the backward starts.

        A tensor that the layers neither read nor write costs them nothing: its gradient is passed on by the stage
        boundary, not by a layer.
        """
        env = {name: leaf(tensor) for name, tensor in self.env.items()}
        with self.training.autocast(self.runtime.device) or nullcontext():
            for i in range(len(self.modules)):
                after(i, [tensor for tensor in self.run_layer(i, env) if tensor.requires_grad])
        used = {name for spec in self.specs for name in (*spec.reads, *spec.writes)}
        crossing = ("",) if self.ends_chain else [name for name in self.chain.cuts[self.last] if name in used]
        return [env[name] for name in crossing if env[name].requires_grad]

    def run_layer(self, i: int, env: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Run layer ``i`` of the share on ``env``, and add its results there; after the chain's last layer, the loss.

        Raises ModelMismatch with the name of a layer that does not run.
        """
        spec = self.chain.specs[self.first + i]
        try:
            results = self.chain.call(self.first + i, self.modules[i], [env[name] for name in spec.reads])
            env.update(zip(spec.writes, results, strict=True))
            if self.ends_chain and i == len(self.modules) - 1:
                total, _ = self.chain.loss(env, self.targets)
                env[""] = total
                return (total,)
        except ModelMismatch:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise ModelMismatch(f"layer {spec.name!r} does not run at {self.size} samples: {why}") from error
        return results


def leaf(tensor: Tensor) -> Tensor:
    """Return a leaf with the same numbers, without a history."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def make_shares(
    job: Job, first: int, last: int, sizes: Sequence[int], runtime: Runtime = CPU, training: Training = FULL
) -> list[Share]:
    """Build a share for each size (samples), all with the same layers on the device, with zeroed gradients."""
    chain = Chain(job)
    modules = list(chain.build_layers(range(first, last + 1), device=runtime.device).values())
    for module in modules:
        module.train()
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    shares = []
    for size in sizes:
        inputs, targets = job.batch(0, range(size))
        env = runtime.moved(inputs) | _random_inputs(chain, first, size, runtime.device, training)
        shares.append(Share(chain, first, last, modules, env, runtime.moved(targets), size, runtime, training))
    return shares


def _random_inputs(chain: Chain, first: int, size: int, device: torch.device, training: Training) -> dict[str, Tensor]:
    """Draw the tensors that layers before ``first`` would write, with the right shapes and types."""
    if not first:
        return {}
    generator = torch.Generator().manual_seed(derived_seed(chain.job.seed, "profile", first))
    tensors = {}
    for name, shape in chain.infer_shapes(range(size), training, device)[first - 1].items():
        whole = (size, *shape.sample_shape)
        drawn = torch.randn(whole, generator=generator) if shape.dtype.is_floating_point else torch.zeros(whole)
        tensors[name] = drawn.to(device=device, dtype=shape.dtype).requires_grad_(shape.needs_grad)
    return tensors
