"""Checks of ``scripts/gpu-check``: each function asserts something, and returns what it measured."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from gpu_machine import EXPERTS, HERE, MICRO_BATCH_SIZE, RECURRENT, SMALL, STEPS, Machine, Refusal, Skipped

if TYPE_CHECKING:
    from gpu_plans import Layout

    from penstock.executor.run.local import RunReport
    from penstock.schemas.plan import PlanFile
    from penstock.schemas.request import UpdateRule

RULES: tuple[UpdateRule, ...] = ("weight_stashing", "double_buffered", "double_grouped", "elastic_averaging")
LOSS_TOLERANCE = {"tf32": 0.02, "bf16": 0.05, "fp16": 0.05}
"""Largest relative difference of losses in these precisions from losses in fp32."""
UNCALIBRATED, CALIBRATED, MEMORY = 0.15, 0.05, 0.05
"""Largest relative errors of predicted times, of times once calibrated, and of predicted memory."""
TIMED_PRECISIONS = ("fp32", "bf16")
MESSAGE_BYTES, CODEC_BYTES = 1 << 16, 1 << 24


class Check(NamedTuple):
    """A line of the table. ``alone``: nothing else runs at the same time, since it measures time or memory."""

    name: str
    run: Callable[[Machine], str]
    alone: bool = False


def checks() -> Iterator[Check]:
    """Yield all checks in the order of the table."""
    from gpu_plans import Layout

    from penstock.solvers.model.degrees import Degrees

    two, four = ((0,), (1,)), ((0,), (1,), (2,), (3,))
    layouts = {
        "gpipe, 2 ranks": Layout(two, "gpipe"),
        "1f1b, 4 ranks": Layout(four, "1f1b"),
        "interleaved, 2 ranks": Layout((*two, *two), "interleaved"),
        "zero bubble, 2 ranks": Layout(two, "zero bubble"),
        "2 stages of 2 replicas": Layout(((0, 1), (2, 3)), "1f1b"),
        "2 replicas, states shared out": Layout(((0, 1),), sharding="optimizer"),
        "2 replicas, gradients shared out": Layout(((0, 1),), sharding="gradients"),
        "2 replicas, parameters shared out": Layout(((0, 1),), sharding="parameters"),
        "2 stages of 2, parameters kept": Layout(((0, 1), (2, 3)), sharding="parameters_kept"),
        "tensor 2": Layout(((0,),), degrees=Degrees(tensor=2)),
        "tensor 2, 2 stages": Layout(two, degrees=Degrees(tensor=2)),
        "context 2": Layout(((0,),), degrees=Degrees(context=2)),
        "experts, 2 ranks": Layout(((0,),), degrees=Degrees(expert=2)),
        "tensor 2, parameters shared out": Layout(((0, 1),), sharding="parameters", degrees=Degrees(tensor=2)),
    }
    yield Check("devices and versions", versions)
    for transport in ("gloo-staged", "nccl"):
        for name, layout in layouts.items():
            run = partial(gradients, transport=transport, layout=layout)
            yield Check(f"{transport}: {name}", run, alone=transport == "nccl")  # ranks turn in loops on one GPU
    for rule in RULES:
        yield Check(f"update rule {rule}", partial(update_rule, rule=rule))
    yield Check("weights of LSTMs, stashed", recurrent)
    for precision in LOSS_TOLERANCE:
        yield Check(f"precision {precision}", partial(lowered, precision=precision))
    yield Check("clipping, over NCCL", clipping, alone=True)
    yield Check("checkpoint, to another plan", checkpoint)
    yield Check("a GPU that is not there", missing)
    yield Check("NCCL on a shared GPU", shared)
    yield Check("profile of a layer chain", profile, alone=True)
    yield Check("profile, analytic against measured", analytic, alone=True)
    for precision in TIMED_PRECISIONS:
        yield Check(f"peak memory, {precision}", partial(memory, precision=precision), alone=True)
        yield Check(f"time against prediction, {precision}", partial(prediction, precision=precision), alone=True)
    yield Check("time, once calibrated", calibrated, alone=True)
    yield Check("interpreter against torch's runtime", interpreter, alone=True)
    yield Check("codec fp16s", codec, alone=True)
    yield Check("issuing a message", messages, alone=True)
    yield Check("a GPU that is full", full, alone=True)


def versions(machine: Machine) -> str:
    """Report torch, CUDA, NCCL and the GPUs."""
    import torch

    from penstock.executor.runtime.cuda import nccl_version

    if machine.device == "cpu":
        return f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    runtime, gib = machine.runtime, 2**30
    free, total = runtime.memory.free_bytes(), runtime.memory.total_bytes()
    assert 0 < free <= total
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl_version()}"
    return f"{versions}, {machine.num_gpus} x {runtime.kind}, {free / gib:.1f} of {total / gib:.1f} GiB free"


def profile(machine: Machine) -> str:
    """Measure a profile, and report the sum over its layers; its device kind is the topologies' kind."""
    measured = machine.profile()
    assert measured.device_kinds == (machine.runtime.kind,), f"the profile is of {measured.device_kinds}"
    layers = measured.measurements[0].layers
    assert all(one.forward_ns > 0 and one.stash_bytes > 0 for one in layers), "a layer takes nothing"
    forward, backward = sum(one.forward_ns for one in layers), sum(one.backward_ns for one in layers)
    error = measured.source.expected_error
    return f"forward {forward / 1e6:.2f} ms, backward {backward / 1e6:.2f} ms for {MICRO_BATCH_SIZE}, ± {error:.0%}"


def analytic(machine: Machine) -> str:
    """Compare the model's computed profile with the measured one, within the error that the computed one states."""
    from gpu_jobs import timed

    from penstock.executor.profiling.analytic import analytic_profile
    from penstock.facts.device_table import DEVICES, MEASURED

    kind = machine.runtime.kind
    if kind not in DEVICES:
        raise Skipped(f"no table of {kind}")
    level = "kernels" if kind in MEASURED else "runs"
    computed = analytic_profile(timed, kind, [MICRO_BATCH_SIZE], level=level)  # type: ignore[arg-type]
    totals = [
        [sum(getattr(layer, name) for layer in one.measurements[0].layers) for name in ("forward_ns", "backward_ns")]
        for one in (computed, machine.profile())
    ]
    errors = [predicted / measured - 1 for predicted, measured in zip(*totals, strict=True)]
    stash = [sum(layer.stash_bytes for layer in one.measurements[0].layers) for one in (computed, machine.profile())]
    kept = stash[0] / stash[1] - 1
    stated = computed.source.expected_error
    assert max(map(abs, errors)) <= stated, (
        f"forward {errors[0]:+.0%}, backward {errors[1]:+.0%}; stated ± {stated:.0%}"
    )
    assert abs(kept) <= MEMORY, f"kept bytes {kept:+.1%}"
    return f"forward {errors[0]:+.0%}, backward {errors[1]:+.0%} (stated ± {stated:.0%}), kept bytes {kept:+.1%}"


def gradients(machine: Machine, transport: str, layout: Layout) -> str:
    """Compare a run with the unsplit model."""
    from gpu_jobs import experts, small
    from gpu_plans import flushed

    if transport == "nccl" and machine.device == "cpu":
        raise Skipped("needs a GPU")
    job, reference = (experts, EXPERTS) if layout.degrees.expert > 1 else (small, SMALL)
    work = flushed(job, layout, "nccl" if transport == "nccl" else "gloo")
    report = machine.train(work, transport, job=reference, check=True)
    return compared(report)


def compared(report: RunReport) -> str:
    """Return how far a run is from the unsplit model. Raises AssertionError when it is too far."""
    assert report.gradient_check is not None, "the run was not compared with the unsplit model"
    assert report.check_failure is None, str(report.check_failure)
    tolerance = f"{report.gradient_check:.2g} apart of {report.gradient_tolerance:.0e}"
    return f"{tolerance}, {statistics.median(report.step_times_ns) / 1e6:.2f} ms per step"


def update_rule(machine: Machine, rule: UpdateRule) -> str:
    """Compare the weights of a run under an update rule step by step with the paper's equation."""
    from gpu_jobs import small
    from gpu_plans import ruled

    return compared(machine.train(ruled(small, rule, STEPS), check=True))


def recurrent(machine: Machine) -> str:
    """Check that versions of an LSTM's weights lie side by side: cuDNN warns where it has to copy them."""
    from gpu_jobs import recurrent as job
    from gpu_plans import ruled

    warned = {"PYTHONWARNINGS": "error:RNN module weights:UserWarning"}
    work = ruled(job, "weight_stashing", STEPS)
    return compared(machine.train(work, job=RECURRENT, check=True, environment=warned))


def lowered(machine: Machine, precision: str) -> str:
    """Compare a run in another precision with one in fp32."""
    from gpu_jobs import small
    from gpu_plans import Layout, flushed

    from penstock.schemas.api.run_options import RunOptions

    if precision == "tf32" and machine.device == "cpu":
        raise Skipped("needs a GPU")
    options = RunOptions.parse({"precision": precision})
    layout = Layout(((0,), (1,)))
    exact = machine.train(flushed(small, layout, "gloo"))
    report = machine.train(flushed(small, layout, "gloo", norm=options.needs_norm), options=options)
    apart = max(abs(a - b) / abs(b) for a, b in zip(report.losses, exact.losses, strict=True))
    assert math.isfinite(apart), f"losses {report.losses}"
    assert 0 < apart <= LOSS_TOLERANCE[precision], f"losses are {apart:.2g} from those in fp32"
    ratio = statistics.median(report.step_times_ns) / statistics.median(exact.step_times_ns)
    return f"losses at most {apart:.2g} from fp32, {ratio:.2f} x its time"


def clipping(machine: Machine) -> str:
    """Compare the norm of all gradients, of two ranks, with the unsplit model's."""
    from gpu_jobs import small
    from gpu_plans import Layout, flushed

    from penstock.schemas.api.run_options import RunOptions

    if machine.device == "cpu":
        raise Skipped("needs a GPU")
    work = flushed(small, Layout(((0,), (1,))), "nccl", norm=True)
    return compared(machine.train(work, "nccl", options=RunOptions(clip_norm=0.5), check=True))


def checkpoint(machine: Machine) -> str:
    """Save with two ranks and resume with four; compare their losses with two ranks that were never stopped."""
    from gpu_jobs import small
    from gpu_plans import Layout, flushed

    from penstock.schemas.api.run_options import RunOptions

    two, four = flushed(small, Layout(((0,), (1,))), "gloo"), flushed(small, Layout(((0,), (1,), (2,), (3,))), "gloo")
    whole = machine.train(two, steps=STEPS)
    with tempfile.TemporaryDirectory() as directory:
        saving = RunOptions(checkpoint_directory=directory)
        machine.train(two, steps=STEPS // 2, options=saving)
        rest = machine.train(four, steps=STEPS, options=saving.model_copy(update={"resume": True}))
    apart = max(abs(a - b) / b for a, b in zip(rest.losses, whole.losses[STEPS // 2 :], strict=True))
    assert apart <= 1e-5, f"losses are {apart:.2g} apart"
    return f"losses at most {apart:.2g} apart"


def memory(machine: Machine, precision: str) -> str:
    """Compare predicted memory with the allocator's peak; without a GPU, with the growth of the process."""
    file, report, _ = machine.run(precision)
    assert file.plan.prediction is not None
    (device,) = file.plan.prediction.devices
    predicted, measured = device.peak_memory_bytes - device.memory.context_bytes, report.peak_memory_bytes[0]
    error = predicted / measured - 1
    kept = report.reserved_memory_bytes[0] / 2**20
    figure = f"{measured / 2**20:.0f} MiB, predicted {predicted / 2**20:.0f} ({error:+.1%}); {kept:.0f} reserved"
    assert machine.device == "cpu" or abs(error) <= MEMORY, figure
    return figure


def prediction(machine: Machine, precision: str) -> str:
    """Compare the step of one rank, alone on a GPU, with its prediction by the measured profile."""
    file, report, _ = machine.run(precision)
    return _timed(machine, file, report, UNCALIBRATED)


def calibrated(machine: Machine) -> str:
    """Compare another run with its prediction by a profile that the first run's trace corrected."""
    from penstock.calibration.calibrate import calibrate

    _, _, trace = machine.run()
    any_factor = machine.device == "cpu"  # whose times say nothing, as other processes use it too
    file = machine.timed_plan(calibrate(machine.profile(), [trace], any_factor=any_factor).profile)
    report, _ = machine.timed_run(file)
    return _timed(machine, file, report, CALIBRATED)


def _timed(machine: Machine, file: PlanFile, report: RunReport, limit: float) -> str:
    assert file.plan.prediction is not None
    predicted, measured = file.plan.prediction.time_per_global_batch_ns, statistics.median(report.step_times_ns)
    error = predicted / measured - 1
    figure = f"{measured / 1e6:.1f} ms, predicted {predicted / 1e6:.1f} ({error:+.1%})"
    assert machine.device == "cpu" or abs(error) <= limit, figure
    return figure


def interpreter(machine: Machine) -> str:
    """Compare iterations with the same pipeline in torch's own runtime, in turn."""
    if machine.device == "cpu":
        raise Skipped("needs a GPU")
    bench = HERE.parent / "benchmarks" / "bench_gpu_interpreter.py"
    answer = subprocess.run([sys.executable, bench], capture_output=True, text=True, timeout=120, check=False)
    assert answer.returncode == 0, answer.stderr.strip().splitlines()[-1:]
    times = json.loads(answer.stdout.splitlines()[-1])
    figure = f"{times['ratio']:.3f} x its time ({times['own_ms']:.1f} ms)"
    assert times["ratio"] <= 1.0, figure
    return figure


def codec(machine: Machine) -> str:
    """Convert a tensor of 16 MiB and back; check the precision that fp16 has."""
    import torch

    from penstock.executor.transport.codec import conversion_bytes_per_s, decode, encode

    tensor = torch.randn(CODEC_BYTES // 4, device=machine.runtime.device)
    back = torch.empty_like(tensor)
    message, converts = encode(tensor)
    assert converts
    assert decode(message, back)
    apart = float(((back - tensor).abs() / tensor.abs().clamp(min=1e-3)).max())
    assert apart <= 2**-11, f"numbers are {apart:.2g} apart"
    encoding, decoding = conversion_bytes_per_s(machine.runtime, CODEC_BYTES)
    return f"encodes {encoding / 1e9:.2f} GB/s, decodes {decoding / 1e9:.2f} GB/s"


def messages(machine: Machine) -> str:
    """Measure the issuing thread's time per message of 64 KiB: it does not wait for the device."""
    from penstock.executor.links.message_cost import issue_cost

    figures = []
    for staged in (False, True) if machine.device == "cpu" else (True,):
        cost = issue_cost(machine.runtime, MESSAGE_BYTES, staged=staged)
        name = "gloo-staged" if staged else "gloo"
        figures.append(f"{name}: send {cost.send_ns / 1e3:.1f} us, receive {cost.receive_ns / 1e3:.1f} us")
        assert max(cost) < 1_000_000, figures[-1]
    return "; ".join(figures)


def missing(machine: Machine) -> str:
    """Check that a missing GPU is refused, with the reason, before anything is built."""
    from gpu_jobs import small
    from gpu_plans import Layout, flushed

    from penstock.executor.run.local import run_locally

    work = flushed(small, Layout(((0,),)), "gloo")
    with Refusal("device 'cuda:99'") as refusal:
        run_locally(work, SMALL, directory=HERE, steps=1, seed=0, devices=["cuda:99"])
    return refusal.text


def shared(machine: Machine) -> str:
    """Check that two ranks of one host are refused on one GPU."""
    from gpu_jobs import small
    from gpu_plans import Layout, flushed

    from penstock.executor.run.local import run_locally

    work = flushed(small, Layout(((0,), (1,))), "nccl")
    device = "cuda:0" if machine.device == "cuda" else "cpu"
    with Refusal("share the GPU" if machine.device == "cuda" else "compute on CPUs") as refusal:
        run_locally(work, SMALL, directory=HERE, steps=1, seed=0, devices=[device], transport="nccl")
    return refusal.text


def full(machine: Machine) -> str:
    """Check that a plan is refused which takes more of a GPU than this process has left."""
    if machine.device == "cpu":
        raise Skipped("needs a GPU")
    import torch

    file, memory = machine.run()[0], machine.runtime.memory
    left = torch.empty(memory.free_bytes() - 2**30, dtype=torch.uint8, device=machine.runtime.device)
    try:
        with Refusal("GiB are free") as refusal:
            machine.timed_run(file)
    finally:
        del left
        torch.empty(0, device=machine.runtime.device)
    return refusal.text
