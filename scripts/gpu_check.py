"""What works on this machine's GPUs: run by ``scripts/gpu-check``.

One table of checks with what was measured. Without a GPU each check says so and runs its CPU form where it has one;
NCCL needs two GPUs. Ends with 1 when something that was run went wrong.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from penstock.schemas.errors import PenstockError, UnsupportedRequest

if TYPE_CHECKING:
    import torch

    from penstock.executor.run.local import RunReport
    from penstock.schemas.api.run_options import RunOptions
    from penstock.schemas.plan import PlanFile
    from penstock.schemas.profile import ModelProfile
    from penstock.schemas.request import UpdateRule

MODEL = "penstock.examples.gpt:tiny"
STEPS = 5
MICRO_BATCH_SIZE = 2
PIPELINES = 2
"""The pipelines of a plan with elastic averaging, each with the same number of ranks."""
RULES: tuple[UpdateRule, ...] = (
    "synchronous",
    "weight_stashing",
    "double_buffered",
    "double_grouped",
    "elastic_averaging",
)
PRECISIONS = ("bf16", "fp16")
LOSS_TOLERANCE = 0.05
"""A 16-bit run's losses may differ from those of fp32 by this much, relatively."""
MESSAGE_BYTES = 1 << 16
CODEC_BYTES = 1 << 24


class Row(NamedTuple):
    """One line of the table. ``verdict``: ok, FAILED, refused, no GPU (its CPU form is ok), needs 2 GPUs."""

    name: str
    verdict: str
    figure: str
    seconds: float


class Skipped(Exception):
    """A check that this machine has not the devices for; the argument says what it lacks."""


@dataclass
class Machine:
    """What the checks run on. ``device``: cpu or cuda."""

    device: str
    num_gpus: int

    def devices(self, count: int) -> list[str]:
        """Return torch's device names for the ranks, all on one GPU."""
        return ["cuda:0" if self.device == "cuda" else "cpu"] * count

    @property
    def transport(self) -> str:
        """What ranks that share a device send over; staged on a CPU too, so that the same code runs."""
        return "gloo-staged"

    @cached_property
    def torch_device(self) -> torch.device:
        """The first device."""
        from penstock.executor.gpu import open_device

        return open_device(self.devices(1)[0])

    @cached_property
    def profile(self) -> ModelProfile:
        """The model measured on one device."""
        from penstock.executor.profiling.profiler import measure_profile

        return measure_profile(MODEL, self.device, [MICRO_BATCH_SIZE], seconds=1.0, device_kind="checked")

    def plan(self, ranks: int, rule: UpdateRule = "synchronous", **more: Any) -> PlanFile:
        """A plan of one stage per rank."""
        from penstock.executor.run.job import load_job
        from penstock.planning.answer import plan
        from penstock.schemas.topology import ClusterTopology

        cluster = {
            "nodes": 1,
            "devices_per_node": ranks,
            "kind": "checked",
            "memory_bytes": 2**33,
            "fabric": {"bandwidth_bytes_per_s": 10**9},
        }
        planner = {"synchronous": "gpipe", "weight_stashing": "pipedream", "double_buffered": "madpipe"}
        planner |= {"double_grouped": "wpipe", "elastic_averaging": "avgpipe"}
        return plan(
            self.profile,
            ClusterTopology.parse({"name": "checked", "uniform": cluster}),
            global_batch_size=load_job(MODEL).batch_size,
            micro_batch_sizes=(MICRO_BATCH_SIZE,),
            update_rules=(rule,),
            planner=planner[rule],
            recompute="never",
            options={"pipelines": PIPELINES} if rule == "elastic_averaging" else {},
            **more,
        ).file

    def train(
        self,
        file: PlanFile,
        devices: Sequence[str],
        transport: str,
        *,
        options: RunOptions | None = None,
        check: bool = False,
    ) -> RunReport:
        """Train with a plan for some steps, compared with the unsplit model where it can be."""
        from penstock.executor.run.local import run_locally
        from penstock.planning.work import work_after
        from penstock.schemas.api.run_options import RunOptions

        lowered_for: Literal["gloo", "nccl"] = "nccl" if transport == "nccl" else "gloo"
        work = work_after(file, None, STEPS, options or RunOptions(), transport=lowered_for)
        with tempfile.TemporaryDirectory() as directory:
            return run_locally(
                work,
                MODEL,
                directory=Path(directory),
                steps=STEPS,
                seed=0,
                options=options,
                devices=devices,
                transport=transport,
                check=check,
            )


Check = tuple[str, Callable[[Machine], str]]


def checks() -> Iterator[Check]:
    """All checks in the order of the table."""
    yield "devices and versions", versions
    yield "profile of a layer chain", profile
    for ranks in (2, 4):
        yield f"gradients, {ranks} ranks on one device", lambda machine, n=ranks: gradients(machine, n)  # type: ignore[misc]
    for rule in RULES[1:]:
        yield f"update rule {rule}", lambda machine, r=rule: update_rule(machine, r)  # type: ignore[misc]
    yield "gradients, 2 ranks over NCCL", nccl
    for precision in PRECISIONS:
        yield f"precision {precision}", lambda machine, p=precision: sixteen_bits(machine, p)  # type: ignore[misc]
    yield "peak memory against prediction", memory
    yield "codec fp16s", codec
    yield "issuing a message", messages


def versions(machine: Machine) -> str:
    """Torch, CUDA, NCCL and the GPUs."""
    import torch

    if machine.device == "cpu":
        return f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    names = {torch.cuda.get_device_name(i) for i in range(machine.num_gpus)}
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "absent"
    cuda = torch.version.cuda
    return f"torch {torch.__version__}, CUDA {cuda}, NCCL {nccl}, {machine.num_gpus} x {', '.join(sorted(names))}"


def profile(machine: Machine) -> str:
    """The sum over the layers."""
    layers = machine.profile.measurements[0].layers
    forward, backward = sum(one.forward_ns for one in layers), sum(one.backward_ns for one in layers)
    return f"forward {forward / 1e6:.3f} ms, backward {backward / 1e6:.3f} ms for {MICRO_BATCH_SIZE} samples"


def gradients(machine: Machine, ranks: int) -> str:
    """A staged run against the unsplit model."""
    report = machine.train(machine.plan(ranks), machine.devices(ranks), machine.transport, check=True)
    return compared(report)


def nccl(machine: Machine) -> str:
    """The same over NCCL, a GPU for each rank."""
    if machine.num_gpus < 2:
        raise Skipped("needs 2 GPUs")
    report = machine.train(machine.plan(2), ["cuda:0", "cuda:1"], "nccl", check=True)
    return compared(report)


def compared(report: RunReport) -> str:
    """How far a run is from the unsplit model. Raises AssertionError when it is too far."""
    assert report.gradient_check is not None, "the run was not compared with the unsplit model"
    assert report.check_passed, f"gradients {report.gradient_check:.3g} apart, tolerance {report.gradient_tolerance}"
    return f"{report.gradient_check:.2g} apart, {statistics.median(report.step_times_ns) / 1e6:.2f} ms per step"


def update_rule(machine: Machine, rule: UpdateRule) -> str:
    """A run under an update rule whose weights are compared step by step with the paper's equation."""
    file = machine.plan(2, rule)
    ranks = len({device for pipeline in file.plan.pipelines for stage in pipeline.stages for device in stage.devices})
    report = machine.train(file, machine.devices(ranks), machine.transport, check=True)
    return compared(report)


def sixteen_bits(machine: Machine, precision: str) -> str:
    """A run in 16 bits compared with one in 32."""
    from penstock.schemas.api.run_options import RunOptions

    file, devices = machine.plan(2), machine.devices(2)
    exact = machine.train(file, devices, machine.transport)
    options = RunOptions(precision=precision)  # type: ignore[arg-type]
    report = machine.train(file, devices, machine.transport, options=options)
    apart = max(abs(a - b) / abs(b) for a, b in zip(report.losses, exact.losses, strict=True))
    assert math.isfinite(apart), f"losses {report.losses}"
    assert 0 < apart <= LOSS_TOLERANCE, f"losses are {apart:.2g} from those in fp32"
    ratio = statistics.median(report.step_times_ns) / statistics.median(exact.step_times_ns)
    return f"losses at most {apart:.2g} from fp32, {ratio:.2f} x its time"


def memory(machine: Machine) -> str:
    """What the allocator gave out at most, rank by rank; without a GPU, by how much processes grew."""
    file = machine.plan(2)
    assert file.plan.prediction is not None
    predicted = [one.peak_memory_bytes - one.memory.context_bytes for one in file.plan.prediction.devices]
    report = machine.train(file, machine.devices(2), machine.transport)
    pairs = zip(report.peak_memory_bytes, predicted, strict=True)
    return "; ".join(
        f"rank {k}: {has / 2**20:.1f} MiB, predicted {says / 2**20:.1f}" for k, (has, says) in enumerate(pairs)
    )


def codec(machine: Machine) -> str:
    """Conversion of a tensor of 16 MiB."""
    from penstock.executor.transport.codec import conversion_bytes_per_s

    encoding, decoding = conversion_bytes_per_s(machine.torch_device, CODEC_BYTES)
    return f"encodes {encoding / 1e9:.2f} GB/s, decodes {decoding / 1e9:.2f} GB/s"


def messages(machine: Machine) -> str:
    """What the issuing thread spends per message of 64 KiB."""
    from penstock.executor.links.message_cost import issue_cost

    said = []
    for staged in (False, True) if machine.device == "cpu" else (True,):
        cost = issue_cost(machine.torch_device, MESSAGE_BYTES, staged=staged)
        name = "gloo-staged" if staged else "gloo"
        said.append(f"{name}: send {cost.send_ns / 1e3:.1f} us, receive {cost.receive_ns / 1e3:.1f} us")
    return "; ".join(said)


def run_check(check: Check, machine: Machine) -> Row:
    """One line; whatever goes wrong becomes its verdict."""
    name, function = check
    start = time.monotonic()
    good = "ok" if machine.device == "cuda" else "no GPU"
    try:
        verdict, figure = good, function(machine)
    except Skipped as lack:
        verdict, figure = ("no GPU" if machine.num_gpus == 0 else str(lack)), str(lack)
    except UnsupportedRequest as error:
        verdict, figure = "refused", error.detail
    except (PenstockError, AssertionError) as error:
        verdict, figure = "FAILED", str(error)
    except Exception as error:
        verdict, figure = "FAILED", f"{type(error).__name__}: {error}"
    return Row(name, verdict, figure, time.monotonic() - start)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU, else cpu")
    parser.add_argument("--only", default="", help="checks whose names contain this")
    given = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    import torch

    from penstock.executor.gpu import why_no_gpu

    torch.set_num_threads(1)
    why = why_no_gpu()
    device = given.device or ("cpu" if why else "cuda")
    if device == "cuda" and why:
        print(f"no GPU: {why}")
        return 1
    if device == "cpu":
        print(f"no GPU: {why}; these are the CPU forms" if why else "the CPU forms, as asked for")
    machine = Machine(device, 0 if why else torch.cuda.device_count())
    good = True
    for check in checks():
        if given.only not in check[0]:
            continue
        row = run_check(check, machine)
        good = good and row.verdict != "FAILED"
        first, *more = row.figure.splitlines() or [""]
        print(f"{row.name:36s} {row.verdict:13s} {row.seconds:5.1f} s  {first}", flush=True)
        for line in more:
            print(f"{'':57s}  {line}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
