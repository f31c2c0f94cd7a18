"""A rank without torch, for tests of the agent: its program says what it does, line by line.

``saves N``: take SIGTERM for the wish to save after N steps, and end. ``hello``: say ready, with pid, environment and
arguments in ``rank-N.json``. ``step N``, ``done``, ``fail REASON``,
``trace EVENTS``: say so. ``wait FILE``: until the file is there. ``die N``: by a signal. ``exit N``. ``stubborn``:
ignore SIGTERM. ``child``: start a child that ignores SIGTERM too. ``stderr TEXT``, ``print TEXT``: as they say.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

WAIT = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(1000)"


def say(**message: object) -> None:
    write(sys.stdout, json.dumps(message))


def write(stream: TextIO, text: str) -> None:
    stream.write(text + "\n")
    stream.flush()


def save(step: int) -> None:
    say(kind="checkpoint", step=step, directory=f"/checkpoints/step-{step}")
    say(kind="left", step=step)
    sys.exit(0)


def main() -> None:
    assignment = json.loads(sys.stdin.readline())
    rank, losses = assignment["rank"], []
    for line in assignment["programs"][0]["do"]:
        word, _, rest = line.partition(" ")
        if word == "hello":
            facts = {"pid": os.getpid(), "environment": dict(os.environ), "assignment": assignment, "cwd": os.getcwd()}
            Path(f"rank-{rank}.json").write_text(json.dumps(facts))
            say(kind="ready")
        elif word == "step":
            losses.append(1 / (1 + int(rest)))
            say(kind="step", step=int(rest), loss=losses[-1], time_ns=1000)
        elif word == "done":
            times = [1000] * len(losses)
            say(kind="done", losses=losses, step_times_ns=times, gradient_check=None, peak_memory_bytes=1)
        elif word == "fail":
            say(kind="failed", reason=rest, instruction="1F4")
        elif word == "trace":
            events = [{"instruction": f"0F{i}", "start_ns": i, "end_ns": i + 1} for i in range(int(rest))]
            say(kind="trace", rank_trace={"rank": rank, "device": "node/0", "step": 1, "events": events})
        elif word == "wait":
            while not Path(rest).exists():
                time.sleep(0.01)
        elif word == "die":
            os.kill(os.getpid(), int(rest))
        elif word == "exit":
            sys.exit(int(rest))
        elif word == "saves":
            signal.signal(signal.SIGTERM, lambda *_, step=int(rest): save(step))
        elif word == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        elif word == "child":
            child = subprocess.Popen([sys.executable, "-c", WAIT], stdout=subprocess.PIPE)
            child.stdout.readline()
            Path(f"child-{rank}.pid").write_text(str(child.pid))
        elif word == "stderr":
            write(sys.stderr, rest)
        elif word == "print":
            write(sys.stdout, rest)


if __name__ == "__main__":
    main()
