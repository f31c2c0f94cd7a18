"""Words that our sentences do without, and how often each still stands in sources and pages: the numbers only shrink.

A word of the field takes the place of each (docs/glossary.md). `python .ci/words.py` fails where a word stands more
often than `.ci/words.toml` says, and where it has become rarer and the file does not say so yet; `--where WORD` lists
the places.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST = ROOT / ".ci" / "words.toml"
READ = (".py", ".md", ".html", ".js")
LEFT_OUT = ("docs/changelog.md", "tests/", ".ci/", "docs/decisions/")


def places(word: str) -> list[str]:
    """Return ``file:line`` of each place of a word, whatever its case at the first letter."""
    pattern = re.compile(rf"\b(?:{word})\b")
    found = []
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in listed.split("\0"):
        path = ROOT / name
        if name.endswith(READ) and not name.startswith(LEFT_OUT) and not path.is_symlink():
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                found += [f"{name}:{number}"] * len(pattern.findall(line))
    return found


def main(arguments: list[str]) -> int:
    """Compare each word's number with the file's."""
    if arguments[:1] == ["--where"]:
        print("\n".join(place for word in arguments[1:] for place in places(word)))
        return 0
    faults = 0
    for word, most in tomllib.loads(MOST.read_text(encoding="utf-8"))["most"].items():
        found = places(word)
        if len(found) != most:
            faults += 1
            more = (
                f"write another word (`python .ci/words.py --where '{word}'`)" if len(found) > most else "say so there"
            )
            print(f"{word!r} stands {len(found)} times, {MOST.name} says {most}: {more}")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
