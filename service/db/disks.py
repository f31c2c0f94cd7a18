"""File system of a SQLite file: its locks and shared memory need a file system that a single host mounts."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.schemas.errors import UnsupportedRequest

MOUNTS = Path("/proc/self/mountinfo")

SHARED = frozenset(
    ("nfs", "nfs4", "lustre", "cifs", "smb3", "smbfs", "ceph", "gpfs", "beegfs", "glusterfs", "pvfs2", "afs", "gfs2")
)
"""File systems that several hosts write at once."""


def refuse_shared_disk(file: Path, mounts: str | None = None) -> None:
    """Raise UnsupportedRequest for a file on a file system that several hosts share; ``mounts`` is Linux's list."""
    if mounts is None:
        mounts = MOUNTS.read_text(errors="replace") if MOUNTS.exists() else ""
    kind, where = _mount_of(file.absolute().parent.resolve(), mounts)
    if kind.removeprefix("fuse.") in SHARED:
        raise UnsupportedRequest(
            f"the SQLite file {str(file)!r} is on {kind}, mounted at {where}, where several hosts can damage it",
            remedy="name a file on a disk of this host; for several hosts, postgresql://user@host/name",
        )


def _mount_of(directory: Path, mounts: str) -> tuple[str, str]:
    """Return the type and mount point of the file system of a directory; a later mount hides earlier ones."""
    mount = ("", "")
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split(" ")
        if len(fields) < 5 or not right:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4])
        if directory.is_relative_to(point) and len(point) >= len(mount[1]):
            mount = (right.split(" ")[0], point)
    return mount
