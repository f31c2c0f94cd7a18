"""Compare published measurements with what users of Penstock get; or score the choices of another planner.

    scripts/bench-truth --data FOLDER [--commands [--out FOLDER]] [--level kernels]
    scripts/bench-truth --data FOLDER --groups > groups.jsonl
    scripts/bench-truth --data FOLDER --choices choices.jsonl

FOLDER holds ``truth/*.csv``, ``models/*.json`` and ``trainers/megatron-legality.jsonl``; ``sources`` says which files
it reads. Files that it lacks are named and left out. They are not part of this repository.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from penstock.facts.device_table import LEVELS
from truth import legality, report, sailor, sources

OUT = Path("out/truth")


def main(arguments: list[str]) -> int:
    """Print the tables; return 1 where a row or a choice cannot be used."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench-truth", description="Compare published steps with predictions."
    )
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="the folder of measurements")
    parser.add_argument("--commands", action="store_true", help="print the public command of each row")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER", help=f"where these find their files ({OUT})")
    parser.add_argument("--groups", action="store_true", help="print the groups in which a planner can choose")
    parser.add_argument("--choices", type=Path, metavar="FILE", help="score the choices of another planner")
    parser.add_argument("--level", choices=LEVELS, help="efficiencies in the table of devices (the usual ones)")
    options = parser.parse_args(arguments)
    if options.data is None:
        print("bench-truth: without --data there is nothing to compare: the measurements are not in the repository")
        return 0
    if not (options.data / "truth").is_dir():
        parser.error(f"{options.data} has no folder truth")
    rows = sources.rows_of(options.data)
    if options.groups:
        report.print_groups(rows.rows)
        return 0
    if options.choices is not None:
        return int(report.score_choices(rows.rows, options.choices) > 0)
    missed = legality.report(options.data / "trainers" / "megatron-legality.jsonl")
    missed += sailor.report(options.data / "truth" / "sailor.csv")
    return int(missed + report.report(rows, options.out, with_commands=options.commands, level=options.level) > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
