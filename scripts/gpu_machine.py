"""The machine of ``scripts/gpu-check``: its devices, runs on them, and what is timed once for several checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.schemas.errors import UnsupportedRequest

if TYPE_CHECKING:
    from penstock.executor.run.local import RunReport
    from penstock.executor.run.rank_programs import Work
    from penstock.executor.runtime.interface import Runtime
    from penstock.schemas.api.run_options import RunOptions
    from penstock.schemas.plan import PlanFile
    from penstock.schemas.profile import ModelProfile
    from penstock.schemas.trace import Trace

HERE = Path(__file__).parent
SMALL, TIMED, RECURRENT, EXPERTS = "gpu_jobs:small", "gpu_jobs:timed", "gpu_jobs:recurrent", "gpu_jobs:experts"
STEPS, TIMED_STEPS = 4, 12
MICRO_BATCH_SIZE = 4
HANGS_AFTER_S = 120.0
"""Longest time of an instruction of a check's ranks, in seconds, the first step too: a hang fails one line alone."""


class Skipped(Exception):
    """A check for which this machine lacks devices; the argument names them."""


@dataclass
class Machine:
    """The machine that the checks run on. ``device``: cpu or cuda."""

    device: str
    num_gpus: int

    @cached_property
    def runtime(self) -> Runtime:
        """The first device."""
        from penstock.executor.runtime.opening import open_device

        return open_device("cuda:0" if self.device == "cuda" else "cpu")

    @property
    def timed(self) -> str:
        """The job that is timed; a small one on a CPU."""
        return TIMED if self.device == "cuda" else SMALL

    @property
    def own_gpus(self) -> bool:
        """The presence of a GPU for each of two ranks."""
        return self.num_gpus > 1

    def places(self, transport: str) -> tuple[list[str], list[dict[str, str]]]:
        """Return the devices that ranks get in turn, and variables for them."""
        if self.device == "cpu":
            return ["cpu"], [{}]
        if transport != "nccl":
            return ["cuda:0"], [{}]
        if self.own_gpus:
            return [f"cuda:{number}" for number in range(self.num_gpus)], [{}]
        on_hosts = [{"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo"} for rank in range(4)]
        return ["cuda:0"], on_hosts

    def train(
        self,
        work: Work,
        transport: str = "gloo-staged",
        *,
        job: str = SMALL,
        steps: int = STEPS,
        options: RunOptions | None = None,
        environment: Mapping[str, str] | None = None,
        **more: Any,
    ) -> RunReport:
        """Train for some steps; ``environment``: variables of all ranks."""
        from penstock.executor.run.local import run_locally

        devices, variables = self.places(transport)
        if transport == "nccl" and work.num_ranks > len(devices) and self.own_gpus:
            raise Skipped(f"needs {work.num_ranks} GPUs")
        return run_locally(
            work,
            job,
            directory=HERE,
            steps=steps,
            seed=0,
            options=options,
            devices=devices,
            transport=transport,
            environments=[each | dict(environment or {}) for each in variables],
            timeout_s=HANGS_AFTER_S,
            **more,
        )

    @cached_property
    def profiles(self) -> dict[str, ModelProfile]:
        """Profiles of the larger model that were requested, measured on one device, by precision."""
        return {}

    def profile(self, precision: str = "fp32") -> ModelProfile:
        """Return the profile of the larger model in a precision, measured once."""
        from penstock.executor.profiling.profiler import measure_profile

        if precision not in self.profiles:
            self.profiles[precision] = measure_profile(
                self.timed, self.device, [MICRO_BATCH_SIZE], directory=HERE, seconds=8.0, precision=precision
            )
        return self.profiles[precision]

    def timed_plan(self, profile: ModelProfile) -> PlanFile:
        """Return the plan of the larger model on one device."""
        from gpu_plans import whole

        from penstock.executor.run.job import load_job

        batch_size = load_job(self.timed, HERE).batch_size
        return whole(profile, batch_size, MICRO_BATCH_SIZE, self.runtime.memory.total_bytes())

    def timed_run(self, file: PlanFile, precision: str = "fp32") -> tuple[RunReport, Trace]:
        """Train with a plan of the larger model; return the report, and the measurements as a trace document."""
        from penstock.planning.programs.segment_programs import work_after
        from penstock.schemas.api.run_options import RunOptions
        from penstock.schemas.trace import Trace

        options = RunOptions.parse({"precision": precision})
        work = work_after(file, None, TIMED_STEPS, options, transport="gloo")
        report = self.train(work, "auto", job=self.timed, steps=TIMED_STEPS, options=options, trace_steps=4)
        assert file.plan.prediction is not None
        document = {
            "plan_hash": file.plan.content_hash(),
            "predicted_time_per_global_batch_ns": file.plan.prediction.time_per_global_batch_ns,
            "measured_times_per_global_batch_ns": report.step_times_ns,
            "losses": report.losses,
            "ranks": report.rank_traces,
            "plan_file": file,
        }
        return report, Trace.parse(document)

    @cached_property
    def runs(self) -> dict[str, tuple[PlanFile, RunReport, Trace]]:
        """Runs of the larger model that were requested, by precision."""
        return {}

    def run(self, precision: str = "fp32") -> tuple[PlanFile, RunReport, Trace]:
        """Plan the larger model by the measured profile, and train it, once."""
        if precision not in self.runs:
            file = self.timed_plan(self.profile(precision))
            self.runs[precision] = file, *self.timed_run(file, precision)
        return self.runs[precision]


class Refusal:
    """An expected error whose words contain a text; ``text`` has all of its words."""

    def __init__(self, text: str) -> None:
        self._wanted = text
        self.text = ""

    def __enter__(self) -> Refusal:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        assert error is not None, f"nothing was refused; expected {self._wanted!r}"
        self.text = str(error)
        assert isinstance(error, UnsupportedRequest), self.text
        assert self._wanted in self.text, self.text
        return True
