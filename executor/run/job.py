"""The job protocol: the interface between a user's training project and the executor, and the lookup of jobs.

A job is one object, named ``module:attribute``. Its model is a list of layers over named tensors: a layer is called
``module(*[env[name] for name in reads])`` and returns one tensor, or as many as ``writes`` names. Names that no earlier
layer has written are model inputs: they come from the batch to the layers that read them, and cross no cut. Parameters
are named ``layer.parameter``; parameters with ``requires_grad=False`` stay unchanged.

A layer's ``parallel`` says how several GPUs share it, in the words of ``torch.distributed.tensor.parallel``: a style
for each module by its path within the layer, or a function that returns the styles. Tensors that a layer reads from the
batch are whole on every GPU; other tensors are as the layer that writes them leaves them. ``parallel="replicated"``
makes every GPU run the whole layer on whole tensors. It costs nothing until GPUs share layers.

The style of a module of experts is ``penstock.executor.divided.experts.ExpertParallel``. Its parameters are stacked, a
row for each expert. It is called with tokens in the order of experts, and with the number of tokens of each expert,
which ``penstock.executor.divided.routing.tokens_per_expert`` counts. At an expert degree above 1 a rank has the rows of
its experts, and receives their tokens from all ranks of the group. Otherwise the module is called unchanged.

Under context parallelism a rank has a part of each sequence: dimension 1 is cut in the inputs that the job names in
``sequences``, and in all targets. Layers get the numbers of their positions from
``penstock.executor.divided.context.positions``. They may mix positions only in ``scaled_dot_product_attention``,
without masks other than the causal one.

A layer's ``modules`` says which of its modules are the ``attention``, ``mlp`` or ``norm`` of plans that recompute these
alone: a path within the layer, or several, as in ``{"attention": "attention", "norm": ("norm_1", "norm_2")}``. ``{}``
means a layer without such modules, such as an embedding. Without ``modules`` a plan that recomputes modules is refused.

A job may also have:

* ``shared_parameters``: lists of full names that are one parameter; the first name represents it.
* ``sequences``: the names of the batch's inputs whose dimension 1 is the sequence; without it context parallelism is
  refused.
* ``lr_scheduler(optimizer)``: a scheduler of ``torch.optim.lr_scheduler``, stepped after each step of the optimizer.
* ``evaluation(number, rows)``: like ``batch``, for evaluation batch ``number`` of ``num_evaluation_batches``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.schemas.errors import InvalidDocument, UnknownName, meant
from penstock.schemas.transformers.degrees import Module

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

Builder = Callable[[], nn.Module]
Styles = Mapping[str, "ParallelStyle"]
"""A style for each module of a layer by its path, "" for the layer itself."""
Parallel = Callable[[], Styles] | Styles | Literal["replicated"]
_FAMILIES = {"hf": "penstock.executor.hugging_face.job"}
"""Families of jobs that files describe, by the prefix of references: the module whose ``job_of`` builds them."""
ANY_BATCH = 1 << 30
"""Samples of a global batch of a job whose data does not run out: a plan may use any number of them."""
_REQUIRED = ("name", "seed", "batch_size", "layers", "batch", "loss", "optimizer")


class LayerSpec(NamedTuple):
    """A layer: its full name, builder, tensors that it reads and writes, and the way in which GPUs share it.

    ``modules``: the paths in the layer of the modules that plans recompute separately, by the names of plans.
    """

    name: str
    build: Builder
    reads: tuple[str, ...] = ("x",)
    writes: tuple[str, ...] = ("x",)
    parallel: Parallel | None = None
    modules: Mapping[str, str | Sequence[str]] | None = None


@runtime_checkable
class Job(Protocol):
    """A training job. ``outputs`` names the tensors that ``loss`` gets; writing a name again makes a new tensor."""

    name: str
    seed: int
    batch_size: int
    outputs: tuple[str, ...]

    def layers(self) -> Sequence[LayerSpec | tuple[str, Builder]]:
        """Return the model's layers in order; a pair ``(name, builder)`` reads and writes ``x``."""
        ...

    def batch(self, step: int, rows: range) -> tuple[dict[str, Tensor], Any]:
        """Return rows of global batch ``step``: inputs by name (dimension 0 is the sample) and targets.

        The result depends only on ``step`` and ``rows``: any rank may request any rows, and gets the same numbers.
        """
        ...

    def loss(self, outputs: dict[str, Tensor], targets: Any) -> tuple[Tensor, int]:
        """Return the sum of the loss over these samples, and the number of terms summed."""
        ...

    def optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        """Create the optimizer for a stage's parameters."""
        ...


class SimpleJob:
    """A base class for jobs; subclasses define ``layers``, ``batch``, ``loss`` and ``optimizer``."""

    outputs: tuple[str, ...] = ("x",)
    shared_parameters: Sequence[Sequence[str]] = ()
    sequences: Sequence[str] = ()

    def __init__(self, name: str, *, batch_size: int, seed: int = 0) -> None:
        self.name = name
        self.batch_size = batch_size
        self.seed = seed


def load_job(reference: str, directory: str | Path | None = None) -> Job:
    """Load the job called ``module:attribute``, or ``hf:config.json`` for a Hugging Face model on random tokens.

    ``directory`` is appended to ``sys.path``, after installed packages. ``examples.…`` falls back to the examples that
    Penstock ships. Raises UnknownName for an unknown module or attribute, InvalidDocument for an object that is no job
    or a module that cannot be imported.
    """
    module_name, colon, attribute = reference.partition(":")
    if module_name in _FAMILIES and ".json" in attribute:
        family = importlib.import_module(_FAMILIES[module_name])
        return checked_job(family.job_of(attribute, Path(directory or ".")), reference)
    if not (module_name and colon and attribute):
        raise InvalidDocument(f"{reference!r} does not name a job; write module:attribute, such as examples.gpt:job")
    if directory is not None:
        place = str(Path(directory).resolve())
        if place not in sys.path:
            sys.path.append(place)
    module = _import(module_name, reference)
    candidate: Any = module
    for part in attribute.split("."):
        if not hasattr(candidate, part):
            hint = meant(part, _public(candidate))
            raise UnknownName(f"module {module_name!r} has no {attribute!r}" + (f"; {hint}" if hint else ""))
        candidate = getattr(candidate, part)
    return checked_job(candidate, reference)


def checked_job(candidate: Any, reference: str) -> Job:
    """Return ``candidate`` if it is a job. Raises InvalidDocument with the attributes that are missing."""
    missing = [name for name in _REQUIRED if not hasattr(candidate, name)]
    if isinstance(candidate, type) or missing:
        description = (
            "a class; give an instance of it"
            if isinstance(candidate, type)
            else f"not a job: it lacks {', '.join(missing)}"
        )
        raise InvalidDocument(
            f"{reference!r} is {description}", remedy="see the job protocol in penstock.executor.run.job"
        )
    if not isinstance(candidate.batch_size, int) or candidate.batch_size < 1:
        raise InvalidDocument(
            f"{reference!r} has batch_size {candidate.batch_size!r}; give the samples of a global batch"
        )
    job: Job = candidate
    return job


def layer_specs(job: Job) -> tuple[LayerSpec, ...]:
    """Return the job's layers as LayerSpec. InvalidDocument for an empty list, doubled names or malformed entries."""
    specs = tuple(_spec(job, i, entry) for i, entry in enumerate(job.layers()))
    if not specs:
        raise InvalidDocument(f"job {job.name!r} has no layers; layers() has to return at least one")
    seen: dict[str, int] = {}
    for i, spec in enumerate(specs):
        if spec.name in seen:
            raise InvalidDocument(
                f"job {job.name!r}: layers {seen[spec.name]} and {i} are both called {spec.name!r}; names are unique"
            )
        seen[spec.name] = i
    return specs


def module_paths(spec: LayerSpec) -> dict[str, tuple[str, ...]]:
    """Return the paths of each module that ``spec.modules`` names; empty without ``modules``."""
    return {name: (paths,) if isinstance(paths, str) else tuple(paths) for name, paths in (spec.modules or {}).items()}


def job_outputs(job: Job) -> tuple[str, ...]:
    """Return the names that the loss reads: ``job.outputs``, or ``("x",)``."""
    return tuple(getattr(job, "outputs", ("x",)))


def sequence_names(job: Job) -> tuple[str, ...]:
    """Return the job's ``sequences``, by default empty. Raises InvalidDocument when they are no names."""
    names: Any = getattr(job, "sequences", ())
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise InvalidDocument(
            f"job {job.name!r}: sequences is {names!r:.80}; give a tuple of names of the batch's inputs"
        )
    return tuple(names)


def shared_names(job: Job) -> tuple[tuple[str, ...], ...]:
    """Return the job's ``shared_parameters``. InvalidDocument when they are no lists of at least two names."""
    entries: Any = getattr(job, "shared_parameters", ())
    if callable(entries) or isinstance(entries, str) or not isinstance(entries, Iterable):
        raise InvalidDocument(
            f"job {job.name!r}: shared_parameters is {entries!r:.80}; give a list of lists of names, layer.parameter"
        )
    ties = []
    for names in entries:
        if isinstance(names, str) or not isinstance(names, Iterable) or len(tied := tuple(names)) < 2:
            raise InvalidDocument(
                f"job {job.name!r}: shared_parameters has the entry {names!r:.80}; "
                "give at least two names of one parameter"
            )
        if not all(isinstance(name, str) for name in tied):
            raise InvalidDocument(
                f"job {job.name!r}: shared_parameters has {tied!r:.80}, where names have to be strings"
            )
        ties.append(tied)
    return tuple(ties)


def _spec(job: Job, index: int, entry: Any) -> LayerSpec:
    where = f"job {job.name!r}, layer {index}"
    if not isinstance(entry, tuple) or not 2 <= len(entry) <= len(LayerSpec._fields):
        raise InvalidDocument(f"{where} is {entry!r}; give a LayerSpec or a pair (name, builder)")
    spec = LayerSpec(*entry)
    if not isinstance(spec.name, str) or not spec.name:
        raise InvalidDocument(f"{where} is called {spec.name!r}; a name is a non-empty string")
    if not callable(spec.build):
        raise InvalidDocument(f"{where} ({spec.name!r}): the builder {spec.build!r} cannot be called")
    if isinstance(spec.build, nn.Module):
        raise InvalidDocument(
            f"{where} ({spec.name!r}) is a built module; give a function that builds it: a rank builds only its own"
        )
    for what, names in (("reads", spec.reads), ("writes", spec.writes)):
        if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
            raise InvalidDocument(f"{where} ({spec.name!r}): {what} is {names!r}; give a tuple of tensor names")
        if len(set(names)) < len(names):
            raise InvalidDocument(f"{where} ({spec.name!r}): {what} {names!r} names a tensor twice")
    if not spec.writes:
        raise InvalidDocument(f"{where} ({spec.name!r}) writes nothing; name at least one tensor")
    if not (spec.parallel in (None, "replicated") or callable(spec.parallel) or isinstance(spec.parallel, Mapping)):
        raise InvalidDocument(
            f"{where} ({spec.name!r}): parallel is {spec.parallel!r:.80}; give styles by module, a function that makes "
            'them, or "replicated"'
        )
    if spec.modules is not None:
        _refuse_unknown_modules(where, spec)
    return spec._replace(reads=tuple(spec.reads), writes=tuple(spec.writes))


def _refuse_unknown_modules(where: str, spec: LayerSpec) -> None:
    """Raise InvalidDocument where ``modules`` is no mapping from plans' names of modules to paths."""
    modules: Any = spec.modules
    names = get_args(Module)
    wrong = not isinstance(modules, Mapping) or [name for name in modules if name not in names]
    if wrong:
        raise InvalidDocument(
            f"{where} ({spec.name!r}): modules is {modules!r:.80}; give paths within the layer by name, of "
            f"{', '.join(names)}"
        )


def _import(name: str, reference: str) -> Any:
    candidates = [name, f"penstock.{name}"] if name.split(".")[0] == "examples" else [name]
    for candidate in candidates:
        try:
            return importlib.import_module(candidate)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if candidate != missing and not candidate.startswith(missing + "."):
                raise InvalidDocument(f"importing {reference!r} failed: {error}") from error
        except Exception as error:
            raise InvalidDocument(f"importing {reference!r} failed: {type(error).__name__}: {error}") from error
    raise UnknownName(
        f"there is no module {name!r} for the job {reference!r}",
        remedy="--directory DIR names the directory that holds it; or install its package",
    )


def _public(container: Any) -> list[str]:
    return [name for name in dir(container) if not name.startswith("_")]


def alike(builder: Any) -> Hashable:
    """Return a key that is equal for builders that build the same: one function with equal arguments."""
    if isinstance(builder, partial):
        return (
            alike(builder.func),
            tuple(map(alike, builder.args)),
            tuple((name, alike(value)) for name, value in sorted(builder.keywords.items())),
        )
    try:
        hash(builder)
    except TypeError:
        return id(builder)
    return builder  # type: ignore[no-any-return]
