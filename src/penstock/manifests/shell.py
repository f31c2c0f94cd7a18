"""Shell scripts: every value from a user or a plan is quoted."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from penstock.manifests.job import BUNDLE, Job

INDENT = "  "


def comments(lines: Iterable[str]) -> list[str]:
    """Return lines as comments. They contain no line breaks: names in them were checked."""
    return [f"# {line}" for line in lines]


def preparation(job: Job) -> list[str]:
    """Return lines that set the requested environment, and the requested preparation lines unchanged."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in job.variables.items()]
    if job.settings.setup:
        # Files that they source, such as environment modules, often fail in a strict shell.
        lines += ["set +u", *job.settings.setup, "set -u"]
    return lines


def find_bundle(folder: str, advice: str) -> list[str]:
    """Return lines that set ``bundle`` to the file in ``folder``, a shell expression, and exit without it."""
    return [
        f"here={folder}",
        f"bundle=${{PENSTOCK_BUNDLE:-$here/{BUNDLE}}}",
        "if [[ ! -r $bundle ]]; then",
        f'{INDENT}echo "no $bundle: {advice}, or say where it is in PENSTOCK_BUNDLE" >&2',
        f"{INDENT}exit 66",
        "fi",
    ]


def rank_command(job: Job) -> str:
    """Return the words of ``penstock rank``, quoted, for a script that defines ``bundle`` and ``here``."""
    directory = job.settings.directory
    words = [*map(shlex.quote, job.penstock()), "rank", '"$bundle"']
    words += ["--directory", '"$here"' if directory is None else shlex.quote(directory)]
    return " ".join([*words, *map(shlex.quote, job.rank_options())])


def continued(*parts: str) -> list[str]:
    """Join one command over several lines."""
    return [f"{INDENT if number else ''}{part} \\" for number, part in enumerate(parts[:-1])] + [INDENT + parts[-1]]
