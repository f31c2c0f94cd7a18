"""Exports of plans as files. A form is a line in ``FORMS``; forms that start ranks are in ``penstock.manifests``."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import NamedTuple

from penstock.manifests import TARGETS, make, refuse_settings
from penstock.schemas.plan import PlanFile
from penstock.schemas.ranks.launch import LaunchSettings


class Noted(NamedTuple):
    """A file's bytes, and sentences on the parts of the plan that the form cannot express."""

    body: bytes
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Form:
    """A form into which a plan can be converted."""

    media_type: str
    ending: str
    help: str
    """A line on the file and its readers."""
    make: Callable[[PlanFile], bytes | Noted]
    """The function that writes the file.

    Raises InvalidPlan for a plan that it cannot be made from, UnsupportedRequest for a plan that the form has no words
    for.
    """
    of_release: Callable[[str], Form] | None = None
    """The form for a release of its trainer; raises UnsupportedRequest for an unknown release."""

    @property
    def takes(self) -> frozenset[str]:
        """The names of the settings that have an effect."""
        return frozenset() if self.of_release is None else frozenset({"release"})


def _plan(file: PlanFile) -> bytes:
    return file.canonical_json()


def _program(file: PlanFile) -> bytes:
    from penstock.planning.programs.lowered import lower

    return json.dumps([program for program, *_ in lower(file).programs], separators=(",", ":")).encode()


def _chrome_trace(file: PlanFile) -> bytes:
    from penstock.planning.explain import judged
    from penstock.report.chrome_trace import chrome_events
    from penstock.report.drawing.picture import picture_of_timeline

    judgement = judged(file).judgement
    assert judgement.timeline is not None
    picture = picture_of_timeline(judgement.problem, judgement.timeline, judgement.allocation)
    document = {"displayTimeUnit": "ms", "traceEvents": list(chrome_events(picture))}
    return json.dumps(document, separators=(",", ":")).encode()


def _csv(file: PlanFile) -> Noted:
    from penstock.planning.plan_schedules import schedule_csv

    schedule = schedule_csv(file)
    return Noted(schedule.text.encode(), schedule.remarks)


def _svg(file: PlanFile) -> bytes:
    from penstock.report.plan_files import svg

    return svg(file).encode()


def _report(file: PlanFile) -> bytes:
    from penstock.report.plan_files import page

    return page(file).encode()


def _layout(to: str) -> Callable[[PlanFile], bytes]:
    def make_layout(file: PlanFile) -> bytes:
        from penstock.exporting.layouts import layout_text

        return layout_text(file, to).encode()

    return make_layout


def _torchtitan(release: str) -> Form:
    from penstock.exporting.layouts import layout_text
    from penstock.layouts.torchtitan.torchtitan import release_of

    known_release = release_of(release)
    kind = ("application/toml", "toml") if known_release == "0.2" else ("text/x-python", "py")
    return Form(
        kind[0], f"torchtitan.{kind[1]}", "", lambda file: layout_text(file, "torchtitan", known_release).encode()
    )


FORMS: dict[str, Form] = {
    "plan": Form("application/json", "json", "the plan with its request inline, for verify, run and explain", _plan),
    "program": Form("application/json", "programs.json", "the programs of all ranks", _program),
    "chrome-trace": Form(
        "application/json", "trace.json", "the predicted timeline, for Perfetto and chrome://tracing", _chrome_trace
    ),
    "csv": Form("text/csv", "csv", "the order of the schedule, for PyTorch's pipeline runtime and torchtitan", _csv),
    "svg": Form("image/svg+xml", "svg", "the predicted timeline as a picture", _svg),
    "report": Form(
        "text/html", "html", "a page with timeline, memory, stages and bounds that needs no network", _report
    ),
    "megatron": Form("text/x-shellscript", "megatron.sh", "Megatron-Core's flags of a layout", _layout("megatron")),
    "megatron-bridge": Form(
        "text/x-python",
        "megatron_bridge.py",
        "a function that gives the layout to a recipe of Megatron-Bridge",
        _layout("megatron-bridge"),
    ),
    "torchtitan": Form(
        "text/x-python",
        "torchtitan.py",
        "torchtitan's pipeline settings, of release 0.3 or, as TOML, 0.2",
        _layout("torchtitan"),
        _torchtitan,
    ),
    "deepspeed": Form(
        "text/x-python", "deepspeed.py", "a DeepSpeed PipelineModule of these parts", _layout("deepspeed")
    ),
    "ranges": Form(
        "application/json", "ranges.json", "layers and devices of each stage, in plain JSON", _layout("ranges")
    ),
}

EXPORTS: dict[str, str] = {name: form.help for name, form in FORMS.items()} | {
    name: target.help for name, target in TARGETS.items()
}
"""All exports of a plan, each with a line on it."""

MEDIA_TYPES = {
    ".json": "application/json",
    ".yaml": "application/yaml",
    ".py": "text/x-python",
    ".sh": "text/x-shellscript",
    ".sbatch": "text/x-shellscript",
    "": "text/plain",
    ".service": "text/plain",
}
"""Media types of the files of manifests, by their endings."""


@dataclass(frozen=True)
class Written:
    """A file into which a plan was converted."""

    name: str
    media_type: str
    body: bytes
    is_executable: bool = False
    notes: tuple[str, ...] = ()
    """Sentences on parts of the plan that the file has no place for."""


def written(file: PlanFile, to: str, settings: LaunchSettings | None = None) -> tuple[Written, ...]:
    """Return a plan in another form: one file, or several that belong into one folder.

    Raises what ``Form.make`` and ``manifests.make`` raise, and InvalidDocument for settings without effect.
    """
    settings = settings or LaunchSettings()
    if to in TARGETS:
        return tuple(
            Written(each.name, MEDIA_TYPES[PurePath(each.name).suffix], each.text.encode(), each.is_executable)
            for each in make(file, to, settings)
        )
    refuse_settings(to, settings, FORMS[to].takes)
    form = _form(to, settings)
    content = form.make(file)
    body, notes = content if isinstance(content, Noted) else Noted(content, ())
    return (Written(f"{_stem(file)}.{form.ending}", form.media_type, body, notes=notes),)


def _form(to: str, settings: LaunchSettings) -> Form:
    form = FORMS[to]
    return form if settings.release is None or form.of_release is None else form.of_release(settings.release)


def one_file(file: PlanFile, to: str, files: Sequence[Written]) -> Written:
    """Return the only file, or several as one zip archive whose bytes depend only on theirs."""
    if len(files) == 1:
        return files[0]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for each in files:
            entry = zipfile.ZipInfo(each.name)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if each.is_executable else 0o100644) << 16
            archive.writestr(entry, each.body)
    return Written(f"{_stem(file)}.{to}.zip", "application/zip", buffer.getvalue())


def unpacked(to: str, body: bytes, settings: LaunchSettings | None = None) -> tuple[Written, ...]:
    """Return the files from which ``one_file`` made this body; ``settings`` are those given to ``written``."""
    if not (to in TARGETS and zipfile.is_zipfile(io.BytesIO(body))):
        name = TARGETS[to].only if to in TARGETS else f"plan.{_form(to, settings or LaunchSettings()).ending}"
        return (Written(name, MEDIA_TYPES.get(PurePath(name).suffix, "application/octet-stream"), body),)
    with zipfile.ZipFile(io.BytesIO(body)) as archive:
        return tuple(
            Written(
                entry.filename,
                MEDIA_TYPES[PurePath(entry.filename).suffix],
                archive.read(entry),
                bool(entry.external_attr >> 16 & 0o100),
            )
            for entry in archive.infolist()
        )


def _stem(file: PlanFile) -> str:
    return f"plan-{file.plan.content_hash().removeprefix('sha256:')[:12]}"
