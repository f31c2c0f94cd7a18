"""The command: check, ``--update`` and ``--where``.

Only a count that rises fails. One that fell is mentioned and waits for ``--update``, so that branches which shorten
different files merge without touching the record. ``--update`` writes counts that are equal or smaller, never larger.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from sentences.dotted import Modules
from sentences.ratchet import RECORD, Repository, Unusable, rises
from sentences.rules import REMEDIES, Fault, faults

USAGE = f"""usage: .ci/sentences.py                   fail where a file has more faults than {RECORD} records
       .ci/sentences.py --update          record the counts that fell
       .ci/sentences.py --where NAME ...  list the faults of a file, a folder or a rule ({", ".join(REMEDIES)})"""


def main(arguments: list[str]) -> int:
    """Run the command in the repository of the working directory and return its exit code."""
    try:
        if arguments[:1] == ["--where"] and arguments[1:]:
            return _where(Repository(Path.cwd()), arguments[1:])
        if arguments in ([], ["--update"]):
            return _check(Repository(Path.cwd()), update=bool(arguments))
    except Unusable as error:
        print(error, file=sys.stderr)
        return 2
    print(USAGE, file=sys.stderr)
    return 2


def find(repository: Repository) -> dict[str, list[Fault]]:
    """Find the faults of every tracked file."""
    files = repository.files()
    modules = Modules(files, repository.read)
    places = {}
    for file in files:
        try:
            places[file] = list(faults(file, repository.read(file), modules))
        except (SyntaxError, UnicodeDecodeError) as error:
            raise Unusable(f"{file} cannot be read: {error}.") from None
    return places


def _where(repository: Repository, names: list[str]) -> int:
    for file, places in find(repository).items():
        for place in places:
            if any(name in (place.rule, file) or file.startswith(f"{name.rstrip('/')}/") for name in names):
                print(place)
    return 0


def _check(repository: Repository, *, update: bool) -> int:
    places = find(repository)
    counts = {file: Counter(place.rule for place in each) for file, each in places.items()}
    record = repository.recorded()
    if record is None and not update:
        raise Unusable(f"{RECORD} is missing: run .ci/sentences.py --update.")
    risen = {} if record is None else rises(counts, record, repository)
    for (file, rule), most in sorted(risen.items()):
        print(f"{file}: {counts[file][rule]} × {rule}, at most {most}: {REMEDIES[rule]}")
        print("\n".join(f"  {place}" for place in _newest(repository, places[file], file, rule)))
    if risen:
        print(f"{RECORD} is not written: counts only fall." if update else "Write these sentences in plain words.")
        return 1
    recorded = sum(sum(each.values()) for each in (record or {}).values())
    total = sum(each.total() for each in counts.values())
    if update:
        repository.write(counts)
        print(f"{RECORD}: {total} faults")
    elif total < recorded:
        print(f"{recorded - total} faults fewer than recorded: .ci/sentences.py --update records that.")
    return 0


def _newest(repository: Repository, places: list[Fault], file: str, rule: str) -> list[Fault]:
    """Return the faults that the file did not have when the record was written; all of them if that is unclear."""
    broken = [place for place in places if place.rule == rule]
    try:
        before = Counter(each.text for each in faults(file, repository.before(file), Modules((), repository.read)))
    except SyntaxError:
        return broken
    newest = []
    for place in broken:
        before[place.text] -= 1
        if before[place.text] < 0:
            newest.append(place)
    return newest or broken
