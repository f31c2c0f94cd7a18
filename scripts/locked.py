"""Lock files of ``lock/``: a check against ``pyproject.toml``, and the further packages to lock.

``python scripts/locked.py check [VERSION]`` prints what does not fit and exits with 1; ``needs`` prints requirements
that ``pyproject.toml`` does not name, for the build and for the CPU build of torch.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import requires
from pathlib import Path

try:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name
except ImportError:  # scripts/setup asks before anything is installed
    from pip._vendor.packaging.requirements import Requirement  # type: ignore[assignment]
    from pip._vendor.packaging.utils import canonicalize_name  # type: ignore[assignment]

ROOT = Path(__file__).resolve().parents[1]
PIN = re.compile(r"^([\w.-]+)==(\S+)", re.MULTILINE)
ACCELERATORS = re.compile(r"nvidia|cuda|triton")
"""Packages that only torch's builds for GPUs need."""


def main(arguments: list[str]) -> int:
    """Run the command that the first argument names; return the exit code."""
    match arguments:
        case ["needs"]:
            print("\n".join(needs()))
            return 0
        case ["check", *versions]:
            files = sorted((ROOT / "lock").glob("3.*.txt"))
            faults = list(misfits(files, versions))
            print("\n".join(faults), end="\n" if faults else "")
            return int(bool(faults))
    print("usage: locked.py needs | check [VERSION]", file=sys.stderr)
    return 64


def needs() -> Iterator[str]:
    """Yield the requirements of an editable build without isolation and of torch's CPU build."""
    yield from ("hatchling>=1.27", "editables>=0.5", "setuptools>=77")
    for text in requires("torch") or ():
        if "extra ==" not in text and not ACCELERATORS.search(text):
            yield text


def misfits(files: Iterable[Path], versions: list[str]) -> Iterator[str]:
    """Yield a sentence for each requirement of ``pyproject.toml`` that a lock file does not meet.

    ``versions`` limits the check to the lock files of these Pythons; a version without a file is a fault.
    """
    files = [each for each in files if "-" not in each.stem and (not versions or each.stem in versions)]
    for version in versions:
        if not any(each.stem == version for each in files):
            yield f"lock/{version}.txt is missing: Python {version} is not locked; use Python 3.11 to 3.13"
    wanted = list(requirements(ROOT / "pyproject.toml"))
    for file in files:
        pins = {canonicalize_name(name): pin for name, pin in PIN.findall(file.read_text(encoding="utf-8"))}
        for requirement in wanted:
            pin = pins.get(canonicalize_name(requirement.name))
            if pin is None:
                yield f"{file.name} does not fit pyproject.toml: {requirement} is not locked; run scripts/lock"
            elif not requirement.specifier.contains(pin, prereleases=True):
                yield (
                    f"{file.name} does not fit pyproject.toml: {requirement.name}=={pin} is locked, "
                    f"{requirement} is required; run scripts/lock"
                )


def requirements(project: Path) -> Iterator[Requirement]:
    """Yield the requirements of ``pyproject.toml`` with all extras, without torch, which lock/torch.txt pins."""
    about = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    for group in (about["dependencies"], *about.get("optional-dependencies", {}).values()):
        yield from (each for each in map(Requirement, group) if each.name != "torch")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
