"""What of a run is in a checkpoint, by the full names of layers and parameters.

| name | what |
|---|---|
| ``model/L.P`` | parameter P of layer L, newest version; under elastic averaging that of the reference model |
| ``buffer/L.B`` | a buffer, such as running statistics; of replicas the first one's |
| ``optimizer/L.P/K`` | state K of the optimizer for that parameter |
| ``options/L.P`` | the optimizer's name, and the options (learning rate, …) of the group that the parameter is in |

Because names are those of the unsplit model, any plan can go on from it: a rank reads what its layers need. Nothing
else is random or in flight at a step's end: batches and random states follow from seed and step.

Two traps of torch.distributed.checkpoint are kept out of the way (EXECUTOR, section E): optimizer states are read by
name and put in place here, not through ``set_optimizer_state_dict``, which leaves them out silently when a gradient is
there; and its errors, which are no ``Exception``, become ours.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, load
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.nn import Parameter
from torch.optim import Optimizer

from penstock.executor.checkpoint import Checkpoint
from penstock.executor.interpreter import Interpreter
from penstock.schemas.errors import InvalidDocument, ModelMismatch

Entries = dict[str, Any]


def state_of(interpreter: Interpreter) -> Entries:
    """All that this rank holds of the run, by name; tensors are the live ones."""
    state: Entries = {}
    for stage in interpreter.stages.values():
        for name, parameter in stage.module.named_parameters():
            state[f"model/{name}"] = parameter.detach()
            if stage.optimizer is not None and parameter.requires_grad:
                for key, value in stage.optimizer.state.get(parameter, {}).items():
                    state[f"optimizer/{name}/{key}"] = value
                state[f"options/{name}"] = _options(stage.optimizer, parameter)
        state.update((f"buffer/{name}", buffer) for name, buffer in _buffers(interpreter, stage))
    return state


def restore(interpreter: Interpreter, checkpoint: Checkpoint) -> None:
    """Put in place what this rank's layers need. Raises ModelMismatch naming the first that is not there, or differs.

    Raises InvalidDocument for a checkpoint that cannot be read.
    """
    reader = _Reader(checkpoint)
    for stage in interpreter.stages.values():
        for name, parameter in stage.module.named_parameters():
            reader.into(f"model/{name}", parameter.detach())
            if stage.optimizer is not None and parameter.requires_grad:
                reader.ask(f"optimizer/{name}/", parameter)
                reader.ask(f"options/{name}", parameter)
        for name, buffer in _buffers(interpreter, stage):
            reader.into(f"buffer/{name}", buffer)
    reader.read()
    for stage in interpreter.stages.values():
        if stage.optimizer is not None:
            for name, parameter in stage.module.named_parameters():
                if parameter.requires_grad:
                    _set_options(stage.optimizer, name, parameter, reader.found.get(f"options/{name}"))
                    prefix = f"optimizer/{name}/"
                    own = {key[len(prefix) :]: value for key, value in reader.found.items() if key.startswith(prefix)}
                    if own:
                        stage.optimizer.state[parameter] = own


class _Reader:
    """Reads entries of a checkpoint by name: first all are named, then they are read at once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._reader = FileSystemReader(checkpoint.directory)
        try:
            self._has = self._reader.read_metadata().state_dict_metadata
        except Exception as error:
            raise InvalidDocument(f"checkpoint {str(checkpoint.directory)!r} cannot be read: {error}") from error
        self.found: Entries = {}

    def into(self, name: str, tensor: Tensor) -> None:
        """Read entry ``name`` into a tensor. Raises ModelMismatch when it is not there or of another shape or type."""
        where = f"checkpoint {str(self._checkpoint.directory)!r}"
        has = self._has.get(name)
        kind, _, what = name.partition("/")
        if not isinstance(has, TensorStorageMetadata):
            raise ModelMismatch(
                f"{where} is of another model: it has no {_KINDS[kind]} {what!r}",
                remedy="resume with the model that was trained, or give another directory",
            )
        if has.size != tensor.shape or has.properties.dtype != tensor.dtype:
            raise ModelMismatch(
                f"{where} is of another model: {_KINDS[kind]} {what!r} is {tuple(has.size)} of {has.properties.dtype} "
                f"there, {tuple(tensor.shape)} of {tensor.dtype} here",
                remedy="resume with the model that was trained, or give another directory",
            )
        self.found[name] = tensor

    def ask(self, prefix: str, beside: Tensor) -> None:
        """Read whatever entries start with ``prefix``; tensors with a dimension lie on the device of ``beside``."""
        for name, has in self._has.items():
            if name.startswith(prefix):
                if isinstance(has, TensorStorageMetadata):
                    device = beside.device if len(has.size) else "cpu"
                    self.found[name] = torch.empty(has.size, dtype=has.properties.dtype, device=device)
                else:
                    self.found[name] = None

    def read(self) -> None:
        """Read all that was named. Raises InvalidDocument when the files are damaged."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                load(self.found, storage_reader=self._reader, planner=planner, no_dist=True)
        except (CheckpointException, Exception) as error:
            raise InvalidDocument(f"checkpoint {str(self._checkpoint.directory)!r} cannot be read: {error}") from error


_KINDS = {"model": "parameter", "buffer": "buffer"}


def _buffers(interpreter: Interpreter, stage: Any) -> Iterator[tuple[str, Tensor]]:
    for i, module in stage.module.modules.items():
        for name, buffer in module.named_buffers():
            yield f"{interpreter.chain.specs[i].name}.{name}", buffer


def _group_of(optimizer: Optimizer, parameter: Parameter) -> dict[str, Any]:
    return next(group for group in optimizer.param_groups if any(one is parameter for one in group["params"]))


def _options(optimizer: Optimizer, parameter: Parameter) -> dict[str, Any]:
    options = {key: value for key, value in _group_of(optimizer, parameter).items() if key != "params"}
    return {"optimizer": type(optimizer).__name__, "options": options}


def _set_options(optimizer: Optimizer, name: str, parameter: Parameter, saved: dict[str, Any] | None) -> None:
    if saved is None:
        return
    own = type(optimizer).__name__
    if saved["optimizer"] != own:
        raise ModelMismatch(
            f"the checkpoint's optimizer of {name!r} is {saved['optimizer']}, the job's is {own}",
            remedy="resume with the optimizer that was used",
        )
    _group_of(optimizer, parameter).update(saved["options"])
