"""Amounts of memory in messages: three digits and a unit, and the exact figure where somebody has to make it up."""

from __future__ import annotations

import pytest

from penstock.schemas.amounts import amount, doubtful_memory, exact, shortage


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (828_170_244, "790 MiB"),
        (80 * 2**30, "80.0 GiB"),
        (3 * 2**40, "3.00 TiB"),
        (-(2**31), "-2.00 GiB"),
    ],
)
def test_amounts_have_three_digits_and_a_unit(count: int, words: str) -> None:
    assert amount(count) == words


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (1, "1 byte"),
        (100, "100 bytes"),
        (1024, "1.00 KiB (1,024 bytes)"),
        (513_597_444, "490 MiB (513,597,444 bytes)"),
    ],
)
def test_exact_amounts_keep_every_byte(count: int, words: str) -> None:
    assert exact(count) == words


def test_a_shortage_is_readable_and_exact_where_both_amounts_look_alike() -> None:
    sentence = shortage(16 * 2**30 + 123, 16 * 2**30, "device 'node0/0'")
    assert sentence == "16.0 GiB on device 'node0/0', which has 16.0 GiB: 123 bytes are missing"
    assert shortage(828_170_244, 314_572_800, "n") == (
        "790 MiB on n, which has 300 MiB: 490 MiB (513,597,444 bytes) are missing"
    )


@pytest.mark.parametrize(
    ("memory_bytes", "words"),
    [
        (80, "did you mean 80 GiB (85899345920 on the wire"),
        (512, "did you mean 512 GiB"),
        (1000, "did you mean 1000 MiB"),
        (81_559, "memory_bytes is 81,559 bytes; did you mean 81559 MiB (85520809984 on the wire"),
        (2**20 - 1, "MiB"),
    ],
)
def test_memory_that_no_device_has_is_asked_about(memory_bytes: int, words: str) -> None:
    assert words in doubtful_memory(memory_bytes)


def test_memory_that_a_device_may_have_is_not_asked_about() -> None:
    assert doubtful_memory(2**20) == ""
