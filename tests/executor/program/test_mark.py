"""The position of a rank that was killed."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys

import pytest

from penstock.executor.program.mark import marked_instruction, write_mark
from penstock.schemas.program import Instruction, Program

pytestmark = pytest.mark.tier("quick")

PROGRAM = Program(
    rank=0,
    world_size=1,
    device="a/0",
    global_batch_size=4,
    num_micro_batches=1,
    row_classes=((4, 1),),
    stages=(),
    channels=(),
    prologue=(Instruction("F", 0, 0),),
    body=(Instruction("F", 0, 1), Instruction("B", 0, 0)),
    repeat=3,
    epilogue=(Instruction("B", 0, 3),),
    update_rule="synchronous",
    batches=4,
    body_batches=1,
)

KILLED = """
import mmap, os, signal, sys
with open(sys.argv[1], "r+b") as file:
    mark = memoryview(mmap.mmap(file.fileno(), 16)).cast("q")
mark[0], mark[1] = int(sys.argv[2]), int(sys.argv[3])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_there_is_no_instruction_before_the_first_step(tmp_path):
    write_mark(tmp_path / "mark")
    assert marked_instruction(tmp_path / "mark", [PROGRAM.to_json()]) is None


@pytest.mark.tier("ci")
@pytest.mark.parametrize(
    ("index", "words"),
    [
        (0, "step 7, instruction 0 (0F0)"),
        (4, "step 7, instruction 4 (0B1)"),
        (7, "step 7, instruction 7 (0B3)"),
        (99, None),
    ],
)
def test_the_mark_of_a_killed_process_is_read(tmp_path, index, words):
    write_mark(tmp_path / "mark")
    command = [sys.executable, "-c", KILLED, str(tmp_path / "mark"), str(index), "7"]
    assert subprocess.run(command, check=False).returncode == -9
    assert marked_instruction(tmp_path / "mark", [PROGRAM.to_json()]) == words


def test_a_program_that_does_not_parse_has_no_instruction(tmp_path):
    write_mark(tmp_path / "mark")
    with (tmp_path / "mark").open("r+b") as file, mmap.mmap(file.fileno(), 16) as mark:
        mark[8:] = bytes(8)
    assert os.path.getsize(tmp_path / "mark") == 16
    assert marked_instruction(tmp_path / "mark", [{"do": []}]) is None
