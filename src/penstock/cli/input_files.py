"""Documents on the command line: a file, ``-`` for standard input, or the name of a shipped example."""

from __future__ import annotations

import errno
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.schemas.errors import InvalidDocument, PenstockError, WrongDocument

if TYPE_CHECKING:
    from penstock.cli.show import Screen
    from penstock.schemas.document import Document
    from penstock.schemas.plan import PlanFile
    from penstock.schemas.profile import ModelProfile
    from penstock.schemas.topology import ClusterTopology

    AnyDocument = TypeVar("AnyDocument", bound=Document)

STANDARD = "-"
TAKEN_BY = {
    "profile": "a profile goes to --profile (-p)",
    "topology": "a topology goes to --topology (-t)",
    "pipeline profile": "a measured run goes to --pipeline-profile",
    "plan request": "`penstock plan --request FILE`",
    "plan file": "`penstock verify`, `report`, `explain`, `export` and `run` take a plan file",
    "plan": "`penstock plan -o FILE` writes a plan with its request, and that is what the commands take",
    "placement request": "`penstock place --request FILE`",
    "trace": "`penstock calibrate PROFILE TRACE` or `penstock report PLAN --trace TRACE`",
    "job bundle": "`penstock rank BUNDLE`",
}
"""The part of the command line that takes each kind of document."""


def read_document(kind: type[AnyDocument], source: str) -> AnyDocument:
    """Read and validate. Raises InvalidDocument, and for a document of another kind WrongDocument with its option."""
    try:
        return _read(kind, source)
    except WrongDocument as error:
        raise WrongDocument(
            error.detail, document_kind=error.document_kind, remedy=TAKEN_BY.get(error.document_kind or "")
        ) from None


def _read(kind: type[AnyDocument], source: str) -> AnyDocument:
    if source == STANDARD:
        return kind.parse_json(sys.stdin.read(), origin="standard input")
    if Path(source).suffix not in {".json", ".yaml", ".yml"} and _looks_like_profile_text(source):
        raise InvalidDocument(
            f"{source!r} is a PipeDream profile text, not a document",
            remedy=f"penstock import profile {source} -o p.json",
        )
    try:
        return kind.read(source)
    except InvalidDocument as error:
        if Path(source).exists() or (remedy := _shipped(kind.kind, source)) is None:
            raise
        raise InvalidDocument(error.detail, remedy=remedy) from None


def _shipped(kind: str, name: str) -> str | None:
    """Return the option that takes a shipped document by name, for a name in the place of a file; otherwise None."""
    from penstock.examples import catalogue

    if kind == "profile" and name in catalogue.profile_names():
        return f"--example {name}: a profile of that name is shipped"
    if kind == "topology":
        with suppress(PenstockError):
            catalogue.cluster(name)
            return f"--cluster {name}: a cluster of that name is known"
    return None


def read_plan(source: str) -> PlanFile:
    """Read a plan file. Raises WrongDocument for a bare plan, whose request is missing."""
    from penstock.schemas.plan import PlanFile

    return read_document(PlanFile, source)


def read_raw(source: str) -> dict[str, Any]:
    """Read a JSON or YAML object as plain data, which callers complete before they validate it."""
    from penstock.schemas.bounded.yaml_text import load_yaml
    from penstock.schemas.document import in_words, load_json, read_text

    if source == STANDARD:
        text, origin = sys.stdin.read(), "standard input"
    else:
        text, origin = read_text(source), repr(source)
    data = load_yaml(text, origin) if Path(source).suffix in {".yaml", ".yml"} else load_json(text, origin)
    if not isinstance(data, dict):
        raise InvalidDocument(f"{origin} is {in_words(data)}, not an object with fields")
    return data


def write_document(document: Document, target: str | None) -> None:
    """Write a document to a file or to standard output; ``None`` writes nothing."""
    if target == STANDARD:
        print(document.text())
    elif target is not None:
        document.write(target)


def post_document(screen: Screen, document: ModelProfile | ClusterTopology, server: str) -> None:
    """Send a document to a service, and say by which hash requests may name it."""
    from penstock.client import Client
    from penstock.schemas.profile import ModelProfile

    with Client(server) as client:
        if isinstance(document, ModelProfile):
            kept = client.profiles.create(document)
        else:
            kept = client.topologies.create(document)
        screen.say(f"{server} keeps it as {kept.hash}")


def prepare_output(target: str | None) -> None:
    """Make the directory of ``target``. Raises OSError, before the work begins, where nothing can be written."""
    if target in (None, STANDARD):
        return
    path = Path(str(target))
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(target)) from None
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))


def print_json(document: Any) -> None:
    """Print a document, or plain data, as indented JSON on standard output."""
    data = document.model_dump(mode="json", exclude_none=True) if hasattr(document, "model_dump") else document
    print(json.dumps(data, indent=1, ensure_ascii=False))


def _looks_like_profile_text(source: str) -> bool:
    try:
        with Path(source).open(encoding="utf-8") as file:
            return file.readline().startswith("node")
    except (OSError, UnicodeDecodeError):
        return False
