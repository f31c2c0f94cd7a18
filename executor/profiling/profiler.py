"""A profile measured on this machine, with all of its devices busy at once.

``concurrency`` processes run at the same time, each on a contiguous share of the layers, like the ranks of a pipeline:
with the same working set and the same contention. All micro-batch sizes are measured in turn, round after round
(`rounds`), because plans are chosen by the relation between sizes, which a drifting host would change. On a CPU a
layer's time is its processor time, times one factor for all layers, processes and sizes. With that factor the layers of
a pass take its wall-clock time, and preemption is spread evenly instead of hitting some layers.
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

    ``concurrency``: devices of the host that are busy at the same time in training. Each gets one process, and an
    accelerator if there are any (``cuda:0``, ``cuda:1``, …). ``seconds``: limit of the measurement per size, after
    warm-up. ``device_kind``: the profile's kind of device, otherwise the device's kind as topologies name it.
    ``precision``: as in `Training`.

    Raises InvalidDocument for a job that cannot be sent to a process and for impossible sizes, ModelMismatch for a
    model that does not run, and RunFailed when a process dies.
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
    processes = [one | other for one, other in zip(sized, parts, strict=True)]
    profile = _assemble(chain, sizes, shares, _Results(rounds, processes), setting)
    return profile.model_copy(update={"codec_speeds": _codec_speeds(profile, sizes[-1], setting)})


def _codec_speeds(profile: ModelProfile, size: int, setting: _Setting) -> tuple[CodecSpeed, ...] | None:
    """Measure how fast one thread converts the tensors of the widest cut at ``size`` samples, as on a rank."""
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
    """The device and the options of a measurement."""

    device: str
    kind: str
    concurrency: int
    training: Training


class _Results(NamedTuple):
    """The results of a measurement: times over rounds, and what each process measured of its layers."""

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
    """Send an order to all ranks at the same time, and return their answers."""
    for rank in ranks:
        rank.send(order)
    return [rank.receive() for rank in ranks]


def _measure_rounds(ranks: list[_Rank], sizes: Sequence[int], seconds: float, progress: Progress | None) -> Rounds:
    """Measure blocks of all sizes, there and back, until their mean is precise or time is up; at least twice."""
    start = time.perf_counter()
    listed = ", ".join(map(str, sizes))
    if progress is not None:
        limit = f"{seconds * len(sizes):g} s at most"
        progress(f"measuring at {listed} samples per micro-batch, {len(ranks)} at once, {limit}")
    rounds = Rounds()
    while not rounds.precise and (rounds.count < 2 or time.perf_counter() - start < seconds * len(sizes)):
        turn = list(range(len(sizes)))[:: -1 if rounds.count % 2 else 1]
        blocks = {k: [Block(**answer) for answer in _all(ranks, {"block": k})] for k in turn}
        rounds.add([blocks[k] for k in range(len(sizes))])
    if progress is not None:
        passes = min(rounds.passes(k) for k in range(len(sizes)))
        took = f"{time.perf_counter() - start:.1f} s"
        progress(f"measured at {listed} samples: {passes} passes or more count, ± {rounds.error:.1%}, {took}")
    return rounds


def _shares(layers: int, concurrency: int) -> list[tuple[int, int]]:
    """Divide layers into contiguous, about equal shares; with more devices than layers some layers run twice."""
    if concurrency > layers:
        return [(i % layers, i % layers) for i in range(concurrency)]
    edges = [layers * i // concurrency for i in range(concurrency + 1)]
    return [(a, b - 1) for a, b in pairwise(edges)]


def _assemble(
    chain: Chain,
    sizes: tuple[int, ...],
    shares: list[tuple[int, int]],
    results: _Results,
    setting: _Setting,
) -> ModelProfile:
    modules = chain.build_layers(range(len(chain.specs)), device="meta")
    error = results.rounds.error
    slowdown = results.rounds.slowdown if setting.device.startswith("cpu") else 1.0
    return assemble(
        chain,
        list(modules.values()),
        chain.infer_shapes(range(sizes[-1]), setting.training, setting.device),
        _update_times(shares, results, slowdown),
        [
            Measurement(
                device_kind=setting.kind,
                micro_batch_size=size,
                concurrency=setting.concurrency,
                layers=_layer_measurements(shares, results, number, slowdown),
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
        copied_bytes=_of_layers(shares, [each["copied_bytes"] for each in results.processes]),
        update_workspace=joined(shares, [UpdateWorkspace(**each["update_workspace"]) for each in results.processes]),
    )


def _of_layers(shares: list[tuple[int, int]], parts: Sequence[Sequence[int]]) -> list[int]:
    """Merge the processes' results for their layers into a list by layer."""
    sizes = {first + k: size for (first, _), part in zip(shares, parts, strict=True) for k, size in enumerate(part)}
    return [sizes[layer] for layer in sorted(sizes)]


def expected_error(error: float) -> float:
    """Return the stated error of predictions from measurements whose mean has the standard error ``error``."""
    return round(min(1.0, MEASURED_EXPECTED_ERROR + max(0.0, error - PRECISION)), 3)


def _layer_measurements(
    shares: list[tuple[int, int]], results: _Results, size: int, slowdown: float
) -> tuple[LayerMeasurement, ...]:
    """Return the measurements of all layers at size number ``size``."""
    layers: dict[int, LayerMeasurement] = {}
    for number, ((first, last), process) in enumerate(zip(shares, results.processes, strict=True)):
        forward_ns, backward_ns = results.rounds.forward_ns(size, number), results.rounds.backward_ns(size, number)
        for k, layer in enumerate(range(first, last + 1)):
            back_ns = max(1, round(backward_ns[k] * slowdown)) if backward_ns[k] else 0
            layers[layer] = LayerMeasurement(
                forward_ns=max(1, round(forward_ns[k] * slowdown)),
                backward_ns=back_ns,
                backward_weight_ns=round(back_ns * process["weight_shares"][size][k]),
                stash_bytes=process["stash_bytes"][size][k],
                workspace_bytes=process["workspace_bytes"][size][k],
            )
    return tuple(layers[layer] for layer in sorted(layers))


def _update_times(shares: list[tuple[int, int]], results: _Results, slowdown: float) -> list[int]:
    times: dict[int, int] = {}
    for (first, last), process in zip(shares, results.processes, strict=True):
        times |= {layer: round(process["update_ns"][k] * slowdown) for k, layer in enumerate(range(first, last + 1))}
    return [times[layer] for layer in sorted(times)]


def _pickled(job: Job) -> str:
    try:
        return base64.b64encode(pickle.dumps(job)).decode()
    except Exception as error:
        raise InvalidDocument(
            f"job {job.name!r} cannot be sent to the measuring processes: {type(error).__name__}: {error}",
            remedy="give its name, module:attribute, instead of the object",
        ) from error
