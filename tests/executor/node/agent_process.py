"""An agent in a separate process whose ranks are stand-ins: ``python agent_process.py SERVER DIRECTORY``.

The check of the model is a stand-in too, unless a test is about it: it would import torch for each of them.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from penstock.executor.devices import cpu_shares
from penstock.executor.node.agent import Agent, penstock_command
from penstock.executor.node.settings import AgentSettings
from penstock.executor.node.stimuli import Process

RANK = Path(__file__).with_name("stand_in_rank.py")


SAY_READY = """print('{"kind": "ready"}', flush=True)"""


def command(process: Process) -> list[str]:
    match process.kind:
        case "rank":
            return [sys.executable, "-P", str(RANK)]
        case "check":
            return [sys.executable, "-P", "-c", SAY_READY]
        case _:
            return penstock_command(process)


def with_real_check(process: Process) -> list[str]:
    return penstock_command(process) if process.kind == "check" else command(process)


def make_agent(server: str, directory: Path, say, command=command, **settings) -> Agent:
    fields = {"models": {"toy": "toy_project:job"}, "stop_grace_s": 0.3, "cpu_devices": 2} | settings
    chosen = AgentSettings(name="node", server=server, directory=directory, **fields)
    return Agent(chosen, cpu_shares("node", chosen.cpu_devices, 2**30, "cpu"), say=say, command=command)


async def main() -> None:
    await make_agent(sys.argv[1], Path(sys.argv[2]), lambda text: None).run()


if __name__ == "__main__":
    asyncio.run(main())
