"""A check that an export names the model that the plan was made for, where this machine can import the model."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.schemas.errors import InvalidDocument, ModelMismatch

if TYPE_CHECKING:
    from penstock.schemas.plan import PlanFile

WAIT_S = 120
NOT_COMPARED = "note: the layers of {model} were not compared with the plan's ({why}); ranks do so when they start"


def refuse_no_reference(model: str) -> None:
    """Raise InvalidDocument for what cannot name a job, before anything is started or written."""
    module, colon, attribute = model.partition(":")
    if not (module and colon and attribute):
        raise InvalidDocument(f"{model!r} does not name a job; write module:attribute, such as examples.gpt:job")


def unlike(file: PlanFile, model: str, directory: str | None, *, elsewhere: bool = False) -> str | None:
    """Return how a model differs from the plan's, in a sentence; None where its layers are the same.

    A separate process imports the model from ``directory`` or the current one. ``elsewhere``: ranks import it from an
    image, so a local model of that name with other layers is a warning. Otherwise other layers raise ModelMismatch.
    """
    module = model.partition(":")[0]
    place = Path.cwd() if directory is None or not Path(directory).is_dir() else Path(directory)
    if not _is_here(module, place):
        return NOT_COMPARED.format(model=model, why=f"there is no module {module!r} here")
    if find_spec("torch") is None:
        return NOT_COMPARED.format(model=model, why="torch is not installed")
    assert not isinstance(file.request.profile, str)
    layers = [layer.name for layer in file.request.profile.layers]
    batch = file.request.global_batch_size
    answer = _answer(
        {"model": model, "directory": str(place), "layers": layers, "global_batch_size": batch, "paths": []}
    )
    if answer["kind"] == "ready":
        return None
    why = " ".join(answer["reason"].split())
    if answer.get("code") != ModelMismatch.code:
        return NOT_COMPARED.format(model=model, why=why)
    if elsewhere:
        return f"warning: the {module} that lies here does not fit the plan, if the image has the same: {why}"
    raise ModelMismatch(*answer["reason"].splitlines()[:1], remedy="name the plan's own model, or plan for this one")


def _is_here(module: str, place: Path) -> bool:
    """Return whether a module would be found, without importing anything."""
    first = module.partition(".")[0]
    if first == "examples":
        return True  # the import itself says what these are
    return (place / first).is_dir() or (place / f"{first}.py").is_file() or find_spec(first) is not None


def _answer(question: dict[str, object]) -> dict[str, str]:
    command = [sys.executable, "-P", "-m", "penstock.executor.node.check_model"]
    try:
        done = subprocess.run(
            command, input=json.dumps(question) + "\n", capture_output=True, text=True, timeout=WAIT_S, check=False
        )
        answer: dict[str, str] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"kind": "refused", "reason": f"its import takes more than {WAIT_S} s"}
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["it ended without an answer"])[-1]
        return {"kind": "refused", "reason": last}
    return answer
