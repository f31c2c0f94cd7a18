"""The devices of this machine: their number, kinds and order, and the devices that a process sees.

Agents, ``penstock run``, ``penstock rank`` and the profiler all read this. Nothing here loads torch.

GPUs are numbered as in ``nvidia-smi``, by PCI bus. CUDA's order may be another one (CUDA_DEVICE_ORDER), so
``number_by_bus`` sets this order before a process opens a GPU, and an agent names GPUs by their UUIDs.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.schemas.errors import InvalidDocument

if TYPE_CHECKING:
    from penstock.schemas.api.agents import AgentDevice

VISIBLE, ORDER, BUS = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PCI_BUS_ID"

_QUERY = ("--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")
_LIMIT_S = 30
_MIB = 2**20
_PRODUCT = re.compile(r"\b(?:GTX|RTX)\s*[0-9]{3,4}(?:\s*Ti)?\b|\b[A-Z]{1,2}[0-9]{1,4}[A-Z]?\b")
_GPU_LINE = re.compile(r"GPU ([0-9]+): .*\(UUID: [^)]+\)")
_INSTANCE_LINE = re.compile(r"\s+MIG ([0-9]+g\.([0-9]+)gb\S*)\s+Device\s+[0-9]+: \(UUID: (MIG-[^)]+)\)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this machine, or a MIG instance of one. ``number``: the GPU's number in ``nvidia-smi``."""

    number: int
    uuid: str
    kind: str
    memory_bytes: int

    @property
    def is_instance(self) -> bool:
        """True if it is a MIG instance, of which CUDA shows a process no more than one."""
        return self.uuid.startswith("MIG-")


@dataclass(frozen=True, slots=True)
class LocalDevice:
    """A device that an agent offers; ``gpu`` is None for a share of the CPU."""

    offer: AgentDevice
    gpu: Gpu | None = None

    def environment(self) -> dict[str, str]:
        """Return the variables that show a rank only this GPU, or give it one thread of the CPU."""
        if self.gpu is None:
            return {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        return {VISIBLE: self.gpu.uuid, ORDER: BUS}


def discover(agent: str, *, cpu_devices: int, cpu_kind: str = "cpu") -> tuple[LocalDevice, ...]:
    """Return the devices of this machine, named ``agent/0`` and so on as in a uniform topology.

    They are ``cpu_devices`` shares of the memory if that is positive, otherwise the visible GPUs. InvalidDocument
    without devices.
    """
    if cpu_devices > 0:
        return cpu_shares(agent, cpu_devices, machine_memory_bytes(), cpu_kind)
    gpus = visible_gpus()
    if not gpus:
        raise InvalidDocument(
            f"agent {agent!r} has no device: nvidia-smi shows no GPU{_hidden(os.environ)}, and no CPU devices were "
            "requested",
            remedy="penstock agent --cpu-devices 2",
        )
    return tuple(LocalDevice(_offer(f"{agent}/{i}", gpu.kind, gpu.memory_bytes), gpu) for i, gpu in enumerate(gpus))


def cpu_shares(agent: str, count: int, memory_bytes: int, kind: str) -> tuple[LocalDevice, ...]:
    """Return ``count`` CPU devices that share ``memory_bytes`` evenly."""
    share = memory_bytes // count
    return tuple(LocalDevice(_offer(f"{agent}/{i}", kind, share)) for i in range(count))


def _offer(name: str, kind: str, memory_bytes: int) -> AgentDevice:
    from penstock.schemas.api.agents import AgentDevice  # loads all documents, which ranks do not need

    return AgentDevice(id=name, kind=kind, memory_bytes=memory_bytes)


def machine_memory_bytes(meminfo: str = "/proc/meminfo", limit: str = "/sys/fs/cgroup/memory.max") -> int:
    """Return the bytes of memory of this machine, or of this process's control group."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if Path(meminfo).exists():
        match = re.search(r"^MemTotal:\s+([0-9]+) kB$", Path(meminfo).read_text(), re.MULTILINE)
        total = int(match[1]) * 1024 if match else total
    if Path(limit).exists() and (text := Path(limit).read_text().strip()).isdigit():
        total = min(total, int(text))
    return total


def processor_model(cpuinfo: str = "/proc/cpuinfo") -> str:
    """Return the model of this machine's processors, or their architecture where Linux names no model."""
    text = Path(cpuinfo).read_text(encoding="utf-8") if Path(cpuinfo).exists() else ""
    match = re.search(r"^model name\s*:[ \t]*(\S.*)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def device_kind(product: str) -> str:
    """Return a GPU's kind as in profiles: ``NVIDIA H100 80GB HBM3`` is ``H100``; unknown names stay whole."""
    match = _PRODUCT.search(product)
    return match[0].replace(" ", "") if match else product.removeprefix("NVIDIA ")


# GPUs of the machine


def machine_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that ``nvidia-smi`` shows, in MIG mode their instances; empty without a driver or a GPU."""
    gpus = parse_gpus(_ask(*_QUERY))
    return with_instances(gpus, _ask("-L")) if gpus else ()


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Parse nvidia-smi's list of GPUs. Raises InvalidDocument for a line that is not ``index, UUID, name, MiB``."""
    gpus = []
    for line in filter(None, map(str.strip, text.splitlines())):
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != 4 or not parts[0].isdigit() or not parts[3].isdigit():
            raise InvalidDocument(f"nvidia-smi answered {line!r}; expected 'index, UUID, name, MiB'")
        gpus.append(Gpu(int(parts[0]), parts[1], device_kind(parts[2]), int(parts[3]) * _MIB))
    return tuple(gpus)


def with_instances(gpus: Sequence[Gpu], listing: str) -> tuple[Gpu, ...]:
    """Return the GPUs, with GPUs in MIG mode replaced by their instances, as ``nvidia-smi -L`` lists them.

    An instance has the memory in its profile's name: ``1g.5gb`` is a little less than its memory.
    """
    instances: dict[int, list[tuple[str, int, str]]] = {}
    number = -1
    for line in listing.splitlines():
        if gpu_line := _GPU_LINE.match(line):
            number = int(gpu_line[1])
        elif instance := _INSTANCE_LINE.match(line):
            instances.setdefault(number, []).append((instance[1], int(instance[2]) * 10**9, instance[3]))
    result: list[Gpu] = []
    for gpu in gpus:
        members = instances.get(gpu.number)
        parts = [replace(gpu, uuid=u, kind=f"{gpu.kind}-{name}", memory_bytes=size) for name, size, u in members or ()]
        result += parts or [gpu]
    return tuple(result)


def _ask(*arguments: str) -> str:
    """Return the output of ``nvidia-smi``; empty without a GPU or a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        answer = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""


# GPUs that a process sees


def visible_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that this process sees, in the order in which CUDA numbers them."""
    return visible(machine_gpus(), os.environ)


def visible(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES lists, by number, UUID or the beginning of one, in its order.

    As in CUDA, the list ends at an entry that names no GPU, and a list that names one twice is empty. Raises
    InvalidDocument for numbers in an order of CUDA that is unknown here.
    """
    listed = environ.get(VISIBLE)
    if listed is None:
        return tuple(gpus)
    entries = [entry.strip() for entry in listed.split(",")]
    kinds = sorted({gpu.kind for gpu in gpus})
    if environ.get(ORDER, BUS) != BUS and len(kinds) > 1 and any(entry.isdecimal() for entry in entries):
        raise InvalidDocument(
            f"{VISIBLE}={listed} numbers GPUs in the order {environ[ORDER]}, which only CUDA knows for GPUs of "
            "several kinds "
            f"({', '.join(kinds)})",
            remedy=f"name them by UUID (nvidia-smi -L), or export {ORDER}={BUS}",
        )
    result: list[Gpu] = []
    for entry in entries:
        gpu = _named(gpus, entry)
        if gpu is None:
            break
        if gpu in result:
            return ()
        result.append(gpu)
    return tuple(result)


def _named(gpus: Sequence[Gpu], entry: str) -> Gpu | None:
    if entry.isdecimal():
        return next((gpu for gpu in gpus if gpu.number == int(entry)), None)
    matching = [gpu for gpu in gpus if entry and gpu.uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None


def _hidden(environ: Mapping[str, str]) -> str:
    return f" that {VISIBLE}={environ[VISIBLE]} names" if VISIBLE in environ else ""


def number_by_bus(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let CUDA number GPUs as ``nvidia-smi`` does, unless the environment differs; call it before CUDA starts."""
    environ.setdefault(ORDER, BUS)


def torch_names(gpus: Sequence[Gpu]) -> list[str]:
    """Return the names of these GPUs in a process that sees them; CUDA shows at most one MIG instance."""
    count = 1 if any(gpu.is_instance for gpu in gpus) else len(gpus)
    return [f"cuda:{number}" for number in range(count)]


def visible_numbers() -> list[int]:
    """Return the node's numbers of the GPUs that this process sees, in CUDA's order; empty without GPUs.

    Slurm may show a job only its GPUs, numbered from 0; SLURM_STEP_GPUS or SLURM_JOB_GPUS then has their numbers.
    """
    shown = machine_gpus()
    job_numbers = sorted(_expanded(os.environ.get("SLURM_STEP_GPUS") or os.environ.get("SLURM_JOB_GPUS") or ""))
    numbers = [gpu.number for gpu in shown]
    of_node = dict(zip(numbers, job_numbers if len(job_numbers) == len(numbers) else numbers, strict=True))
    return [of_node[gpu.number] for gpu in visible(shown, os.environ)]


def _expanded(text: str) -> list[int]:
    """Expand a list of numbers such as ``0,4-7``; empty for any other text."""
    numbers: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            return []
        numbers.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return numbers


def place_among(index: str, used: Sequence[str], numbers: Sequence[int]) -> int:
    """Return the place of the plan's device ``index`` of its node among the GPUs that a process sees.

    ``used``: the node's devices that the plan uses, in order; ``numbers``: the node's numbers of the GPUs that the
    process sees. Where they differ from the plan's (a container numbers from 0), the order of both counts.
    """
    if len(numbers) == 1:
        return 0
    if all(one.isdecimal() and int(one) in numbers for one in used):
        return list(numbers).index(int(index))
    return list(used).index(index)
