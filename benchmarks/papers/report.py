"""The shared parts of every script of ``benchmarks/papers``: its arguments, and its result as a Markdown table.

A script has a function ``sections(quick, profiles)`` that yields ``Section`` after ``Section``; ``main`` prints them as
they come. ``ok`` of a row: True or False where the paper's claim can be checked, None where it is shown only.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple


class Row(NamedTuple):
    """One figure of the paper and its value here; ``note`` gives the reason for a difference."""

    what: str
    printed: str
    got: str
    ok: bool | None = None
    note: str = ""


class Section(NamedTuple):
    """A table or figure of the paper, how it was set up here, and its rows."""

    title: str
    setup: str
    rows: list[Row]


Sections = Callable[[bool, Path | None], Iterator[Section]]


def main(paper: str, sections: Sections) -> None:
    """Run a paper's script from the command line: ``[--quick] [--profiles DIR]``."""
    parser = argparse.ArgumentParser(description=f"Reproduces what {paper} states.")
    parser.add_argument("--quick", action="store_true", help="a small sample of each section")
    parser.add_argument("--profiles", type=Path, help="folder of real profiles; the analytic ones serve by default")
    arguments = parser.parse_args()
    print(f"## {paper}\n", flush=True)
    started = time.process_time()
    checked = missed = 0
    for section in sections(arguments.quick, arguments.profiles):
        print(markdown(section), flush=True)
        checked += sum(row.ok is not None for row in section.rows)
        missed += sum(row.ok is False for row in section.rows)
    print(
        f"{checked - missed} of {checked} checks hold; {time.process_time() - started:.0f} s of CPU time.\n", flush=True
    )


def markdown(section: Section) -> str:
    """Return a section as Markdown."""
    lines = [
        f"### {section.title}",
        "",
        section.setup,
        "",
        "| what | printed | got | | note |",
        "|---|---|---|---|---|",
    ]
    words = {True: "ok", False: "differs", None: ""}
    lines += [f"| {row.what} | {row.printed} | {row.got} | {words[row.ok]} | {row.note} |" for row in section.rows]
    return "\n".join(lines) + "\n"
