"""The places where a run may write, by real paths. Loads no torch: the check of a model uses it too."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from penstock.schemas.errors import UnsupportedRequest


@dataclass(frozen=True, slots=True)
class Outputs:
    """The directories below which a run may write and read; None: anywhere, as for a run without an agent."""

    directories: tuple[str, ...] | None = None

    @classmethod
    def parse(cls, directories: Sequence[str] | None) -> Outputs:
        """Return the outputs of an assignment."""
        return cls(None if directories is None else tuple(directories))

    def place(self, path: str) -> str:
        """Return the path to use for ``path``: the real path, where directories are limited.

        Raises UnsupportedRequest where the real path is outside. Links that are created later do not matter, because
        they are not on the real path.
        """
        if self.directories is None:
            return path
        real = os.path.realpath(path)
        if not any(PurePath(real).is_relative_to(os.path.realpath(allowed)) for allowed in self.directories):
            allowed = ", ".join(map(repr, self.directories)) or "none"
            raise UnsupportedRequest(
                f"{path!r} leads to {real!r}, which is outside of the agent's output_directories ({allowed})",
                remedy="name a directory below one of these that no symbolic link leads out of, or add one to "
                "output_directories",
            )
        return real

    def refuse_moved(self, path: str) -> None:
        """Raise UnsupportedRequest where a path that ``place`` returned has become another one."""
        if self.directories is not None and (real := self.place(path)) != path:
            raise UnsupportedRequest(f"{path!r} has been replaced by a symbolic link to {real!r} since it was checked")
