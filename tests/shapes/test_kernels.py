"""Times of kernels: bounds by hand, and a few of SimuMax's measurements (Apache-2.0) with their stated errors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.facts.device_table import DeviceFacts, device_facts
from penstock.shapes.kernels import Kernels

H100 = device_facts("H100")
A100, B200 = device_facts("A100"), device_facts("B200")


@pytest.mark.parametrize("sizes", [(8192, 8192, 8192), (4096, 128, 8192), (1, 8192, 8192), (16, 16, 16)])
def test_a_product_is_no_faster_than_its_arithmetic_or_half_its_bytes(sizes: tuple[int, int, int]) -> None:
    rows, inner, columns = sizes
    time_ns = Kernels(H100, "bf16").product_ns(*sizes)
    moved = 2 * (rows * inner + inner * columns + rows * columns)
    assert time_ns >= 2 * rows * inner * columns / H100.flops_per_s("bf16") * 1e9
    assert time_ns >= 0.5 * moved / H100.bytes_per_s() * 1e9
    assert time_ns >= H100.launch_ns


@pytest.mark.parametrize(
    ("sizes", "efficiency"),
    [
        ((4096, 8192, 57_344), 0.4866883120666592),
        ((4096, 57_344, 8192), 0.4829140851202508),
        ((4096, 8192, 128_256), 0.4873820268159329),
        ((4096, 8192, 8192), 0.46252750766024464),
        ((4096, 14_336, 8192), 0.47625752894846374),
    ],
)
def test_measured_products_on_b200(sizes: tuple[int, int, int], efficiency: float) -> None:
    rows, inner, columns = sizes
    measured = 2 * rows * inner * columns / (efficiency * 2250e12) * 1e9
    assert Kernels(B200, "bf16").product_ns(*sizes) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("groups", "sizes", "result_bytes", "efficiency"),
    [
        (160, (154, 5120, 3072), 2, 0.19968557879607124),
        (256, (128, 7168, 4096), 2, 0.20810562331591476),
        (80, (308, 5120, 3072), 2, 0.3867596054058491),
        (32, (1024, 7168, 4096), 2, 0.45711060222498157),
        (40, (9832, 5120, 3072), 2, 0.47462817641132776),
        (160, (3072, 154, 5120), 8, 0.09365228280672189),
        (40, (3072, 2460, 5120), 8, 0.41664567239914857),
    ],
)
def test_measured_products_of_groups_on_b200(
    groups: int, sizes: tuple[int, int, int], result_bytes: int, efficiency: float
) -> None:
    """Forward, and (with results of 8 bytes, read and written) gradients of weights added up in fp32."""
    rows, inner, columns = sizes
    measured = groups * 2 * rows * inner * columns / (efficiency * 2250e12) * 1e9
    time_ns = Kernels(B200, "bf16").grouped_product_ns(groups, *sizes, result_bytes=result_bytes)
    assert time_ns == pytest.approx(measured, rel=0.25)


def test_a_group_alone_is_no_faster_than_a_product() -> None:
    kernels, sizes = Kernels(B200, "bf16"), (512, 4096, 1536)
    assert kernels.grouped_product_ns(1, *sizes) >= kernels.product_ns(*sizes)
    assert kernels.grouped_product_ns(8, *sizes) == pytest.approx(8 * kernels.grouped_product_ns(1, *sizes))


@pytest.mark.parametrize(
    ("heads", "forward", "backward"),
    [(128, 0.9966548, 0.8315752), (64, 0.8715234, 0.7294011), (16, 0.5782658, 0.7553207), (8, 0.3101809, 0.6585902)],
)
def test_measured_attention_on_b200(heads: int, forward: float, backward: float) -> None:
    """The measured share of the peak counts the whole square, of which a causal kernel does half."""
    length, width = 4096, 128
    square = 4 * length**2 * heads * width
    kernels = Kernels(B200, "bf16")
    there = kernels.attention_ns(square / 2, length * heads, backward=False)
    back = kernels.attention_ns(2.5 * square / 2, length * heads, backward=True)
    assert there == pytest.approx(square / (forward * 2250e12) * 1e9, rel=0.35)
    assert back == pytest.approx(2.5 * square / (backward * 2250e12) * 1e9, rel=0.2)


@pytest.mark.parametrize(
    ("heads", "forward", "backward"), [(128, 0.831, 0.643), (64, 0.885, 0.609), (32, 0.789, 0.610)]
)
def test_measured_latent_attention_on_b200(heads: int, forward: float, backward: float) -> None:
    """Scores of 192, values of 128: the backward kernel is slower than with equal widths."""
    length, widths = 4096, 192 + 128
    square = 2 * length**2 * heads * widths
    kernels = Kernels(B200, "bf16")
    there = kernels.attention_ns(square / 2, length * heads, backward=False, latent=True)
    back = kernels.attention_ns(2.5 * square / 2, length * heads, backward=True, latent=True)
    assert there == pytest.approx(square / (forward * 2250e12) * 1e9, rel=0.2)
    assert back == pytest.approx(2.5 * square / (backward * 2250e12) * 1e9, rel=0.1)
    assert back > kernels.attention_ns(2.5 * square / 2, length * heads, backward=True)


@pytest.mark.parametrize(
    ("heads", "forward", "backward"),
    [(64, 1.187005822, 1.0050629), (32, 1.1319724660210262, 0.9763861), (8, 0.7767795642853454, 0.7628476680681723)],
)
def test_measured_attention_on_a100(heads: int, forward: float, backward: float) -> None:
    """Over products of 0.76 of the peak, which single kernels reach; the table has what training shows."""
    length, width = 4096, 128
    square = 4 * length**2 * heads * width
    facts = replace(A100, compute_efficiency=dict.fromkeys(A100.compute_efficiency, 0.76))
    kernels = Kernels(facts, "bf16")
    there = kernels.attention_ns(square / 2, length * heads, backward=False)
    back = kernels.attention_ns(2.5 * square / 2, length * heads, backward=True)
    assert there == pytest.approx(square / (forward * 312e12) * 1e9, rel=0.1)
    assert back == pytest.approx(2.5 * square / (backward * 312e12) * 1e9, rel=0.1)


@pytest.mark.parametrize(
    ("sizes", "rate"),
    [((4096, 4096, 4096), 783_328_793_548_203), ((2048, 2048, 2048), 631_984_593_290_170)],
)
def test_products_on_h100_that_no_number_was_fitted_to(sizes: tuple[int, int, int], rate: int) -> None:
    """openxla/xla, ``matmul_interpolator_data.h`` (Apache-2.0); products there reach 0.757 of the peak."""
    rows, inner, columns = sizes
    facts = replace(H100, compute_efficiency=dict.fromkeys(H100.compute_efficiency, 0.757))
    measured = 2 * rows * inner * columns / rate * 1e9
    assert Kernels(facts, "bf16").product_ns(*sizes) == pytest.approx(measured, rel=0.2)


def test_attention_gains_from_rows_until_the_device_is_full() -> None:
    kernels = Kernels(H100, "bf16")
    rates = [flops / kernels.attention_ns(flops, rows, backward=False) for rows, flops in _of_rows()]
    assert rates == sorted(rates)
    assert rates[-1] < H100.flops_per_s("bf16") / 1e9


def _of_rows() -> list[tuple[int, float]]:
    return [(rows, rows * 1e7) for rows in (1024, 16_384, 10**6)]


def test_moving_nothing_takes_no_time_and_something_a_launch() -> None:
    kernels = Kernels(H100, "bf16")
    assert kernels.moved_ns(0) == 0
    assert kernels.moved_ns(1) == H100.launch_ns
    assert kernels.moved_ns(10**9) == pytest.approx(1e18 / H100.bytes_per_s())


def test_single_precision_is_four_bytes_and_slower() -> None:
    facts: DeviceFacts = H100
    narrow, wide = (Kernels(facts, dtype).product_ns(4096, 4096, 4096) for dtype in ("bf16", "fp32"))
    assert wide > 2 * narrow


@pytest.mark.parametrize(
    ("sizes", "measured_ns"),
    [
        ((4096, 4096, 4096), 175_360),
        ((4096, 8192, 8192), 701_696),
        ((4096, 4096, 14_336), 635_520),
        ((4096, 3584, 8192), 307_168),
        ((8192, 4096, 2048), 193_600),
    ],
)
def test_measured_products_on_h100_are_those_of_the_level_of_kernels(
    sizes: tuple[int, int, int], measured_ns: int
) -> None:
    assert Kernels(device_facts("H100", "kernels"), "bf16").product_ns(*sizes) == pytest.approx(measured_ns, rel=0.12)
    assert Kernels(H100, "bf16").product_ns(*sizes) > 1.4 * measured_ns


@pytest.mark.parametrize(
    ("heads", "forward_ns", "backward_ns"), [(8, 91_552, 284_448), (16, 145_184, 456_896), (64, 461_312, 1_498_496)]
)
def test_measured_attention_on_h100(heads: int, forward_ns: int, backward_ns: int) -> None:
    length, width = 4096, 128
    flops = 2 * length**2 * heads * width
    kernels = Kernels(device_facts("H100", "kernels"), "bf16")
    assert kernels.attention_ns(flops, length * heads, backward=False) == pytest.approx(forward_ns, rel=0.12)
    assert kernels.attention_ns(2.5 * flops, length * heads, backward=True) == pytest.approx(backward_ns, rel=0.12)


def test_h200_is_as_quick_as_h100_but_where_memory_is_what_binds() -> None:
    one, other = (Kernels(device_facts(kind, "kernels"), "bf16") for kind in ("H100", "H200"))
    flops = 10**12
    assert other.attention_ns(flops, 10**6, backward=False) == one.attention_ns(flops, 10**6, backward=False)
    assert other.moved_ns(10**9) == pytest.approx(one.moved_ns(10**9) * 3350 / 4800)
