"""A process that is a rank of one run after another, so that many cases share the cost of importing torch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import rule_rank
import torch.distributed as dist

from penstock.executor.run.rank import Rank


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(event: Mapping[str, Any]) -> None:
        out.write(json.dumps(event) + "\n")
        out.flush()

    for line in sys.stdin:
        assignment = json.loads(line)
        if "record" in assignment:
            rule_rank.run(assignment)
            say({"kind": "done"})
            dist.destroy_process_group()
            continue
        rank = Rank(assignment, say)
        try:
            rank.run()
        except Exception as error:
            say(rank.failure(error))
            os._exit(1)
        dist.destroy_process_group()
