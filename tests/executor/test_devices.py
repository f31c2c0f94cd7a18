"""The devices of this machine: what nvidia-smi shows, what CUDA_VISIBLE_DEVICES leaves of it, and which is a rank's.

``nvidia-smi`` is a script that prints what the real one prints; all else is the code that runs on GPU machines.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penstock.cli.run import running
from penstock.executor.devices import (
    BUS,
    LocalDevice,
    cpu_shares,
    device_kind,
    discover,
    machine_memory_bytes,
    number_by_bus,
    parse_gpus,
    torch_names,
    visible,
    visible_numbers,
    with_instances,
)
from penstock.executor.launched.process import device_of
from penstock.executor.node.agent import Agent
from penstock.executor.node.settings import AgentSettings
from penstock.executor.runtime import cuda
from penstock.executor.runtime.opening import open_device
from penstock.schemas.errors import InvalidDocument, UnsupportedRequest
from penstock.schemas.ranks.bundle import JobBundle

H100 = "NVIDIA H100 80GB HBM3, 81559"
FOUR = "".join(f"{i}, GPU-{letter}{i}ce-7a, {H100}\n" for i, letter in enumerate("abcd"))
MIXED = f"0, GPU-a0, {H100}\n1, GPU-b1, NVIDIA L40S, 46068\n"
PARTED = "0, GPU-a0, NVIDIA A100-SXM4-40GB, 40960\n1, GPU-b1, NVIDIA A100-SXM4-40GB, 40960\n"
LISTING = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-a0)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4)
  MIG 1g.5gb      Device  1: (UUID: MIG-e7f5)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-b1)
"""

Smi = Callable[[str, str], None]


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    """Return a function that puts an nvidia-smi on the path with answers to its query, and to ``-L``."""
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        monkeypatch.setenv(name, "to be restored, should the test set it")
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def install(query: str, listing: str = "") -> None:
        (tmp_path / "query").write_text(query)
        (tmp_path / "listing").write_text(listing)
        program = tmp_path / "nvidia-smi"
        program.write_text(f'#!/bin/sh\n[ "$1" = -L ] && exec cat {tmp_path}/listing\nexec cat {tmp_path}/query\n')
        program.chmod(0o755)

    return install


# What there is


def test_gpus_as_nvidia_smi_lists_them(smi: Smi) -> None:
    smi(FOUR, "")
    first, second, *_ = discover("n", cpu_devices=0)
    assert (first.offer.id, first.offer.kind, first.offer.memory_bytes) == ("n/0", "H100", 81559 * 2**20)
    assert second.environment() == {"CUDA_VISIBLE_DEVICES": "GPU-b1ce-7a", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def test_instances_stand_for_the_gpu_that_is_cut_into_them() -> None:
    gpus = with_instances(parse_gpus(PARTED), LISTING)
    assert [(gpu.number, gpu.uuid, gpu.kind) for gpu in gpus] == [
        (0, "MIG-c6d4", "A100-3g.20gb"),
        (0, "MIG-e7f5", "A100-1g.5gb"),
        (1, "GPU-b1", "A100"),
    ]
    assert [gpu.memory_bytes for gpu in gpus] == [20 * 10**9, 5 * 10**9, 40960 * 2**20]
    assert torch_names(gpus) == ["cuda:0"], "CUDA shows a process one instance"


def test_what_is_no_list_of_gpus_is_shown() -> None:
    with pytest.raises(InvalidDocument, match="'No devices were found'"):
        parse_gpus("No devices were found\n")


@pytest.mark.parametrize(
    ("product", "kind"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA GeForce GTX 1080 Ti", "GTX1080Ti"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA Something Else", "Something Else"),
    ],
)
def test_device_kinds(product: str, kind: str) -> None:
    assert device_kind(product) == kind


def test_cpu_devices_share_the_memory() -> None:
    shares = cpu_shares("n", 3, 10, "cpu")
    assert [(one.offer.id, one.offer.memory_bytes) for one in shares] == [("n/0", 3), ("n/1", 3), ("n/2", 3)]
    assert shares[0].environment()["OMP_NUM_THREADS"] == "1"
    total = sum(one.offer.memory_bytes for one in discover("n", cpu_devices=2))
    assert 0 <= machine_memory_bytes() - total <= 1


def test_memory_is_the_smaller_of_machine_and_control_group(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       1000 kB\nMemFree: 1 kB\n")
    (tmp_path / "limit").write_text("2048\n")
    (tmp_path / "none").write_text("max\n")
    assert machine_memory_bytes(str(tmp_path / "meminfo"), str(tmp_path / "limit")) == 2048
    assert machine_memory_bytes(str(tmp_path / "meminfo"), str(tmp_path / "none")) == 1000 * 1024


def test_a_machine_without_devices_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidDocument, match="--cpu-devices 2"):
        discover("n", cpu_devices=0)


def test_a_driver_that_failed_shows_no_gpu(smi: Smi, tmp_path: Path) -> None:
    smi(FOUR, "")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'driver failed' >&2; exit 9\n")
    with pytest.raises(InvalidDocument, match="has no device"):
        discover("n", cpu_devices=0)


# What a process sees


@pytest.mark.parametrize(
    ("listed", "numbers"),
    [
        pytest.param(None, [0, 1, 2, 3], id="all"),
        pytest.param("", [], id="none"),
        pytest.param("2, 0", [2, 0], id="in-the-order-of-the-list"),
        pytest.param("GPU-c2ce-7a,GPU-a0ce-7a", [2, 0], id="by-uuid"),
        pytest.param("GPU-b,GPU-d3", [1, 3], id="by-the-beginning-of-a-uuid"),
        pytest.param("GPU-", [], id="which-more-than-one-begins-with"),
        pytest.param("1,-1,2", [1], id="up-to-what-names-none"),
        pytest.param("1,9,2", [1], id="up-to-a-gpu-that-is-not-there"),
        pytest.param("1,1", [], id="twice"),
    ],
)
def test_a_process_sees_what_cuda_shows_it(listed: str | None, numbers: list[int]) -> None:
    environ = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert [gpu.number for gpu in visible(parse_gpus(FOUR), environ)] == numbers


def test_instances_are_seen_by_their_uuids() -> None:
    gpus = with_instances(parse_gpus(PARTED), LISTING)
    (only,) = visible(gpus, {"CUDA_VISIBLE_DEVICES": "MIG-e7f5"})
    assert (only.kind, only.is_instance) == ("A100-1g.5gb", True)
    assert [gpu.uuid for gpu in visible(gpus, {"CUDA_VISIBLE_DEVICES": "1,0"})] == ["GPU-b1", "MIG-c6d4"]


def test_an_order_that_cuda_alone_knows_is_refused() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    with pytest.raises(InvalidDocument, match=r"for GPUs of several kinds \(H100, L40S\)") as caught:
        visible(parse_gpus(MIXED), environ)
    assert "UUID" in str(caught.value.remedy)
    assert [gpu.number for gpu in visible(parse_gpus(FOUR), environ)] == [1], "of one kind, all orders are alike"
    assert [gpu.number for gpu in visible(parse_gpus(MIXED), environ | {"CUDA_VISIBLE_DEVICES": "GPU-b1"})] == [1]
    assert [gpu.number for gpu in visible(parse_gpus(MIXED), environ | {"CUDA_DEVICE_ORDER": BUS})] == [1]


def test_ranks_have_cuda_number_gpus_as_nvidia_smi_does(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedRequest):
        open_device("cuda:99")
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    chosen = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    number_by_bus(chosen)
    assert chosen["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


# Surfaces


def test_an_agent_offers_gpus_that_are_listed_by_uuid(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(MIXED, "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b1")
    (only,) = discover("n", cpu_devices=0)
    assert (only.offer.id, only.offer.kind) == ("n/0", "L40S")
    assert only.environment()["CUDA_VISIBLE_DEVICES"] == "GPU-b1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-unknown")
    with pytest.raises(InvalidDocument, match="no GPU that CUDA_VISIBLE_DEVICES=MIG-unknown names"):
        discover("n", cpu_devices=0)


def test_an_agent_leaves_the_operators_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    settings = AgentSettings(server="http://127.0.0.1:1", name="n", models={"m": "a:b"}, probe_port=-1)
    devices: tuple[LocalDevice, ...] = cpu_shares("n", 1, 10, "cpu")
    environment = Agent(settings, devices, say=lambda text: None)._environment(devices[0])
    assert environment["NCCL_SOCKET_IFNAME"] == "ib0"
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"


@pytest.mark.tier("quick")
@pytest.mark.parametrize(
    ("listed", "names"),
    [
        pytest.param("GPU-c2,GPU-a0", ["cuda:0", "cuda:1"], id="uuids"),
        pytest.param("1,2,3", ["cuda:0", "cuda:1", "cuda:2"], id="numbers"),
    ],
)
def test_penstock_run_takes_all_visible_gpus(
    listed: str, names: list[str], smi: Smi, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(FOUR, "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert running._devices("cuda") == names


def test_penstock_run_asks_torch_where_nvidia_smi_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(cuda, "why_no_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert running._devices("cuda") == ["cuda:0", "cuda:1"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert running._devices("cuda") == ["cuda:0"], "whose rank says why it cannot"


def bundle(*indices: int) -> JobBundle:
    ranks = [
        {"rank": i, "device": f"a/{index}", "device_kind": "H100", "programs": [{}], "digest": ""}
        for i, index in enumerate(indices)
    ]
    data = {"update_rule": "synchronous", "global_batch_size": 8, "layers": ["a"], "lowered_for": "gloo"}
    return JobBundle.parse(data | {"plan_hash": "sha256:" + 64 * "0", "ranks": ranks})


@pytest.mark.tier("quick")
@pytest.mark.parametrize(
    ("environ", "used", "devices"),
    [
        pytest.param({}, (2, 3), ["cuda:2", "cuda:3"], id="all of the node"),
        pytest.param({}, (3, 2), ["cuda:3", "cuda:2"], id="whatever the order of the ranks"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "1,2,3"}, (2, 3), ["cuda:1", "cuda:2"], id="more than the plan's"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "3,2"}, (2, 3), ["cuda:1", "cuda:0"], id="those of the plan, backwards"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "GPU-d3,GPU-c2"}, (2, 3), ["cuda:1", "cuda:0"], id="by UUID"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "2"}, (2, 3), ["cuda:0", "cuda:0"], id="its own alone"),
        pytest.param({}, (4, 7), ["cuda:0", "cuda:1"], id="a container numbers anew"),
        pytest.param({"SLURM_JOB_GPUS": "4-7"}, (4, 7), ["cuda:0", "cuda:3"], id="Slurm numbers anew"),
        pytest.param({"SLURM_JOB_GPUS": "2,3,4,5"}, (2, 3), ["cuda:0", "cuda:1"], id="Slurm, with numbers in common"),
        pytest.param({"SLURM_JOB_GPUS": "2,3"}, (2, 3), ["cuda:2", "cuda:3"], id="Slurm shows the whole node"),
    ],
)
def test_a_rank_finds_the_plans_gpu(
    environ: dict[str, str], used: tuple[int, ...], devices: list[str], smi: Smi, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(FOUR, "")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    job_bundle = bundle(*used)
    assert [device_of(job_bundle, rank, "auto") for rank in range(len(used))] == devices


def test_numbers_of_a_node_are_unknown_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_numbers() == []
