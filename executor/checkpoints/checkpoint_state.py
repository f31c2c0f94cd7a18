"""The contents of a checkpoint, by the full names of layers and parameters.

| name | contents |
|---|---|
| ``model/L.P`` | parameter P of layer L, newest version; under elastic averaging, of the reference model |
| ``buffer/L.B`` | a buffer, such as running statistics; of replicas the first one's |
| ``optimizer/L.P/K`` | state K of the optimizer for that parameter |
| ``options/L.P`` | the optimizer's name, and the options (learning rate, …) of the parameter's group |
| ``older/D/L.P`` | the weights D updates older than the newest, where forwards still use them (2BW, WPipe) |
| ``pipeline/N/…`` | elastic averaging: the same for pipeline N's model |
| ``schedule``, ``loss_scale`` | the state of the learning-rate schedule, and of the loss scaling |

Names belong to the unsplit model, so a run can continue with any plan: a rank reads what its layers need. Where ranks
share layers, each writes its part of a parameter, and of states of the parameter's shape, as a part of the whole (a
DTensor), so that a plan of any degrees finds its parts in it. No other state is random or in flight at a step's end:
batches and random states follow from seed and step.

Two traps of torch.distributed.checkpoint are avoided (EXECUTOR E.2). Optimizer states are read by name and put in place
here, not through ``set_optimizer_state_dict``, which silently omits them when a gradient exists. Its errors, which are
no ``Exception``, become ours.

Entries other than tensors are written as JSON text (``values``), and all entries are found through ``entries.json``
(``index``), so that no pickle of a checkpoint is executed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.nn import Parameter
from torch.optim import Optimizer

from penstock.executor.checkpoints.checkpoint import Checkpoint
from penstock.executor.checkpoints.index import EntryPlanner, EntryReader
from penstock.executor.checkpoints.values import to_text
from penstock.schemas.errors import InvalidDocument, ModelMismatch

if TYPE_CHECKING:
    from penstock.executor.program.interpreter import Interpreter
    from penstock.executor.stage.held_stage import HeldStage

Entries = dict[str, Any]

_AVERAGED = "elastic_averaging"


def state_of(interpreter: Interpreter) -> Entries:
    """Return all of this rank's state of the run, by name: the live tensors, and everything else as text.

    Collective under elastic averaging. Raises UnsupportedRequest for a state that is neither tensor nor plain data.
    """
    state: Entries = {}
    norm = interpreter.actions.norm
    if norm is not None and norm.scale is not None:
        state["loss_scale"] = norm.scale.state_dict()
    for stage in interpreter.stages.values():
        prefix = _pipeline_prefix(stage)
        if stage.schedule is not None:
            state["schedule"] = stage.schedule.state_dict()
        for name, parameter in stage.parameters.items():
            state[f"{prefix}model/{name}"] = stage.parts.shared(name, parameter.detach())
            state |= {f"{prefix}{key}": value for key, value in _optimizer_state(stage, name, parameter)}
        state |= {f"model/{name}": parameter.detach() for name, parameter in _frozen(stage)}
        state |= {f"{prefix}buffer/{name}": buffer for name, buffer in _buffers(interpreter, stage)}
        names = {id(parameter): name for name, parameter in stage.parameters.items()}
        if stage.averaging is not None:
            for parameter, reference in stage.averaging.reference():
                state[f"model/{names[id(parameter)]}"] = stage.parts.shared(names[id(parameter)], reference)
        if stage.versions is not None:
            for age, tensors in enumerate(stage.versions.state()[1 : stage.versions.oldest + 1], 1):
                for parameter, tensor in zip(stage.versions.parameters, tensors, strict=True):
                    name = names[id(parameter)]
                    state[f"older/{age}/{name}"] = stage.parts.shared(name, tensor)
    return {name: one if isinstance(one, Tensor) else to_text(name, one) for name, one in state.items()}


def refuse_unwritable(interpreter: Interpreter) -> None:
    """Raise UnsupportedRequest where options of the optimizer, or the schedule's state, are no plain data."""
    for stage in interpreter.stages.values():
        if stage.schedule is not None:
            to_text("schedule", stage.schedule.state_dict())
        for name, parameter in stage.parameters.items():
            to_text(f"options/{name}", _options(stage, parameter))


def are_finite(interpreter: Interpreter) -> bool:
    """Return whether all numbers of this rank's parameters are finite."""
    parameters = (one.detach() for stage in interpreter.stages.values() for one in stage.parameters.values())
    return all(bool(torch.isfinite(one).all()) for one in parameters if one.is_floating_point())


def restore(interpreter: Interpreter, checkpoint: Checkpoint) -> None:
    """Restore the state of this rank's layers. ModelMismatch for the first entry that is missing or differs.

    Raises InvalidDocument for a checkpoint that cannot be read.
    """
    reader = _Reader(checkpoint)
    plans = [_Stage(interpreter, stage, reader) for stage in interpreter.stages.values()]
    for name in ("schedule", "loss_scale"):
        reader.if_there(name)
    reader.read()
    for plan in plans:
        plan.put_in_place()
    for stage in interpreter.stages.values():
        if stage.shards is not None:
            stage.shards.stepped()
    norm = interpreter.actions.norm
    if norm is not None and norm.scale is not None and "loss_scale" in reader.entries:
        norm.scale.load_state_dict(reader.entries["loss_scale"])
        norm.begin(interpreter.expected_count)


class _Stage:
    """The entries that one stage reads: first they are named, then read, then put in place."""

    def __init__(self, interpreter: Interpreter, stage: HeldStage, reader: _Reader) -> None:
        self._stage = stage
        self._entries = reader.entries
        pipeline = _pipeline_prefix(stage)
        averaged = reader.checkpoint.about.update_rule == _AVERAGED and reader.checkpoint.about.pipelines > 1
        states = f"pipeline/{stage.entry.pipeline % reader.checkpoint.about.pipelines}/" if averaged else ""
        self._weights = pipeline if averaged and states == pipeline else ""
        self._states = states
        for name, parameter in stage.parameters.items():
            shared = stage.parts.shared(name, parameter.detach())
            reader.into(f"{self._weights}model/{name}", shared)
            if stage.averaging is not None:
                reader.like(f"model/{name}", shared)
            if name in stage.stepped:
                reader.all_of(f"{states}optimizer/{name}/", shared)
            reader.if_there(f"{states}options/{name}")
        for name, parameter in _frozen(stage):
            reader.into(f"model/{name}", parameter.detach())
        for name, buffer in _buffers(interpreter, stage):
            reader.into(f"{states}buffer/{name}", buffer)
        self._ages = self._ages_in(reader)
        for age in self._ages:
            for name, parameter in stage.parameters.items():
                reader.like(f"older/{age}/{name}", stage.parts.shared(name, parameter.detach()))

    def put_in_place(self) -> None:
        """Set the states of optimizer, schedule, versions and reference model."""
        stage, entries = self._stage, self._entries
        if stage.schedule is not None and "schedule" in entries:
            stage.schedule.load_state_dict(_attributes(stage.schedule, entries["schedule"]))
        for name, parameter in stage.parameters.items():
            prefix = f"{self._states}optimizer/{name}/"
            states = {
                key.removeprefix(prefix): stage.parts.local_part(name, value)
                for key, value in entries.items()
                if key.startswith(prefix)
            }
            assert stage.optimizer is not None
            _set_options(stage.optimizer, name, parameter, entries.get(f"{self._states}options/{name}"))
            if states:
                stage.optimizer.state[parameter] = _placed(stage.optimizer, parameter, states)
        if stage.averaging is not None:
            stage.averaging.restore(
                {p: stage.parts.local_part(name, entries[f"model/{name}"]) for name, p in stage.parameters.items()}
            )
        if stage.versions is not None:
            names = {id(parameter): name for name, parameter in stage.parameters.items()}
            order = [names[id(parameter)] for parameter in stage.versions.parameters]
            newest = [parameter.detach().clone() for parameter in stage.versions.parameters]
            parts = stage.parts
            older = [[parts.local_part(name, entries[f"older/{age}/{name}"]) for name in order] for age in self._ages]
            stage.versions.restore([newest, *older])

    def _ages_in(self, reader: _Reader) -> list[int]:
        """Return the ages of the older versions that this stage uses and the checkpoint has for all its parameters."""
        versions = self._stage.versions
        if versions is None:
            return []
        ages = []
        for age in range(1, versions.oldest + 1):
            if not all(reader.has(f"older/{age}/{name}") for name in self._stage.parameters):
                break
            ages.append(age)
        return ages


class _Reader:
    """A reader of a checkpoint's entries by name: first all are named, then they are read at once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.entries: Entries = {}
        self._reader = EntryReader(checkpoint)
        try:
            self._has = self._reader.read_metadata().state_dict_metadata
        except Exception as error:
            raise _unreadable(checkpoint, error) from error
        self._by_parameter: dict[str, list[str]] = {}
        for name in self._has:
            self._by_parameter.setdefault(name.rpartition("/")[0] + "/", []).append(name)

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has an entry of this name."""
        return name in self._has

    def into(self, name: str, tensor: Tensor) -> None:
        """Read entry ``name`` into a tensor. Raises ModelMismatch if it is missing, or of another shape or type."""
        where = f"checkpoint {str(self.checkpoint.directory)!r} is of another model"
        kind, what = name.split("/")[-2:]
        has = self._has.get(name)
        if not isinstance(has, TensorStorageMetadata):
            raise ModelMismatch(f"{where}: it has no {_KINDS[kind]} {what!r}", remedy=_ANOTHER)
        if has.size != tensor.shape or has.properties.dtype != tensor.dtype:
            raise ModelMismatch(
                f"{where}: {_KINDS[kind]} {what!r} is {tuple(has.size)} of {has.properties.dtype} in the checkpoint, "
                f"but {tuple(tensor.shape)} of {tensor.dtype} in this model",
                remedy=_ANOTHER,
            )
        self.entries[name] = tensor

    def like(self, name: str, tensor: Tensor) -> None:
        """Read entry ``name`` into a new tensor like this one."""
        self.into(name, torch.empty_like(tensor, requires_grad=False))

    def all_of(self, prefix: str, like: Tensor) -> None:
        """Read all entries under a prefix: entries of the shape of ``like`` in its layout, others whole."""
        for name in self._by_parameter.get(prefix, []):
            has = self._has[name]
            if not isinstance(has, TensorStorageMetadata):
                self.entries[name] = None
            elif has.size == like.shape and len(has.size):
                self.entries[name] = torch.empty_like(like, dtype=has.properties.dtype)
            else:
                device = like.device if len(has.size) else "cpu"
                self.entries[name] = torch.empty(has.size, dtype=has.properties.dtype, device=device)

    def if_there(self, name: str) -> None:
        """Read an entry other than a tensor, if the checkpoint has it."""
        if self.has(name):
            self.entries[name] = None

    def read(self) -> None:
        """Read all named entries. Raises InvalidDocument when the files are damaged."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                load(self.entries, storage_reader=self._reader, planner=EntryPlanner(), no_dist=True)
        except (CheckpointException, Exception) as error:
            raise _unreadable(self.checkpoint, error) from error


def _unreadable(checkpoint: Checkpoint, error: BaseException) -> InvalidDocument:
    """Create the error for a checkpoint whose files are damaged, with the first sentence of the cause."""
    cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
    sentence = str(cause).partition("\n")[0].partition(". ")[0]
    return InvalidDocument(
        f"checkpoint {str(checkpoint.directory)!r} cannot be read: {type(cause).__name__}: {sentence}",
        remedy="put its files back as they were written, or remove the directory, so that an older one is resumed",
    )


_KINDS = {"model": "parameter", "buffer": "buffer"}
_ANOTHER = "resume with the model that was trained, or give another directory"


def _pipeline_prefix(stage: HeldStage) -> str:
    """Return the prefix of entries that belong to a stage's pipeline alone."""
    return "" if stage.averaging is None else f"pipeline/{stage.entry.pipeline}/"


def _frozen(stage: HeldStage) -> Iterator[tuple[str, Parameter]]:
    return ((name, one) for name, one in stage.module.named_parameters() if not one.requires_grad)


def _buffers(interpreter: Interpreter, stage: HeldStage) -> Iterator[tuple[str, Tensor]]:
    for i, module in stage.module.modules.items():
        for name, buffer in module.named_buffers():
            yield f"{interpreter.chain.specs[i].name}.{name}", buffer


def _optimizer_state(stage: HeldStage, name: str, parameter: Parameter) -> Iterator[tuple[str, Any]]:
    assert stage.optimizer is not None
    for key, value in stage.optimizer.state.get(parameter, {}).items():
        if value is not None:
            yield f"optimizer/{name}/{key}", stage.parts.shared(name, value)
    yield f"options/{name}", _options(stage, parameter)


def _options(stage: HeldStage, parameter: Parameter) -> dict[str, Any]:
    """Return the name of a parameter's optimizer, and its group's options except options of the device."""
    assert stage.optimizer is not None
    group = _group_of(stage.optimizer, parameter)
    options = {key: value for key, value in group.items() if key not in ("params", *_BY_DEVICE)}
    return {"optimizer": type(stage.optimizer).__name__, "options": options}


def _group_of(optimizer: Optimizer, parameter: Parameter) -> dict[str, Any]:
    return next(group for group in optimizer.param_groups if any(one is parameter for one in group["params"]))


def _set_options(optimizer: Optimizer, name: str, parameter: Parameter, saved: dict[str, Any] | None) -> None:
    if saved is None:
        return
    optimizer_name = type(optimizer).__name__
    if not isinstance(saved, dict) or not isinstance(saved.get("options"), dict):
        raise InvalidDocument(f"the checkpoint has no optimizer options for parameter {name!r}")
    if saved.get("optimizer") != optimizer_name:
        raise ModelMismatch(
            f"parameter {name!r} has optimizer {saved.get('optimizer')} in the checkpoint, but {optimizer_name} in "
            "the job",
            remedy="resume with the optimizer that was used",
        )
    group = _group_of(optimizer, parameter)
    group.update({key: value for key, value in saved["options"].items() if key not in ("params", *_BY_DEVICE)})


def _attributes(schedule: Any, saved: Any) -> dict[str, Any]:
    """Return a schedule's saved state, its attributes. Raises InvalidDocument for the name of a method."""
    if not isinstance(saved, dict):
        raise InvalidDocument("the checkpoint's learning-rate schedule has no state")
    for name in saved:
        if callable(getattr(type(schedule), name, None)):
            raise InvalidDocument(
                f"the checkpoint's learning-rate schedule has {name!r}, which is not part of its state"
            )
    return saved


_BY_DEVICE = ("foreach", "fused", "capturable")
"""Options of torch's optimizers that choose how a device steps, not the resulting numbers."""


def _placed(optimizer: Optimizer, parameter: Parameter, states: dict[str, Any]) -> dict[str, Any]:
    """Move states to the optimizer's place for them: single numbers, such as counts of steps, mostly to the host."""
    group = _group_of(optimizer, parameter)
    place = parameter.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
    return {
        key: value.to(place) if isinstance(value, Tensor) and value.dim() == 0 else value
        for key, value in states.items()
    }
