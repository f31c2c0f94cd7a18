"""``penstock export PLAN --to FORM``: a plan as what other tools, and schedulers, read."""

from __future__ import annotations

import shlex
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from typer.core import TyperGroup

from penstock.cli.assignments import assignment
from penstock.cli.groups import grouped
from penstock.cli.input_files import STANDARD, prepare_output, read_plan, read_raw
from penstock.cli.options import LAUNCH, OUTPUT
from penstock.cli.service.remote import Server, connect, refuse_file
from penstock.schemas.errors import meant

if TYPE_CHECKING:
    from penstock.exporting.forms import Written
    from penstock.schemas.plan import PlanFile
    from penstock.schemas.ranks.launch import LaunchSettings

DEFAULT = "plan"
OTHER_FORMS = {
    "slurm": "sbatch",
    "kubernetes": "jobset",
    "k8s": "jobset",
    "kubeflow": "trainjob",
    "chrome": "chrome-trace",
    "perfetto": "chrome-trace",
    "html": "report",
    "json": "plan",
    "yaml": "jobset",
}
"""Other names under which users may look for a form, with the form that each name means."""
HELP_OPTIONS = ("-h", "--help")


class ExportGroup(TyperGroup):
    """A group whose first word may be a plan instead of a command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default command before a plan, or before options."""
        if args and args[0] not in self.commands and args[0] not in HELP_OPTIONS:
            _refuse_form_first(args)
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, and below it all forms."""
        super().format_help(ctx, formatter)
        print(forms_text())


def _refuse_form_first(args: list[str]) -> None:
    """Raise typer.BadParameter for a form in the plan's place, with the line that was meant."""
    if args[0].startswith("-") or "--to" in args or Path(args[0]).exists():
        return
    from penstock.exporting.forms import EXPORTS

    if args[0] in EXPORTS:
        line = shlex.join([*(args[1:] or ["PLAN"]), "--to", args[0]])
        raise typer.BadParameter(f"{args[0]} is an export format; the plan comes first: `penstock export {line}`")


group = typer.Typer(
    cls=ExportGroup,
    help="Convert a plan into what other tools and schedulers read: penstock export PLAN --to FORM.",
    no_args_is_help=True,
)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Launch settings that every scheduler takes."""

    PANEL: ClassVar[str] = LAUNCH

    job: Annotated[
        str | None,
        typer.Option(metavar="MODULE:ATTRIBUTE", help="Training job that ranks import, such as mytrain:job."),
    ] = None
    steps: Annotated[int | None, typer.Option(help="Step at which training ends, such as 1000.")] = None
    directory: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Directory of the training project on the nodes, such as /srv/training."),
    ] = None
    image: Annotated[
        str | None, typer.Option(help="Container image with Penstock and the job, such as registry/train:1.")
    ] = None
    name: Annotated[
        str | None, typer.Option(help="Name of the job, made legal for its target (default: the model's).")
    ] = None
    nodes: Annotated[
        str | None,
        typer.Option(metavar="named|any", help="Whether the job needs the plan's own nodes or any like them."),
    ] = None
    checkpoint: Annotated[
        str | None, typer.Option(metavar="DIR", help="Directory for checkpoints, from which the job also resumes.")
    ] = None
    checkpoint_every: Annotated[
        int | None, typer.Option("--checkpoint-every", help="Steps between checkpoints, such as 500.")
    ] = None
    evaluate_every: Annotated[
        int | None, typer.Option("--evaluate-every", help="Steps between evaluations, such as 1000.")
    ] = None
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME=VALUE", help="Environment variable of the ranks. Repeatable."),
    ] = None


@group.command(DEFAULT)
@grouped
def export(
    *,
    plan: Annotated[
        str,
        typer.Argument(
            metavar="PLAN", help="Plan file, or - for standard input; with --server the hash or the job of a plan."
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORM",
            help="Form to write, such as sbatch or torchrun; `penstock export --help` lists them all.",
            rich_help_panel=OUTPUT,
        ),
    ],
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE|DIR",
            help="File to write, or the directory of a form with several files; - is standard output.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    launch: Launch,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Other launch setting, such as partition=gpu (docs/launching.md lists them). Repeatable.",
            rich_help_panel=LAUNCH,
        ),
    ] = None,
    settings_file: Annotated[
        str | None,
        typer.Option(
            "--settings",
            metavar="FILE",
            help="Launch settings as a JSON or YAML file; options override them.",
            rich_help_panel=LAUNCH,
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Topology, or scontrol or kubectl output, to check nodes; for a trainer, your script to compare.",
            rich_help_panel=LAUNCH,
        ),
    ] = None,
    server: Server = None,
) -> None:
    """Convert a plan into another form, or into the job that a scheduler takes.

    Example: penstock export plan.json --to sbatch --job mytrain:job --steps 1000 -o job
    """
    from penstock.cli.show import Screen

    launch_options = {name: value for name, value in vars(launch).items() if name not in ("job", "env")}
    launch_options |= {"model": launch.job, "environment": launch.env or None}
    settings = read_settings(settings_file, assignments or [], launch_options)
    known_form(to)
    if against is not None and settings.nodes == "any":
        raise typer.BadParameter(
            "checks the plan's own nodes, but --nodes any requests none of them", param_hint="--against"
        )
    if server is None:
        files = _made_here(plan, to, settings, against)
    else:
        files = _made_there(server, plan, to, settings, against)
    paths = save(files, to, output)
    say_notes([note for each in files for note in each.notes])
    if paths:
        screen = Screen.of()
        screen.say(f"written: {', '.join(map(str, paths))}")
        if advice := next_step(to, paths):
            screen.say(f"next: {advice}")
        if warning := model_elsewhere(to, settings, paths[0].parent):
            screen.say(warning)


def say_notes(notes: Sequence[str]) -> None:
    """Print on standard error what a form cannot express of a plan."""
    for note in notes:
        typer.echo(f"note: {note}", err=True)


def _made_here(plan: str, to: str, launch: LaunchSettings, against: str | None) -> tuple[Written, ...]:
    file = read_plan(plan)
    if against is not None and not _is_compared(to):
        _refuse_absent(file, against)
    note = _model_note(file, to, launch)
    from penstock.exporting.forms import written

    files = _compared(written(file, to, launch), to, against)
    if note is not None:
        print(note, file=sys.stderr)
    return files


def _model_note(file: PlanFile, to: str, launch: LaunchSettings) -> str | None:
    """Return a note on the model that ranks will train, or None; it comes before their programs are made.

    Raises ModelMismatch where the model has other layers than the plan, and what ``manifests.check`` raises.
    """
    from penstock.manifests import TARGETS, check

    if launch.model is None or to not in TARGETS or "model" not in TARGETS[to].needs:
        return None
    check(to, TARGETS[to], launch)
    from penstock.cli.run.model_fit import refuse_no_reference, unlike

    refuse_no_reference(launch.model)
    return unlike(file, launch.model, launch.directory, elsewhere="image" in TARGETS[to].needs)


def _made_there(server: str, plan: str, to: str, launch: LaunchSettings, against: str | None) -> tuple[Written, ...]:
    """Return the files that a service makes of a plan that it keeps."""
    from penstock.exporting.forms import unpacked

    refuse_file(plan)
    with connect(server) as client:
        if against is not None and not _is_compared(to):
            _refuse_absent(client.plans.file(plan), against)
        return _compared(unpacked(to, client.plans.export(plan, to, launch), launch), to, against)


def _is_compared(to: str) -> bool:
    """Return whether the form belongs to another trainer, whose files are compared setting by setting."""
    from penstock.layouts.against import SETTINGS

    return to in SETTINGS


def _compared(files: tuple[Written, ...], to: str, against: str | None) -> tuple[Written, ...]:
    """Add a line to the files for each setting that differs in the user's own file. Raises InvalidDocument."""
    if against is None or not _is_compared(to):
        return files
    from dataclasses import replace

    from penstock.layouts.against import with_differences
    from penstock.schemas.document import read_text

    user_text = read_text(against)
    return tuple(
        replace(each, body=with_differences(each.body.decode(), to, user_text, Path(against).name).encode())
        for each in files
    )


def _refuse_absent(file: PlanFile, against: str) -> None:
    from penstock.manifests.against import read_known, refuse_absent

    refuse_absent(file, read_known(against))


def known_form(to: str) -> None:
    """Raise typer.BadParameter for an unknown form, naming the nearest one."""
    from penstock.exporting.forms import EXPORTS

    if to not in EXPORTS:
        hint = meant(OTHER_FORMS.get(to.lower(), to), EXPORTS, f"there are {', '.join(EXPORTS)}")
        raise typer.BadParameter(f"there is no export format {to!r}; {hint}", param_hint="--to")


def forms_text() -> str:
    """Return a text with a line for each form."""
    from penstock.exporting.forms import EXPORTS

    width = max(map(len, EXPORTS))
    return "\n".join([" Forms (--to):", *(f"   {name:<{width}}  {text}" for name, text in EXPORTS.items()), ""])


def read_settings(path: str | None, assignments: list[str], options: dict[str, Any]) -> LaunchSettings:
    """Merge settings of a file, ``--set`` and options; later ones win. Raises typer.BadParameter, InvalidDocument."""
    from penstock.schemas.ranks.launch import LaunchSettings

    data = {} if path is None else read_raw(path)
    several: dict[str, list[str]] = defaultdict(list)
    for text in assignments:
        key, value = assignment(text, "--set", "KEY=VALUE, such as partition=gpu", may_be_empty=True)
        key = key.replace("-", "_")
        if key not in LaunchSettings.model_fields:
            hint = meant(key, LaunchSettings.model_fields, f"there are {', '.join(LaunchSettings.model_fields)}")
            raise typer.BadParameter(f"there is no setting {key!r}; {hint}", param_hint="--set")
        if key in LaunchSettings.repeated():
            several[key].append(value)
        else:
            data[key] = value
    settings = {key: value for key, value in options.items() if value is not None}
    for key, values in several.items():
        settings[key] = [*values, *settings.get(key, [])]
    return LaunchSettings.parse(data | settings)


def save(files: tuple[Written, ...], to: str, output: str | None) -> list[Path]:
    """Write files and return their paths, none for standard output.

    Raises typer.BadParameter where several files would have to go to one, OSError where they cannot be written.
    """
    if output in (None, STANDARD):
        if len(files) > 1:
            names = ", ".join(each.name for each in files)
            raise typer.BadParameter(f"{to} is {len(files)} files ({names}); give a folder for them", param_hint="-o")
        sys.stdout.write(files[0].body.decode())
        return []
    target = Path(str(output))
    if len(files) == 1 and not target.is_dir():
        prepare_output(str(target))
        target.write_bytes(files[0].body)
        return [target]
    target.mkdir(parents=True, exist_ok=True)
    paths = []
    for each in files:
        paths.append(path := target / each.name)
        path.write_bytes(each.body)
        if each.is_executable:
            path.chmod(path.stat().st_mode | 0o111)
    return paths


def next_step(to: str, paths: list[Path]) -> str | None:
    """Return the command to type next; None for a form that starts no job."""
    from penstock.manifests import TARGETS

    if to not in TARGETS:
        return None
    return TARGETS[to].then.format(folder=shlex.quote(str(paths[0].parent)), first=shlex.quote(str(paths[0])))


def model_elsewhere(to: str, launch: LaunchSettings, folder: Path) -> str | None:
    """Return advice where the model lies in this directory but ranks will look for it in ``folder``; otherwise None."""
    from penstock.manifests import TARGETS

    if launch.model is None or launch.directory is not None or to not in TARGETS or "image" in TARGETS[to].needs:
        return None
    module = launch.model.partition(":")[0].partition(".")[0]
    places = [Path(), folder]
    here, there = (any((place / name).exists() for name in (module, f"{module}.py")) for place in places)
    if not here or there or "model" not in TARGETS[to].needs:
        return None
    current, target = shlex.quote(str(Path.cwd())), shlex.quote(str(folder))
    return (
        f"note: ranks look for {module} next to the script, but it is here: --directory {current}, if the nodes have "
        f"it there too, or copy it to {target}"
    )
