"""Logs of ranks on a node: bounded files, their ends, and disks that are full."""

from __future__ import annotations

import os

from penstock.executor.node.rank_log import LogFile, log_path, older, prune, tail
from penstock.executor.node.stimuli import CHECK, Process


def filled(path, lines, max_bytes=200, say=print):
    log = LogFile(path, max_bytes, say)
    for line in lines:
        log.write(line.encode())
    log.close()


def test_a_log_is_bounded_and_keeps_the_newest_lines(tmp_path):
    path = log_path(tmp_path, "run", 3, Process("rank", 2))
    assert path == tmp_path / "run" / "3" / "rank-2.log"
    filled(path, [f"line {i}" for i in range(1000)])
    assert path.stat().st_size + older(path).stat().st_size <= 200
    text = tail(path, 10_000)
    assert text is not None
    assert text.endswith("line 998\nline 999\n")
    assert text.splitlines() == [f"line {i}" for i in range(1000 - len(text.splitlines()), 1000)]


def test_the_end_of_a_log_begins_with_a_whole_line(tmp_path):
    path = log_path(tmp_path, "run", 1, CHECK)
    filled(path, ["first", "second", "third"])
    assert tail(path, 9) == "third\n"
    assert tail(path, 10_000) == "first\nsecond\nthird\n"
    assert tail(tmp_path / "nobody.log", 10) is None


def test_a_log_goes_on_where_it_was(tmp_path):
    path = log_path(tmp_path, "run", 1, CHECK)
    filled(path, ["one"])
    filled(path, ["two"])
    assert tail(path, 100) == "one\ntwo\n"


def test_a_disk_that_cannot_be_written_is_said_once_and_loses_lines_only(tmp_path):
    lines = []
    (tmp_path / "run").write_text("a file where a directory should be")
    filled(log_path(tmp_path, "run", 1, CHECK), ["one", "two"], say=lines.append)
    assert len(lines) == 1
    assert "are lost" in lines[0]


def test_a_full_disk_loses_lines_only(tmp_path):
    lines = []
    path = log_path(tmp_path, "run", 1, CHECK)
    path.parent.mkdir(parents=True)
    path.symlink_to("/dev/full")
    filled(path, ["one", "two"], say=lines.append)
    assert lines == [f"lines of {path} are lost: No space left on device"]


def test_old_runs_are_removed(tmp_path):
    for number in range(5):
        filled(log_path(tmp_path, f"run{number}", 1, CHECK), ["x"])
        os.utime(tmp_path / f"run{number}", ns=(number, number))
    prune(tmp_path, 2)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run3", "run4"]
    prune(tmp_path / "nowhere", 2)
