"""Command that writes the record again, or repeats everything and compares.

Usage: ``python tests/recorded/make_record.py [--check]``.

61 requests, each with one worker process and with two, then forty exchanges with a separate service; about two
minutes. With ``--check`` nothing is written, and the exit code is 1 where something differs that the phase in
``CHANGES.md`` does not allow.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from answer_record import Record, answer_of
from exchange_record import exchanged
from record_comparison import CHANGES, Changes, faults
from request_list import NAMES

HERE = Path(__file__).parent
ANSWERS, EXCHANGES = HERE / "answers", HERE / "exchanges"
WORKERS = (1, 2)


def read(directory: Path) -> dict[str, Record]:
    """Return a committed record by name: one file per request or exchange."""
    records: dict[str, Record] = {}
    for path in sorted(directory.glob("*.json")):
        record = json.loads(path.read_text())
        records[record["name"]] = record["answer"]
    return records


def write(directory: Path, record: Mapping[str, Record]) -> None:
    """Write a file per answer, indented, so that a diff names the request and shows the lines that change."""
    directory.mkdir(exist_ok=True)
    for old in directory.glob("*.json"):
        old.unlink()
    for name, answer in record.items():
        text = json.dumps({"name": name, "answer": answer}, indent=1, sort_keys=True, ensure_ascii=False)
        (directory / f"{name.replace(' ', '-')}.json").write_text(text + "\n")


def answers(names: Sequence[str]) -> dict[str, Record]:
    """Return the answers to requests; an answer of two workers that differs from one worker's is a fault of the
    solvers.
    """
    answer_of_name = {}
    for number, name in enumerate(names, 1):
        alone, together = (answer_of(name, workers) for workers in WORKERS)
        if alone != together:
            raise SystemExit(f"{name}: two workers answer otherwise than one")
        answer_of_name[name] = alone
        print(f"{number}/{len(names)} {name}: {alone.get('status', 'refused')}", flush=True)
    return answer_of_name


def main() -> int:
    """Print the differences; return 1 where the record and this checkout differ more than the phase allows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the record; write nothing")
    options = parser.parse_args()
    new_answers = answers(NAMES)
    with tempfile.TemporaryDirectory() as directory:
        new_exchanges = exchanged(Path(directory))
    if not options.check:
        write(ANSWERS, new_answers)
        write(EXCHANGES, new_exchanges)
        return 0
    changes = Changes.read(CHANGES.read_text())
    differences = faults(changes, read(ANSWERS), new_answers) + faults(changes, read(EXCHANGES), new_exchanges)
    print("\n".join([*differences, f"{len(differences)} differences that phase {changes.phase!r} does not allow"]))
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
