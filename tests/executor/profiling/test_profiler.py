"""Measured profiles and links: real processes, no assertion on how long anything takes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from penstock.executor.links.link_fit import fit
from penstock.executor.links.link_probe import LinkMeasurement, measure_links, measured_cluster
from penstock.executor.profiling.analytic import analytic_profile
from penstock.executor.profiling.profiler import MEASURED_EXPECTED_ERROR, measure_profile
from penstock.executor.run.job import load_job
from penstock.schemas.errors import InvalidDocument, ModelMismatch, RunFailed
from penstock.schemas.profile import ModelProfile

SECONDS = 0.2

USER_JOB = """
from functools import partial
from torch import nn
from penstock.examples.gpt import tiny
from penstock.examples.synthetic import ImageJob
print("printed by the user's module")

class Ends(nn.Module):
    def forward(self, x):
        import os
        os._exit(7)

class Fails(nn.Module):
    def forward(self, x):
        raise ValueError("cannot go on") if x.device.type != "meta" else None
        return x

def make(name, last):
    from penstock.executor.run.job import LayerSpec
    specs = [LayerSpec("a", nn.Identity), LayerSpec("b", last)]
    return ImageJob(name, lambda: specs, batch_size=4, side=2, classes=2)

ends = make("ends", Ends)
wrong = make("wrong", lambda: nn.Linear(99, 2))
"""


@pytest.fixture(scope="module")
def measured() -> ModelProfile:
    lines: list[str] = []
    profile = measure_profile(
        load_job("examples.gpt:tiny"), "cpu", (2, 1), 2, seconds=SECONDS, device_kind="laptop", progress=lines.append
    )
    assert any("2 at once" in line for line in lines)
    return profile


@pytest.mark.tier("nightly")
def test_every_layer_is_measured_at_every_size(measured: ModelProfile) -> None:
    assert [(m.device_kind, m.micro_batch_size, m.concurrency) for m in measured.measurements] == [
        ("laptop", 1, 2),
        ("laptop", 2, 2),
    ]
    for measurement in measured.measurements:
        assert all(layer.forward_ns >= 1 and layer.backward_ns >= 1 for layer in measurement.layers)
        assert all(0 <= (layer.backward_weight_ns or 0) <= layer.backward_ns for layer in measurement.layers)
        assert any(layer.workspace_bytes for layer in measurement.layers)
    assert all(layer.update_ns >= 1 for layer in measured.layers)
    assert measured.source.expected_error >= MEASURED_EXPECTED_ERROR
    assert (measured.source.method, measured.scaling) == ("measured", "measured")


def test_what_can_be_known_agrees_with_the_analytic_profile(measured: ModelProfile) -> None:
    analytic = analytic_profile(load_job("examples.gpt:tiny"), "V100", (1, 2))
    assert measured.boundaries == analytic.boundaries
    assert [layer.parameter_bytes for layer in measured.layers] == [layer.parameter_bytes for layer in analytic.layers]
    for one, other in zip(measured.measurements, analytic.measurements, strict=True):
        stashes = [(a.stash_bytes, b.stash_bytes) for a, b in zip(one.layers, other.layers, strict=True)]
        assert all(b == pytest.approx(a, rel=0.1, abs=64) for a, b in stashes)


@pytest.mark.tier("nightly")
def test_more_devices_than_layers_and_a_layer_without_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "frozenjob.py").write_text(
        "from functools import partial\nfrom torch import nn\nfrom penstock.executor.run.job import LayerSpec\n"
        "from penstock.examples.synthetic import ImageJob\n"
        "def layers():\n"
        "    return [LayerSpec('flat', nn.Flatten), LayerSpec('fc', partial(nn.Linear, 12, 2))]\n"
        "job = ImageJob('frozen', layers, batch_size=4, side=2, classes=2)\n",
        encoding="utf-8",
    )
    profile = measure_profile("frozenjob:job", "cpu", (1,), 3, directory=tmp_path, seconds=SECONDS)
    first, last = profile.measurements[0].layers
    assert (first.backward_ns, first.stash_bytes) == (0, 0)
    assert last.backward_ns >= 1
    assert profile.boundaries[0][0].gradient_bytes_per_sample == 0
    assert profile.layers[0].update_ns == 0


@pytest.mark.tier("nightly")
def test_what_goes_wrong_in_a_process_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "badjobs.py").write_text(USER_JOB, encoding="utf-8")
    with pytest.raises(RunFailed, match="exit code 7"):
        measure_profile("badjobs:ends", directory=tmp_path, seconds=SECONDS)
    with pytest.raises(ModelMismatch, match="'b'"):
        measure_profile("badjobs:wrong", directory=tmp_path, seconds=SECONDS)
    with pytest.raises(InvalidDocument) as caught:
        measure_profile(load_job("badjobs:ends"), seconds=SECONDS)
    assert "module:attribute" in (caught.value.remedy or "")


@pytest.mark.parametrize(("sizes", "concurrency"), [((), 1), ((0,), 1), ((1,), 0)])
def test_impossible_requests_are_refused(sizes: tuple[int, ...], concurrency: int) -> None:
    with pytest.raises(InvalidDocument):
        measure_profile("examples.gpt:tiny", "cpu", sizes, concurrency)


@pytest.mark.tier("nightly")
def test_links_between_processes_make_a_cluster() -> None:
    link = measure_links(2, rounds=3)
    assert link.bandwidth_bytes_per_s > 0
    assert sorted(link.one_way_ns) == list(link.one_way_ns)
    cluster = measured_cluster(link, nodes=2, devices_per_node=2, memory_bytes=2**30)
    devices = [device for node in cluster.expanded().nodes for device in node.devices]
    assert len(devices) == 4
    assert cluster.expanded().links[0].bandwidth_bytes_per_s == link.bandwidth_bytes_per_s


@pytest.mark.tier("quick")
@pytest.mark.parametrize(("bandwidth", "latency"), [(10**9, 50_000), (125 * 10**6, 0), (5 * 10**9, 2_000_000)])
def test_the_fit_finds_the_line(bandwidth: int, latency: int) -> None:
    sizes = [2**k for k in range(10, 24, 2)]
    bandwidth_and_latency = fit({size: latency + size * 10**9 // bandwidth for size in sizes})
    assert bandwidth_and_latency[0] == pytest.approx(bandwidth, rel=1e-3)
    assert bandwidth_and_latency[1] == pytest.approx(latency, abs=100)


def test_a_fit_of_noise_is_still_a_link() -> None:
    assert fit({1024: 900, 4096: 800}) == (5_120_000_000, 0)
    nearly = {1: 4_000_000, 2**20: 4_000_000, 2**25: 4_000_001}  # 1 ns for 32 MiB: a loaded machine's noise
    assert fit(nearly) == (round(2**25 / 4_000_001 * 1e9), 0)
    assert LinkMeasurement(*fit({1024: 0}), {1024: 0}).fabric().bandwidth_bytes_per_s >= 1


@pytest.mark.parametrize("processes", [0, 1, 3])
def test_links_need_pairs(processes: int) -> None:
    with pytest.raises(InvalidDocument, match="pairs"):
        measure_links(processes)
