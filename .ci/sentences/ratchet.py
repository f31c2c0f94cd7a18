"""Counts of faults per file and rule against the recorded ones, which may only fall.

A file without a record starts at zero, unless git sees that it was moved, or split off another one: then it shares the
record of its source, and the sum over all files of one source may not exceed that record. The source is looked up in
the commit that added the file, so the answer does not depend on when the record was last written, or on which branch.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path

RECORD = ".ci/sentences.json"
SIMILAR = "10%"
"""Least part of the larger file that a moved or split file shares with its source.

A piece is compared with the whole source, so a tenth still recognises a file that is split into ten.
"""

Counts = Mapping[str, Mapping[str, int]]


class Unusable(Exception):
    """A sentence that says why the check cannot run, and what to do."""


class Repository:
    """The files that git tracks below a folder, and where they came from."""

    def __init__(self, folder: Path) -> None:
        top = _git(folder, "rev-parse", "--show-toplevel")
        if top is None:
            raise Unusable(
                f"{folder} is not in a git repository: run this in a clone, which says which files are ours."
            )
        self.root = Path(top.strip())
        self.moves = cache(self._read_moves)

    def files(self) -> list[str]:
        """List the Python files and pages that git tracks and that exist; links are left out."""
        listed = self._need("ls-files", "--stage", "-z").split("\0")
        names = {line.partition("\t")[2] for line in listed if line and not line.startswith(("120000", "160000"))}
        return sorted(name for name in names if name.endswith((".py", ".md")) and (self.root / name).is_file())

    def read(self, file: str) -> str:
        """Read a file as text."""
        return (self.root / file).read_text(encoding="utf-8")

    def recorded(self) -> Counts | None:
        """Read the recorded counts; None before the first record."""
        path = self.root / RECORD
        try:
            counts: Counts = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except json.JSONDecodeError as error:
            raise Unusable(
                f"{RECORD} is no JSON ({error}): take one side of a merge (`git checkout --ours {RECORD}`), "
                "then run .ci/sentences.py --update."
            ) from None
        return counts

    def write(self, counts: Counts) -> None:
        """Write the counts, sorted, a line for each file."""
        lines = [
            f"{json.dumps(file)}: {json.dumps(dict(sorted(counts[file].items())))}"
            for file in sorted(counts)
            if counts[file]
        ]
        (self.root / RECORD).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

    def before(self, file: str) -> str:
        """Read a file as it was when the record was last committed; "" if it did not exist."""
        commit = self._need("log", "-1", "--format=%H", "--", RECORD).strip() or "HEAD"
        return _git(self.root, "show", f"{commit}:{file}") or ""

    def source(self, file: str, record: Counts) -> str:
        """Return the recorded file that an unrecorded one was moved or split from; itself if it is new."""
        first, seen = file, {file}
        while file not in record:
            file = self.moves(self._added(file)).get(file, "")
            if not file or file in seen:
                return first
            seen.add(file)
        return file

    def _added(self, file: str) -> str:
        """Return the last commit that added a file; "" if the file is in the working tree only."""
        if (self.root / file).exists() and _git(self.root, "cat-file", "-e", f"HEAD:{file}") is None:
            return ""
        return self._need("log", "-1", "--format=%H", "--no-renames", "--diff-filter=A", "--", file).strip()

    def _read_moves(self, commit: str) -> dict[str, str]:
        """Read which files a commit, or the working tree, moved or copied, each with its source."""
        if commit and _git(self.root, "rev-parse", "--verify", "--quiet", f"{commit}^") is None:
            if self._need("rev-parse", "--is-shallow-repository").strip() == "true":
                raise Unusable(
                    "This clone is shallow, and files without a record may have been moved in a commit that it lacks: "
                    "run git fetch --unshallow."
                )
            return {}
        ends = [f"{commit}^", commit] if commit else ["HEAD"]
        similar = (f"-M{SIMILAR}", f"-C{SIMILAR}", "-l0")
        fields = (_git(self.root, "diff", "--name-status", "-z", *similar, "--diff-filter=RC", *ends) or "").split("\0")
        return dict(zip(fields[2::3], fields[1::3], strict=False))

    def _need(self, *arguments: str) -> str:
        answer = _git(self.root, *arguments)
        if answer is None:
            raise Unusable(f"git {' '.join(arguments)} failed in {self.root}: run it there to see why.")
        return answer


def _git(folder: Path, *arguments: str) -> str | None:
    """Run git and return its output; None if it fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, encoding="utf-8", check=False)
    except FileNotFoundError:
        raise Unusable("git is not installed: this check reads only the files that git tracks.") from None
    return done.stdout if done.returncode == 0 else None


def rises(counts: Counts, record: Counts, repository: Repository) -> dict[tuple[str, str], int]:
    """Return the record of each file and rule whose count exceeds it, counted over all files of one source."""
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    members: dict[str, list[str]] = defaultdict(list)
    for file in counts:
        source = file if file in record or not counts[file] else repository.source(file, record)
        sums[source].update(counts[file])
        members[source].append(file)
    return {
        (file, rule): record.get(source, {}).get(rule, 0)
        for source, total in sums.items()
        for rule, number in total.items()
        if number > record.get(source, {}).get(rule, 0)
        for file in members[source]
        if counts[file].get(rule)
    }
