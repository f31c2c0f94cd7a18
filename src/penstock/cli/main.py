"""The command ``penstock``: its commands, and the one place where an error becomes a message and an exit code.

Exit codes:

- 0: done; 1: failed
- 2: a plan that is not proven optimal, under ``plan --require-optimal``
- 3: proven infeasible; 4: no plan found
- 64: wrong usage; 65: a refused document
- 70: an internal error; 130: an interrupt
"""

from __future__ import annotations

from penstock.cli import early  # isort: skip  (first: what follows takes a while)

import errno
import os
import select
import stat
import sys
import traceback
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any

import typer

from penstock.cli import panels, questions
from penstock.cli.convert import exporting, importing, layouts, schedules, schema
from penstock.cli.measure import calibrating, probing, profiling, tuning
from penstock.cli.plan import fitting, judging, listing, placing, planning, sweeping
from penstock.cli.run import rank, running, runs
from penstock.cli.service import database, doctor, jobs, keys, serving
from penstock.schemas.errors import MissingExtra, PenstockError

USAGE = 64
INTERNAL = 70
INTERRUPTED = 130
EXTRAS = {
    **dict.fromkeys(("numpy", "numba", "networkx", "ortools"), "solvers"),
    **dict.fromkeys(("fastapi", "starlette", "uvicorn", "sqlalchemy", "jinja2", "pydantic_settings"), "service"),
    "torch": "executor",
}
"""The extra that installs each module that may be absent."""

app = typer.Typer(
    name="penstock",
    help="Plan distributed training, prove how good the plan is, and run it.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
planning.register(app)
placing.register(app)
sweeping.register(app)
judging.register(app)
fitting.register(app)
questions.register(app)
listing.register(app)
profiling.register(app, importing.group)
probing.register(app)
calibrating.register(app, exporting.group)
tuning.register(app)
running.register(app)
rank.register(app)
serving.register(app)
jobs.register(app)
runs.register(app)
keys.register(app)
database.register(app)
doctor.register(app)
layouts.register(importing.group)
schedules.register(importing.group, exporting.group)
app.add_typer(importing.group, name="import", rich_help_panel=panels.CONVERT)
app.add_typer(exporting.group, name="export", rich_help_panel=panels.CONVERT)
schema.register(app)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from importlib.metadata import version

        print(version("penstock"))
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@cache
def _command() -> Any:
    """Return what typer makes of all commands; it takes 40 ms, which tests would wait for at each call."""
    return typer.main.get_command(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; never raises, and shows a traceback only under PENSTOCK_DEBUG=1."""
    early.loaded()
    words = list(sys.argv[1:] if arguments is None else arguments)
    piped = _is_pipe()
    try:
        code = _command()(args=words, prog_name="penstock", standalone_mode=False)
        sys.stdout.flush()
        if code == INTERRUPTED:
            return _say("interrupted", INTERRUPTED)
        return code if isinstance(code, int) else 0
    except typer.TyperException as error:
        return _usage(error)
    except (KeyboardInterrupt, typer.Abort):
        return _say("interrupted", INTERRUPTED)
    except PenstockError as error:
        _traceback_if_asked()
        return _say(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            return _internal(error)
        absent = MissingExtra(
            f"this command needs {error.name!r}, which is not installed", remedy=f"pip install 'penstock[{extra}]'"
        )
        return _say(str(absent), absent.exit_code)
    except BrokenPipeError as error:
        return 0 if piped and _reader_has_left() else _internal(error)
    except SystemExit as ended:  # typer and rich end so where a pipe is broken
        cause = ended.__context__
        if isinstance(cause, BrokenPipeError):
            return 0 if piped and _reader_has_left() else _internal(cause)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except OSError as error:
        if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return _internal(error)
        where = f"{error.filename!r}: " if error.filename is not None else ""
        return _say(f"{where}{error.strerror or error}", 1)
    except Exception as error:
        return _internal(error)


def _is_pipe() -> bool:
    """Return whether standard output goes to another process."""
    try:
        return stat.S_ISFIFO(os.fstat(sys.stdout.fileno()).st_mode)
    except (OSError, ValueError):
        return False


def _reader_has_left() -> bool:
    """Return whether the reader of standard output, a pipe, has closed it, as ``| head`` does; drop the rest if so."""
    if not _is_pipe():
        return True  # rich has put the null device in its place already
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if not poll.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _usage(error: typer.TyperException) -> int:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "penstock"
    text = error.format_message().removeprefix("Invalid value: ")
    if text and type(error).__name__ != "NoArgsIsHelpError":
        _say(f"{text.rstrip('.')}; see `{command} --help`", USAGE)
    else:
        print(text, file=sys.stderr)
    return USAGE


def _internal(error: Exception) -> int:
    _traceback_if_asked()
    hint = "" if os.environ.get("PENSTOCK_DEBUG") == "1" else "; PENSTOCK_DEBUG=1 shows where"
    return _say(f"internal error: {type(error).__name__}: {error}\n  please report it{hint}", INTERNAL)


def _traceback_if_asked() -> None:
    if os.environ.get("PENSTOCK_DEBUG") == "1":
        traceback.print_exc()


def _say(message: str, code: int) -> int:
    print(f"penstock: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
