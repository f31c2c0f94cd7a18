"""The codec fp16s: what is lost, what is not, what travels, and a run that trains as well with it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import small_jobs
import torch
from hypothesis import given
from hypothesis import strategies as st
from pipelines import Part, programs_of
from rank_pool import RankPool
from torch import Tensor
from two_groups import two_groups

from penstock.executor.transport import GlooTransport
from penstock.executor.transport.codec import CodecTransport, decode, encode, scaler_exponent
from penstock.schemas.program import CODEC_HEADER_BYTES, Program

LARGEST_FP16, SMALLEST_NORMAL = 65504.0, 2.0**-14
ROWS = ["0F0:3 2F0:3 2B0:3 0B0:3", "1F0:3 1B0:3", "1F0:3 1B0:3"]
BIGGEST = torch.finfo(torch.float32).max


@pytest.fixture
def ends() -> Iterator[tuple[GlooTransport, GlooTransport]]:
    """Two ranks' transports in this process."""
    first, second = two_groups()
    transports = GlooTransport(first), GlooTransport(second)
    yield transports
    for transport in transports:
        transport.close()


def there_and_back(tensor: Tensor) -> Tensor:
    message, is_enough = encode(tensor)
    assert is_enough
    assert message.numel() == 2 * tensor.numel() + CODEC_HEADER_BYTES
    got = torch.full_like(tensor, math.nan)
    assert decode(message, got)
    return got


@given(st.floats(min_value=2.0**-149, max_value=BIGGEST, width=32))
def test_the_scaler_is_the_smallest_that_fits(peak: float) -> None:
    """ALGORITHMS 5.5, both branches, said again with exact fractions of powers of two."""
    k = scaler_exponent(peak)
    if k > 0:
        assert math.ldexp(peak, -k) <= LARGEST_FP16 < math.ldexp(peak, 1 - k)
    elif k < 0:
        assert math.ldexp(peak, -k) <= 2**15
        assert k == -126 or math.ldexp(peak, 1 - k) > 2**15 or math.ldexp(peak, -k) > 2**14
    else:
        assert 2**14 < peak <= LARGEST_FP16


@given(st.integers(-126, 127), st.integers(0, 2**32 - 1))
def test_the_error_is_fp16s_rounding(exponent: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    tensor = torch.ldexp(torch.rand(33, generator=draw) * 2 - 1, torch.tensor(float(exponent)))
    got = there_and_back(tensor)
    scaled = torch.ldexp(tensor.double().abs(), -torch.tensor(scaler_exponent(float(tensor.abs().max()))))
    error = (got.double() - tensor.double()).abs()
    normal = scaled >= SMALLEST_NORMAL
    assert bool((error <= 2.0**-11 * tensor.double().abs())[normal].all())


@given(st.lists(st.integers(-24, 15), min_size=1, max_size=8), st.integers(-100, 100), st.booleans())
def test_powers_of_two_come_back_exactly(exponents: list[int], scale: int, negative: bool) -> None:
    """Those with |x| / s >= 2^-24; the largest fixes s."""
    highest = max(exponents)
    numbers = [math.ldexp(-1.0 if negative else 1.0, scale + e - highest) for e in exponents]
    tensor = torch.tensor(numbers)
    assert torch.equal(there_and_back(tensor), tensor)


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param([0.0, -0.0, 0.0], id="zeros"),
        pytest.param([], id="none"),
        pytest.param([LARGEST_FP16, -1.0], id="largest-of-fp16"),
        pytest.param([65536.0, 2.0], id="above-fp16"),
    ],
)
def test_borders_come_back_exactly(numbers: list[float]) -> None:
    assert torch.equal(there_and_back(torch.tensor(numbers)), torch.tensor(numbers))


def test_what_rounding_would_carry_beyond_fp32_is_not_converted() -> None:
    highest = torch.tensor([LARGEST_FP16 * 2.0**112, 1.0])
    assert there_and_back(highest)[0] == highest[0]
    message, is_enough = encode(torch.tensor([1.0, -BIGGEST]))
    assert not is_enough
    assert not decode(message, torch.zeros(2))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_falls_back_to_the_full_tensor(ends: tuple[GlooTransport, ...], bad: float) -> None:
    sender, receiver = CodecTransport(ends[0]), CodecTransport(ends[1])
    tensors = [torch.tensor([1.0, bad, 3e-39]), torch.tensor([4.0, 5.0, 6.0])]
    got = [torch.zeros(3), torch.zeros(3)]
    arrivals = [receiver.receive(got[tag], 0, tag) for tag in (1, 0)]
    for tag, tensor in enumerate(tensors):
        sender.send(tensor, 1, tag, 12)
    for arrival in arrivals:
        arrival.wait()
    assert torch.equal(got[0].view(torch.int32), tensors[0].view(torch.int32)), "bit by bit"
    assert torch.equal(got[1], tensors[1])
    assert sender.num_fallbacks == 1
    assert ends[0].bytes_sent[1] == 2 * (2 * 3 + CODEC_HEADER_BYTES) + 12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64])
def test_other_types_travel_as_they_are(ends: tuple[GlooTransport, ...], dtype: torch.dtype) -> None:
    tensor = torch.arange(7).to(dtype)
    got = torch.zeros_like(tensor)
    arrival = CodecTransport(ends[1]).receive(got, 0, 3)
    CodecTransport(ends[0]).send(tensor, 1, 3, tensor.nbytes)
    arrival.wait()
    assert torch.equal(got, tensor)
    assert ends[0].bytes_sent[1] == tensor.nbytes


def coded(programs: list[Program]) -> list[Program]:
    """Return the programs with the codec on every channel."""
    return [replace(p, channels=tuple(replace(c, codec="fp16s") for c in p.channels)) for p in programs]


@pytest.mark.tier("nightly")
def test_a_run_with_the_codec_trains_as_well(pool: RankPool) -> None:
    """WPipe, table 5: what compression costs does not exceed 0.1 %; here of the loss after 40 steps."""
    programs = programs_of(small_jobs.plain, [Part(2, (0,)), Part(2, (1, 2)), Part(2, (0,))], 3, rows=ROWS)
    plain = pool.train(programs, "plain", steps=40, check=False)
    compressed = pool.train(coded(programs), "plain", steps=40, check=False)
    before, after, other = plain[0]["losses"][0], plain[0]["losses"][-1], compressed[0]["losses"][-1]
    assert after < 0.9 * before, "it learns"
    assert other != after, "something was lost"
    assert other == pytest.approx(after, rel=1e-3)
