"""Write the record anew, or ask everything again and compare: ``python tests/recorded/make_record.py [--check]``.

61 requests, each with one worker process and with two, then forty exchanges with a service of its own; about two
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
ANSWERS, EXCHANGES = HERE / "answers.json", HERE / "exchanges.json"
WORKERS = (1, 2)


def read(path: Path) -> dict[str, Record]:
    """A committed record."""
    found: dict[str, Record] = json.loads(path.read_text())
    return found


def write(path: Path, record: Mapping[str, Record]) -> None:
    """One line per answer, so that what changes is seen in a diff by its name."""
    lines = (f"{json.dumps(name)}: {json.dumps(each, sort_keys=True)}" for name, each in record.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def answers(names: Sequence[str]) -> dict[str, Record]:
    """The answers to requests; where two workers answer otherwise than one, that is a fault of the solvers."""
    found = {}
    for number, name in enumerate(names, 1):
        alone, together = (answer_of(name, workers) for workers in WORKERS)
        if alone != together:
            raise SystemExit(f"{name}: two workers answer otherwise than one")
        found[name] = alone
        print(f"{number}/{len(names)} {name}: {alone.get('status', 'refused')}", flush=True)
    return found


def main() -> int:
    """1 where the record and this checkout differ in what the phase does not allow."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the record; write nothing")
    given = parser.parse_args()
    new_answers = answers(NAMES)
    with tempfile.TemporaryDirectory() as directory:
        new_exchanges = exchanged(Path(directory))
    if not given.check:
        write(ANSWERS, new_answers)
        write(EXCHANGES, new_exchanges)
        return 0
    changes = Changes.read(CHANGES.read_text())
    found = faults(changes, read(ANSWERS), new_answers) + faults(changes, read(EXCHANGES), new_exchanges)
    print("\n".join([*found, f"{len(found)} differences that phase {changes.phase!r} does not allow"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
