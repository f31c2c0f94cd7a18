"""Modules of a layer that are recomputed separately: each keeps only its inputs, and runs again in the backward.

A module runs again as a whole, collectives included, as the simulator charges it. It runs with the random state that it
had, and running statistics stay as its first run left them.

.. [1] Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022), section 5: selective
   recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from penstock.executor.run.job import LayerSpec, module_paths
from penstock.executor.stage.segment import wait_for
from penstock.executor.torch_versions import CALL
from penstock.schemas.errors import UnsupportedRequest

Enclosing = Callable[[], AbstractContextManager[Any]]


def recompute_modules(
    spec: LayerSpec, layer: nn.Module, names: Sequence[str], enclosing: Enclosing = nullcontext
) -> None:
    """Make these modules of a layer recomputed; ``names`` are the names that plans use.

    ``enclosing``: the context in which a layer runs.

    Raises UnsupportedRequest, with layer and module, where the layer does not say which of its modules is meant.
    """
    for name in names:
        for path in _paths(spec, name):
            try:
                module = layer.get_submodule(path)
            except AttributeError:
                raise _refused(spec, name, f"its `modules` names {path!r}, which the layer does not have") from None
            module.__dict__[CALL] = _Recomputed(module, enclosing)


def recomputable(specs: Sequence[LayerSpec]) -> tuple[str, ...]:
    """Return the modules that every one of these layers can recompute; layers without modules do not count."""
    if any(spec.modules is None for spec in specs):
        return ()
    named = [module_paths(spec) for spec in specs if spec.modules]
    return tuple(name for name in (named[0] if named else ()) if all(name in each for each in named))


def has_modules(spec: LayerSpec, names: Sequence[str]) -> bool:
    """Return whether a layer has one of these modules. Raises UnsupportedRequest as ``recompute_modules`` does."""
    paths = [_paths(spec, name) for name in names]
    return any(paths)


def _paths(spec: LayerSpec, name: str) -> Sequence[str]:
    if spec.modules is None:
        raise _refused(spec, name, "its LayerSpec has no `modules` to say which module that is")
    paths = module_paths(spec)
    if paths and name not in paths:
        raise _refused(spec, name, f"its `modules` names only {', '.join(paths)}")
    return paths.get(name, ())


def _refused(spec: LayerSpec, name: str, why: str) -> UnsupportedRequest:
    return UnsupportedRequest(
        f"layer {spec.name!r} cannot recompute its {name!r}: {why}",
        remedy=f"give LayerSpec(…, modules={{{name!r}: the path of the module within the layer}}), {{}} for a layer "
        "without any, or plan with recompute never or always",
    )


class _Recomputed:
    """A replacement for a module's call, with its hooks, that keeps only the inputs."""

    def __init__(self, module: nn.Module, enclosing: Enclosing) -> None:
        self._call: Any = module._call_impl
        self._module = module
        self._enclosing = enclosing
        self._runs_again = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._call(*args, **kwargs)
        has_numbers = not any(isinstance(each, torch.Tensor) and each.is_meta for each in args)
        with set_checkpoint_early_stop(False):
            return checkpoint(
                self._run,
                *args,
                use_reentrant=False,
                preserve_rng_state=has_numbers,
                context_fn=lambda: (nullcontext(), self._again()),
                **kwargs,
            )

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        results = self._call(*args, **kwargs)
        if self._runs_again:
            wait_for(results)
        return results

    @contextmanager
    def _again(self) -> Iterator[None]:
        before = [(buffer, buffer.clone()) for buffer in self._module.buffers()]
        self._runs_again = True
        try:
            with self._enclosing():
                yield
        finally:
            self._runs_again = False
        for buffer, value in before:
            buffer.data.copy_(value)
