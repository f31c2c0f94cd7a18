"""A check that a job can be trained under a plan: ``python -m penstock.executor.node.check_model``.

It is a separate process, because the agent neither loads torch or the user's code nor waits for file systems. It reads
one JSON line ``{model, directory, layers, global_batch_size, paths, outputs}`` (``paths``: the places that the run
writes; ``outputs``: the directories below which it may write) and writes one: ``{"kind": "ready"}``, or
``{"kind": "refused", "reason": …, "code": …}``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import TextIO

from penstock.executor.checkpoints.outputs import Outputs
from penstock.schemas.errors import ModelMismatch, PenstockError

_SAMPLES = 2


def refuse_other_layers(model: str, has: Sequence[str], planned: Sequence[str]) -> None:
    """Raise ModelMismatch with the first layer where the model differs from the plan."""
    for i, (name, other) in enumerate(zip(has, planned, strict=False)):
        if name != other:
            raise ModelMismatch(
                f"layer {i} of model {model!r} is {name!r}, but in the plan {other!r}",
                remedy="profile this model and plan with that profile",
            )
    if len(has) != len(planned):
        raise ModelMismatch(
            f"model {model!r} has {len(has)} layers, but the plan was made for {len(planned)}",
            remedy="profile this model and plan with that profile",
        )


def refuse_larger_batch(model: str, has: int, planned: int) -> None:
    """Raise ModelMismatch where a batch of the model has fewer samples than a global batch of the plan."""
    if planned > has:
        raise ModelMismatch(
            f"the plan's global batch has {planned} samples, but a batch of job {model!r} has {has}",
            remedy=f"plan with --global-batch-size {has}, or change the job's batch_size",
        )


def check(model: str, directory: str | None, layers: Sequence[str], global_batch_size: int) -> None:
    """Import ``model``, compare it with the plan, and run it on the meta device. Raises PenstockError."""
    from penstock.executor.run.chain import Chain
    from penstock.executor.run.job import load_job

    job = load_job(model, directory)
    chain = Chain(job)
    refuse_other_layers(model, chain.names, layers)
    refuse_larger_batch(model, job.batch_size, global_batch_size)
    chain.infer_shapes(range(min(_SAMPLES, job.batch_size)))


def main(questions: TextIO, answers: TextIO) -> int:
    """Read the question, write the answer."""
    question = json.loads(questions.readline())
    answer: dict[str, object] = {"kind": "ready"}
    try:
        for path in question["paths"]:
            Outputs.parse(question["outputs"]).place(os.path.join(question["directory"], path))
        check(question["model"], question["directory"], question["layers"], question["global_batch_size"])
    except PenstockError as error:
        answer = {"kind": "refused", "reason": str(error), "code": error.code}
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
    return 0


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.exit(main(sys.stdin, answers))
