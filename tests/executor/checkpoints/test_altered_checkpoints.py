"""A checkpoint of several ranks in which bits or blocks have changed: each change is noticed, an older one is taken."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from rank_pool import RankPool
from real_checkpoint import run

from penstock.executor.checkpoints.checkpoint import survey

BLOCK = 512
"""Bytes that a disk loses at a time."""


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("saved")
    assert [one["kind"] for one in run(pool, place, 2)] == ["done", "done"]
    return place


def harmed(data: bytes, number: int) -> bytes:
    """Return the bytes with one bit flipped (even numbers), or a block of zeros (odd ones)."""
    chance, changed = random.Random(number), bytearray(data)
    if number % 2 == 0:
        changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        return bytes(changed)
    blocks = [at for at in range(0, len(data), BLOCK) if any(data[at : at + BLOCK])]
    at = chance.choice(blocks)
    changed[at : at + BLOCK] = bytes(len(changed[at : at + BLOCK]))
    return bytes(changed)


@pytest.mark.cases(3)
@pytest.mark.parametrize("number", range(24))
def test_each_change_is_noticed(saved: Path, number: int) -> None:
    files = sorted((saved / "step-2").iterdir())
    assert len(files) == 5, "numbers of two ranks, torch's names, ours, and the marker"
    file = files[number // 2 % len(files)]
    data = file.read_bytes()
    try:
        file.write_bytes(harmed(data, number))
        result = survey(saved)
    finally:
        file.write_bytes(data)
    assert result.newest is not None
    assert result.newest.directory == saved / "step-1"
    (sentence,) = result.damaged
    assert f"{str(saved / 'step-2')!r}" in sentence
    assert repr(file.name) in sentence
    assert survey(saved).newest.about.step == 2  # type: ignore[union-attr]


def test_a_run_goes_on_from_the_one_before(pool: RankPool, saved: Path) -> None:
    whole = run(pool, saved.parent / "whole", 3)[0]["losses"]
    file = saved / "step-2" / "__1_0.distcp"
    file.write_bytes(harmed(file.read_bytes(), 0))
    results = run(pool, saved, 3, resume=True)
    (warned,) = [event["text"] for one in results for event in one["events"] if event["kind"] == "warning"]
    assert "step-2' is damaged: its SHA-256 says that '__1_0.distcp' changed" in warned
    assert results[0]["first_step"] == 1
    assert results[0]["losses"] == whole[1:]
