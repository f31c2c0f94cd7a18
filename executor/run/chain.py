"""A job's model as a topological chain: the tensors that cross each cut, the construction of layers, and shapes.

Cut ``i`` lies between layer ``i`` and layer ``i + 1``. A tensor crosses every cut between its writer and its last
reader; the loss reads after the last layer. Model inputs cross no cut (design, section 4).
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.executor.run.job import Job, LayerSpec, alike, job_outputs, layer_specs
from penstock.executor.stage.precision import FULL, Training
from penstock.executor.stage.ties import Tie, ties_of
from penstock.executor.torch_versions import refuse_unfit_torch
from penstock.schemas.errors import InvalidDocument, ModelMismatch


class TensorShape(NamedTuple):
    """A tensor that crosses a cut: the shape of one sample (without dimension 0), and whether it gets a gradient."""

    sample_shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool

    @property
    def bytes_per_sample(self) -> int:
        """The bytes of one sample."""
        count = 1
        for size in self.sample_shape:
            count *= size
        return count * self.dtype.itemsize


def derived_seed(*parts: object) -> int:
    """Return a seed below 2^63 that depends only on its parts, so it is the same on every rank."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def remedy_of(layer: str, error: Exception) -> str | None:
    """Return the remedy for an error of a layer that runs alone; None where the layer itself is wrong."""
    if "in-place operation" in str(error):
        return (
            f"layer {layer!r} changes its input in place, which the first layer of a stage cannot: make it "
            "inplace=False, or one layer with the layer before it"
        )
    if "more than 1 value per channel" in str(error):
        return "--micro-batch-size 2 or more: batch norm takes no single sample"
    return None


class Chain:
    """The layers of a job in order.

    ``specs``: the layers. ``inputs[i]``: names that layer i reads from the batch. ``cuts[i]``: names that cross cut i,
    ordered by the layer that wrote them. ``outputs``: names that the loss reads. ``ties``: parameters that several
    layers share. Raises UnsupportedRequest under a torch version that cannot run layers.
    """

    def __init__(self, job: Job) -> None:
        refuse_unfit_torch()
        self.job = job
        self.specs: tuple[LayerSpec, ...] = layer_specs(job)
        self.outputs = job_outputs(job)
        self.inputs: tuple[tuple[str, ...], ...] = self._read_from_batch()
        self._alive = self._alive_tensors()
        self.cuts: tuple[tuple[str, ...], ...] = tuple(tuple(name for _, name in cut) for cut in self._alive)
        self.ties: tuple[Tie, ...] = ties_of(job, self.names)

    @property
    def names(self) -> tuple[str, ...]:
        """The layers' names, as in the profile and the plan."""
        return tuple(spec.name for spec in self.specs)

    def loss(self, env: Mapping[str, Tensor], targets: Any) -> tuple[Tensor, int]:
        """Return the job's loss of its outputs: the sum, and the number of terms summed. Raises ModelMismatch."""
        loss: Any = self.job.loss({name: env[name] for name in self.outputs}, targets)
        if isinstance(loss, tuple) and len(loss) == 2 and isinstance(loss[0], Tensor):
            return loss
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ModelMismatch(
            f"loss() of job {self.job.name!r} has to return (sum over samples, number of terms), but returned {what}",
            remedy="return the sum (reduction='sum' in PyTorch) and the number of terms, such as targets.numel()",
        )

    def writers(self, cut: int) -> tuple[int, ...]:
        """Return the layer that wrote each tensor of ``cuts[cut]``: a name that is written again is another tensor."""
        return tuple(writer for writer, _ in self._alive[cut])

    def tensor_name(self, cut: int, tensor: int) -> str:
        """Return a tensor's name in a profile, which its writer and its name form, so that all cuts use one name."""
        return f"{self.specs[self.writers(cut)[tensor]].name}:{self.cuts[cut][tensor]}"

    def build_layer(self, index: int, seed: int | None = None, device: torch.device | str = "cpu") -> nn.Module:
        """Build layer ``index``; its parameters depend on (seed, layer name) alone. ``seed`` defaults to the job's.

        Layers are built on the CPU and moved, so that every device starts equal; on ``meta`` nothing is drawn.
        The global random state stays unchanged. Raises ModelMismatch when the builder fails.
        """
        spec, device = self.specs[index], torch.device(device)
        place = torch.device("meta" if device.type == "meta" else "cpu")
        try:
            with torch.random.fork_rng(devices=[]), place:
                torch.manual_seed(derived_seed(self.job.seed if seed is None else seed, spec.name))
                module = spec.build()
        except Exception as error:
            raise ModelMismatch(f"layer {spec.name!r} cannot be built: {type(error).__name__}: {error}") from error
        if not isinstance(module, nn.Module):
            raise InvalidDocument(
                f"the builder of layer {spec.name!r} returned {type(module).__name__}, not an nn.Module"
            )
        return module if device.type == place.type else module.to(device)

    def build_layers(
        self,
        indices: Sequence[int],
        seed: int | None = None,
        device: torch.device | str = "cpu",
        existing: Mapping[int, nn.Module] | None = None,
    ) -> dict[int, nn.Module]:
        """Build layers by number, except layers in ``existing``. A tied parameter is one object in all of them.

        A tied parameter has the value that the first of its layers draws, even where that layer is not among them.
        """
        there = dict(existing or {})
        modules = {i: there[i] if i in there else self.build_layer(i, seed, device) for i in indices}
        for tie in self.ties:
            tie.join(there | modules, lambda i: self.build_layer(i, seed, device))
        return modules

    def named_parameters(self, modules: Mapping[int, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters of some layers as ``layer.parameter``, each once; a tied one by its first name."""
        first_names = {name: tie.name for tie in self.ties for name in tie.names}
        seen: set[int] = set()
        for i, module in modules.items():
            for own_name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    name = f"{self.specs[i].name}.{own_name}"
                    yield first_names.get(name, name), parameter

    def shared_parameters(
        self, modules: Mapping[int, nn.Module] | None = None
    ) -> list[tuple[str, tuple[int, ...], int]]:
        """Return name, layers and bytes of each tied parameter, as a profile lists them (``shared_parameters``).

        Bytes are read from ``modules``, by layer; by default the layers are built on the meta device.
        """
        if modules is None:
            modules = self.build_layers(sorted({i for tie in self.ties for i in tie.layers}), device="meta")
        ties = []
        for tie in self.ties:
            parameter = tie.parameter(modules)
            assert parameter is not None
            ties.append((tie.name, tie.layers, parameter.numel() * parameter.element_size()))
        return ties

    def call(self, index: int, module: nn.Module, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run layer ``index``, and return its results in the order of ``writes``. ModelMismatch for another number."""
        result: Any = module(*arguments)
        results = result if isinstance(result, tuple | list) else (result,)
        spec = self.specs[index]
        if len(results) != len(spec.writes) or not all(isinstance(one, Tensor) for one in results):
            shown = ", ".join(type(one).__name__ for one in results)
            raise ModelMismatch(f"layer {spec.name!r} writes {spec.writes!r} but returned ({shown})")
        return tuple(results)

    def batch_inputs(self, rows: range, device: str = "meta") -> dict[str, Tensor]:
        """Return the batch's inputs, by default on the meta device. ModelMismatch for a missing one or other rows."""
        inputs, _ = self.job.batch(0, rows)
        for i, names in enumerate(self.inputs):
            for name in names:
                if name not in inputs:
                    raise ModelMismatch(
                        f"layer {self.specs[i].name!r} reads {name!r}, which no earlier layer writes and the batch "
                        f"lacks; the batch has {sorted(inputs)}"
                    )
                _check_rows(inputs[name], len(rows), f"the batch's {name!r}")
        return {name: tensor.to(device) for name, tensor in inputs.items()}

    def infer_shapes(
        self, rows: range, training: Training = FULL, device: torch.device | str = "cpu"
    ) -> tuple[dict[str, TensorShape], ...]:
        """Infer ``{name: shape}`` for each cut, in the order of ``cuts``. In lower precision, types are for ``device``.

        The layers run on the meta device, the first of several alike layers for all of them. In lower precision they
        run on torch's fake tensors, because the meta device has no autocast. A model that reads numbers, which such
        tensors lack, runs on the CPU. Raises ModelMismatch with the layer that does not run.
        """
        if training.lowered:
            return self._lowered_shapes(rows, training, torch.device(device))
        try:
            return self._shapes_on("meta", rows, self.batch_inputs(rows), nullcontext())
        except ModelMismatch as error:
            if "meta" not in str(error):
                raise
        return self._shapes_on("cpu", rows, self.batch_inputs(rows, "cpu"), nullcontext())

    def _lowered_shapes(
        self, rows: range, training: Training, device: torch.device
    ) -> tuple[dict[str, TensorShape], ...]:
        inputs = self.batch_inputs(rows, "cpu")
        autocast = training.autocast(device)
        assert autocast is not None
        try:
            with FakeTensorMode() as mode:
                fakes = {name: mode.from_tensor(tensor).to(device) for name, tensor in inputs.items()}
                return self._shapes_on(device, rows, fakes, autocast)
        except ModelMismatch:
            env = {name: tensor.to(device) for name, tensor in inputs.items()}
            return self._shapes_on(device, rows, env, autocast)

    def _shapes_on(
        self, device: torch.device | str, rows: range, env: dict[str, Tensor], context: AbstractContextManager[Any]
    ) -> tuple[dict[str, TensorShape], ...]:
        shapes = []
        results_of: dict[Hashable, tuple[Tensor, ...]] = {}
        for i, spec in enumerate(self.specs):
            inputs = [env[name] for name in spec.reads]
            read = ((tuple(one.shape), one.dtype, one.requires_grad) for one in inputs)
            key = (alike(spec.build), len(spec.writes), *read)
            try:
                with context:
                    results = results_of.get(key) or self.call(i, self.build_layer(i, device=device), inputs)
            except ModelMismatch:
                raise
            except Exception as error:
                given_shapes = ", ".join(f"{name} {tuple(env[name].shape)}" for name in spec.reads)
                why = f"{type(error).__name__}: {error}"
                raise ModelMismatch(
                    f"layer {spec.name!r} does not run on {given_shapes}: {why}", remedy=remedy_of(spec.name, error)
                ) from error
            if all(one.is_meta for one in (*inputs, *results)):
                results_of[key] = results
            for name, tensor in zip(spec.writes, results, strict=True):
                env[name] = tensor.detach().requires_grad_(tensor.requires_grad)
            if i < len(self.cuts):
                for name in self.cuts[i]:
                    _check_rows(env[name], len(rows), f"tensor {name!r} after layer {spec.name!r}")
                shapes.append({name: tensor_shape(env[name]) for name in self.cuts[i]})
        return tuple(shapes)

    def _read_from_batch(self) -> tuple[tuple[str, ...], ...]:
        written: set[str] = set()
        inputs = []
        for spec in self.specs:
            inputs.append(tuple(name for name in spec.reads if name not in written))
            written.update(spec.writes)
        missing = [name for name in self.outputs if name not in written]
        if missing:
            raise InvalidDocument(
                f"job {self.job.name!r} has the outputs {missing}, which no layer writes; written are {sorted(written)}"
            )
        return tuple(inputs)

    def _alive_tensors(self) -> tuple[tuple[tuple[int, str], ...], ...]:
        last_read: dict[tuple[int, str], int] = {}
        writer: dict[str, int] = {}
        for i, spec in enumerate(self.specs):
            for name in spec.reads:
                if name in writer:
                    last_read[writer[name], name] = i
            writer.update(dict.fromkeys(spec.writes, i))
        for name in self.outputs:
            last_read[writer[name], name] = len(self.specs)
        order = {(i, name): k for i, spec in enumerate(self.specs) for k, name in enumerate(spec.writes)}
        cuts: list[list[tuple[int, str]]] = [[] for _ in self.specs[1:]]
        for written in sorted(last_read, key=lambda tensor: (tensor[0], order[tensor])):
            for cut in range(written[0], min(last_read[written], len(cuts))):
                cuts[cut].append(written)
        return tuple(map(tuple, cuts))


def _check_rows(tensor: Tensor, rows: int, what: str) -> None:
    if tensor.dim() == 0 or tensor.shape[0] != rows:
        raise ModelMismatch(
            f"{what} has the shape {tuple(tensor.shape)} for {rows} samples; dimension 0 has to be the sample, "
            "because replicas split each micro-batch along it"
        )


def tensor_shape(tensor: Tensor) -> TensorShape:
    """Return the shape of one sample of ``tensor``, its type, and whether it needs a gradient."""
    return TensorShape(tuple(tensor.shape[1:]), tensor.dtype, tensor.requires_grad)
