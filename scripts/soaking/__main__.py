"""``scripts/soak``: a soak of training or the service, with a number of kills and a seed."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from penstock.schemas.errors import PenstockError
from soaking import service, training


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a soak; returns the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description="Deaths at random moments.")
    parser.add_argument("what", nargs="?", choices=("training", "service"), default="training")
    parser.add_argument("--kills", type=int, help="deaths; 200 of training, 100 of the service")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-at-once", type=int, default=3, help="deaths before things have to have gone on")
    parser.add_argument("--directory", type=Path, help="keeps logs, database and checkpoints")
    parser.add_argument(
        "--database", choices=("postgresql", "sqlite"), default="postgresql", help="of the service soak"
    )
    options = parser.parse_args(arguments)
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True)

    with contextlib.ExitStack() as stack:
        directory = options.directory or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-soak-")))
        directory.mkdir(parents=True, exist_ok=True)
        directory = directory.absolute()
        try:
            if options.what == "training":
                training.run(directory, options.kills or 200, options.seed, say, options.most_at_once)
            else:
                kills = options.kills or 100
                service.run(directory, kills, options.seed, say, options.most_at_once, engine=options.database)
        except PenstockError as error:
            print(f"soak: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
