"""Finds what an agent can offer, without torch: CPU devices by count, CUDA devices through ``nvidia-smi``.

Device ids are ``agent/index``, as the uniform topology names them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.schemas.api.agents import AgentDevice
from penstock.schemas.errors import InvalidDocument

_QUERY = ("--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits")
_LIMIT_S = 30
_MIB = 2**20
_PRODUCT = re.compile(r"\b(?:GTX|RTX)\s*[0-9]{3,4}(?:\s*Ti)?\b|\b[A-Z]{1,2}[0-9]{1,4}[A-Z]?\b")


@dataclass(frozen=True, slots=True)
class LocalDevice:
    """A device of this machine: what is told of it, and the name under which a rank opens it."""

    offer: AgentDevice
    torch_name: str

    def environment(self) -> dict[str, str]:
        """What a rank on this device finds in its environment: its one GPU, or one thread of one CPU device."""
        if self.torch_name == "cpu":
            return {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        return {"CUDA_VISIBLE_DEVICES": self.torch_name.removeprefix("cuda:")}


def discover(agent: str, *, cpu_devices: int, cpu_kind: str = "cpu") -> tuple[LocalDevice, ...]:
    """The devices of this machine: ``cpu_devices`` shares of its memory if positive, else its GPUs.

    Raises InvalidDocument when there are none.
    """
    if cpu_devices > 0:
        return cpu_shares(agent, cpu_devices, machine_memory_bytes(), cpu_kind)
    found = parse_nvidia_smi(agent, ask_nvidia_smi())
    if not found:
        raise InvalidDocument(
            f"agent {agent!r} has no device: nvidia-smi shows no GPU, and no CPU devices were asked for",
            remedy="penstock agent --cpu-devices 2",
        )
    return found


def cpu_shares(agent: str, count: int, memory_bytes: int, kind: str) -> tuple[LocalDevice, ...]:
    """``count`` CPU devices that share ``memory_bytes`` evenly."""
    share = memory_bytes // count
    return tuple(
        LocalDevice(AgentDevice(id=f"{agent}/{i}", kind=kind, memory_bytes=share), "cpu") for i in range(count)
    )


def machine_memory_bytes(meminfo: str = "/proc/meminfo", limit: str = "/sys/fs/cgroup/memory.max") -> int:
    """Bytes of memory that this machine (or the control group that holds us) has."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if Path(meminfo).exists():
        match = re.search(r"^MemTotal:\s+([0-9]+) kB$", Path(meminfo).read_text(), re.MULTILINE)
        total = int(match[1]) * 1024 if match else total
    if Path(limit).exists() and (text := Path(limit).read_text().strip()).isdigit():
        total = min(total, int(text))
    return total


def ask_nvidia_smi() -> str:
    """What ``nvidia-smi`` says of index, name and memory (MiB) of each GPU; empty without a GPU or a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        answer = subprocess.run([program, *_QUERY], capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""


def parse_nvidia_smi(agent: str, text: str, environ: Mapping[str, str] = os.environ) -> tuple[LocalDevice, ...]:
    """The GPUs in nvidia-smi's answer; only those of ``CUDA_VISIBLE_DEVICES`` where it lists indices.

    Raises InvalidDocument for a line that is not ``index, name, MiB``.
    """
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    allowed = None if listed is None else {part.strip() for part in listed.split(",")}
    rows = []
    for line in filter(None, map(str.strip, text.splitlines())):
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != 3 or not parts[0].isdigit() or not parts[2].isdigit():
            raise InvalidDocument(f"nvidia-smi answered {line!r}; expected 'index, name, MiB'")
        if allowed is None or parts[0] in allowed:
            rows.append((parts[0], parts[1], int(parts[2]) * _MIB))
    return tuple(
        LocalDevice(AgentDevice(id=f"{agent}/{i}", kind=device_kind(name), memory_bytes=memory_bytes), f"cuda:{index}")
        for i, (index, name, memory_bytes) in enumerate(rows)
    )


def device_kind(product: str) -> str:
    """The kind of a GPU as profiles call it: ``NVIDIA H100 80GB HBM3`` is ``H100``; unknown names stay whole."""
    match = _PRODUCT.search(product)
    return match[0].replace(" ", "") if match else product.removeprefix("NVIDIA ")
