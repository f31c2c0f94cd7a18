"""A profile measured on this machine, with all of its devices busy at once.

``concurrency`` processes run at the same time, each on a contiguous share of the layers, as the ranks of a pipeline
do: the same working set, the same contention. All micro-batch sizes are measured in turn, round after round (`rounds`):
what plans are chosen by is the relation between them, which a host that drifts would change. On a CPU a layer's time is
its processor time, times one factor for all layers, processes and sizes, with which the layers of a pass take its
wall-clock time: preemption is shared out evenly instead of hitting some layers.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from penstock.executor.profiling.assembly import assemble, checked_sizes
from penstock.executor.profiling.layer_costs import UpdateWorkspace, joined
from penstock.executor.profiling.rounds import PRECISION, Block, Rounds
from penstock.executor.run.chain import Chain
from penstock.executor.run.job import Job, load_job
from penstock.executor.runtime.opening import open_device
from penstock.executor.stage.precision import Training
from penstock.executor.transport.codec import conversion_bytes_per_s
from penstock.schemas import errors
from penstock.schemas.errors import InvalidDocument, PenstockError, RunFailed
from penstock.schemas.profile import CodecSpeed, LayerMeasurement, Measurement, ModelProfile, ProfileSource

MEASURED_EXPECTED_ERROR = 0.15

Progress = Callable[[str], None]


def measure_profile(
    job: Job | str,
    device: str = "cpu",
    micro_batch_sizes: Sequence[int] = (1,),
    concurrency: int = 1,
    *,
    directory: str | Path | None = None,
    device_kind: str | None = None,
    seconds: float = 10.0,
    precision: str = "fp32",
    progress: Progress | None = None,
) -> ModelProfile:
    """Measure ``job`` (or the job called ``module:attribute``) at each micro-batch size (samples).

    ``concurrency``: devices of the host that are busy at the same time in training; each gets one process, and an
    accelerator each (``cuda:0``, ``cuda:1``, …). ``seconds`` per size bound the measuring once all are warm. The
    profile's kind of device is ``device_kind``, or the device's own, as topologies name it. ``precision``: as in
    `Training`. Raises InvalidDocument for a job that cannot be sent to a process or sizes that make no sense,
    ModelMismatch for a model that does not run, RunFailed when a process dies.
    """
    sizes = checked_sizes(micro_batch_sizes)
    training = Training(precision)  # type: ignore[arg-type]
    loaded = load_job(job, directory) if isinstance(job, str) else job
    chain = Chain(loaded)
    layers = len(chain.specs)
    if concurrency < 1:
        raise InvalidDocument(f"the concurrency {concurrency} has to be at least 1 device")
    shares = _shares(layers, concurrency)
    ranks: list[_Rank] = []
    try:
        for number, (first, last) in enumerate(shares):
            order = {
                "reference": job if isinstance(job, str) else "",
                "directory": None if directory is None else str(directory),
                "pickled": "" if isinstance(job, str) else _pickled(job),
                "device": f"cuda:{number}" if device == "cuda" else device,
                "first": first,
                "last": last,
                "sizes": sizes,
                "precision": training.precision,
            }
            ranks.append(_Rank(number, order))
        sized = [rank.receive() for rank in ranks]
        rounds = _measure_rounds(ranks, sizes, seconds, progress)
        parts = _all(ranks, {"parts": True})
    finally:
        for rank in ranks:
            rank.end()
    setting = _Setting(device, device_kind or open_device(device).kind, concurrency, training)
    found = [one | other for one, other in zip(sized, parts, strict=True)]
    profile = _assemble(chain, sizes, shares, _Found(rounds, found), setting)
    return profile.model_copy(update={"codec_speeds": _codec_speeds(profile, sizes[-1], setting)})


def _codec_speeds(profile: ModelProfile, size: int, setting: _Setting) -> tuple[CodecSpeed, ...] | None:
    """How fast the device converts what crosses the widest cut of ``size`` samples, on one thread as a rank does."""
    widest = max((sum(tensor.bytes_per_sample for tensor in cut) for cut in profile.boundaries), default=0)
    if widest == 0 or profile.parameter_dtype != "fp32":
        return None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rates = conversion_bytes_per_s(open_device(setting.device), widest * size)
    finally:
        torch.set_num_threads(threads)
    encode, decode = (max(1, round(rate)) for rate in rates)
    return (CodecSpeed(device_kind=setting.kind, encode_bytes_per_s=encode, decode_bytes_per_s=decode),)


class _Setting(NamedTuple):
    """On what, and how, was measured."""

    device: str
    kind: str
    concurrency: int
    training: Training


class _Found(NamedTuple):
    """What was measured: times over rounds, and what each process said of its layers."""

    rounds: Rounds
    processes: list[dict[str, Any]]


class _Rank:
    """A measuring process and its pipes."""

    def __init__(self, number: int, order: dict[str, Any]) -> None:
        self.number = number
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock.executor.profiling.profile_rank"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | threads,
        )
        self.send(order)

    def send(self, message: dict[str, Any]) -> None:
        pipe: IO[bytes] | None = self._process.stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps(message).encode() + b"\n")
            pipe.flush()
        except BrokenPipeError:
            self._fail()

    def receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._fail()
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            kind: type[PenstockError] = getattr(errors, message["error"])
            raise kind(message["detail"], remedy=message["remedy"])
        return message

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self._errors.close()

    def _fail(self) -> None:
        code = self._process.wait()
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-5:]
        raise RunFailed(f"profiling process {self.number} ended with exit code {code}: " + " | ".join(last))


def _all(ranks: list[_Rank], order: dict[str, Any]) -> list[dict[str, Any]]:
    """What all ranks answer to an order that they get at the same time."""
    for rank in ranks:
        rank.send(order)
    return [rank.receive() for rank in ranks]


def _measure_rounds(ranks: list[_Rank], sizes: Sequence[int], seconds: float, progress: Progress | None) -> Rounds:
    """Blocks of all sizes, there and back again, until their mean is precise or time is up; two rounds at least."""
    start = time.perf_counter()
    listed = ", ".join(map(str, sizes))
    if progress is not None:
        limit = f"{seconds * len(sizes):g} s at most"
        progress(f"measuring at {listed} samples per micro-batch, {len(ranks)} at once, {limit}")
    rounds = Rounds()
    while not rounds.precise and (rounds.count < 2 or time.perf_counter() - start < seconds * len(sizes)):
        turn = list(range(len(sizes)))[:: -1 if rounds.count % 2 else 1]
        blocks = {k: [Block(**found) for found in _all(ranks, {"block": k})] for k in turn}
        rounds.add([blocks[k] for k in range(len(sizes))])
    if progress is not None:
        passes = min(rounds.passes(k) for k in range(len(sizes)))
        took = f"{time.perf_counter() - start:.1f} s"
        progress(f"measured at {listed} samples: {passes} passes or more count, ± {rounds.error:.1%}, {took}")
    return rounds


def _shares(layers: int, concurrency: int) -> list[tuple[int, int]]:
    """Contiguous shares of about equal length; with more devices than layers some layers are run twice."""
    if concurrency > layers:
        return [(i % layers, i % layers) for i in range(concurrency)]
    edges = [layers * i // concurrency for i in range(concurrency + 1)]
    return [(a, b - 1) for a, b in pairwise(edges)]


def _assemble(
    chain: Chain,
    sizes: tuple[int, ...],
    shares: list[tuple[int, int]],
    found: _Found,
    setting: _Setting,
) -> ModelProfile:
    modules = chain.build_layers(range(len(chain.specs)), device="meta")
    error = found.rounds.error
    slowdown = found.rounds.slowdown if setting.device.startswith("cpu") else 1.0
    return assemble(
        chain,
        list(modules.values()),
        chain.infer_shapes(range(sizes[-1]), setting.training, setting.device),
        _update_times(shares, found, slowdown),
        [
            Measurement(
                device_kind=setting.kind,
                micro_batch_size=size,
                concurrency=setting.concurrency,
                layers=_layer_measurements(shares, found, number, slowdown),
            )
            for number, size in enumerate(sizes)
        ],
        source=ProfileSource(
            method="measured",
            description=(
                f"{setting.kind}, {setting.concurrency} at once, torch {torch.__version__}, one thread each, "
                f"{setting.training.precision}, mean over rounds ± {error:.1%}"
            ),
            expected_error=expected_error(error),
        ),
        assumptions=("the loss belongs to the last layer",),
        copied_bytes=_of_layers(shares, [own["copied_bytes"] for own in found.processes]),
        update_workspace=joined(shares, [UpdateWorkspace(**own["update_workspace"]) for own in found.processes]),
    )


def _of_layers(shares: list[tuple[int, int]], found: Sequence[Sequence[int]]) -> list[int]:
    """What the processes found of their layers, layer by layer."""
    sizes = {first + k: size for (first, _), own in zip(shares, found, strict=True) for k, size in enumerate(own)}
    return [sizes[layer] for layer in sorted(sizes)]


def expected_error(error: float) -> float:
    """What is stated of predictions from measurements whose mean has the standard error ``error``."""
    return round(min(1.0, MEASURED_EXPECTED_ERROR + max(0.0, error - PRECISION)), 3)


def _layer_measurements(
    shares: list[tuple[int, int]], found: _Found, size: int, slowdown: float
) -> tuple[LayerMeasurement, ...]:
    """All layers at size number ``size``."""
    layers: dict[int, LayerMeasurement] = {}
    for number, ((first, last), own) in enumerate(zip(shares, found.processes, strict=True)):
        forward_ns, backward_ns = found.rounds.forward_ns(size, number), found.rounds.backward_ns(size, number)
        for k, layer in enumerate(range(first, last + 1)):
            back_ns = max(1, round(backward_ns[k] * slowdown)) if backward_ns[k] else 0
            layers[layer] = LayerMeasurement(
                forward_ns=max(1, round(forward_ns[k] * slowdown)),
                backward_ns=back_ns,
                backward_weight_ns=round(back_ns * own["weight_shares"][size][k]),
                stash_bytes=own["stash_bytes"][size][k],
                workspace_bytes=own["workspace_bytes"][size][k],
            )
    return tuple(layers[layer] for layer in sorted(layers))


def _update_times(shares: list[tuple[int, int]], found: _Found, slowdown: float) -> list[int]:
    times: dict[int, int] = {}
    for (first, last), own in zip(shares, found.processes, strict=True):
        times |= {layer: round(own["update_ns"][k] * slowdown) for k, layer in enumerate(range(first, last + 1))}
    return [times[layer] for layer in sorted(times)]


def _pickled(job: Job) -> str:
    try:
        return base64.b64encode(pickle.dumps(job)).decode()
    except Exception as error:
        raise InvalidDocument(
            f"job {job.name!r} cannot be sent to the measuring processes: {type(error).__name__}: {error}",
            remedy="give its name, module:attribute, instead of the object",
        ) from error
