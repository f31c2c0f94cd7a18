"""Forms of the command line that earlier versions had: each still works, with a note, until the version that drops it.

An old option is replaced in the words of a command before they are read, so no command declares one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple


class Old(NamedTuple):
    """An option that ``command`` had; ``now``: the option that replaces it, or None where it is simply left out."""

    command: str
    option: str
    now: str | None
    goes_in: str = "0.2.0"

    @property
    def note(self) -> str:
        """What to tell the user."""
        instead = "is the default now; leave it out" if self.now is None else f"is called {self.now} now"
        return (
            f"penstock: {self.option} of `penstock {self.command}` {instead}; the old form is removed in {self.goes_in}"
        )


OLD_OPTIONS = (
    Old("plan", "--exit-zero", None),
    *(Old(command, "--model", "--example") for command in ("plan", "compare", "place", "sweep", "import layout")),
    *(Old(command, "--model", "--job") for command in ("profile", "run", "rank", "tune", "export", "agent")),
    Old("agent", "--allow-any-model", "--allow-any-job"),
    Old("run", "--memory", "--measure-memory"),
    Old("rank", "--wait-s", "--start-timeout"),
    Old("rank", "--timeout-s", "--peer-timeout"),
    Old("profile", "--seconds", "--measure-for"),
    Old("probe", "--seconds", "--measure-for"),
    Old("import topology", "--device", "--device-kind"),
    Old("import topology", "--topology", "--topology-name"),
    Old("calibrate", "--topology", "--output-topology"),
)


def current(words: Sequence[str]) -> list[str]:
    """The words of a command with its old options replaced, each with a note on standard error."""
    old = {one.option: one for one in OLD_OPTIONS if one.command.split() == list(words[: len(one.command.split())])}
    found: list[str] = []
    for number, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option not in old or "--" in words[:number]:
            found.append(word)
            continue
        print(old[option].note, file=sys.stderr)
        if (now := old[option].now) is not None:
            found.append(now + equals + value)
    return found
