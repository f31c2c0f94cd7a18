"""Answers a question of the table in a child process, and gives the child its task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from penstock.questions.table import plain, question_of
from penstock.schemas.api.terms import Terms
from penstock.schemas.document import Document


def task_of(name: str, request: Document, *, most_devices: int, memory_bytes: int) -> dict[str, Any]:
    """Return the task of a child that answers a question, whose documents are inline."""
    return {
        "task": "ask",
        "entry": "penstock.questions.asking:answer_task",
        "question": name,
        "request": request.model_dump(mode="json"),
        "most_devices": most_devices,
        "memory_bytes": memory_bytes,
    }


def answer_task(task: dict[str, Any], send: Callable[[str, Any], None]) -> Any:
    """Answer a task of ``task_of`` in a child; return the answer as plain data.

    ``send`` is called with the name and the plain data of each message before the answer.
    Raises InvalidPlan where a plan of ours does not verify.
    """
    from penstock.planning.judge import refuse_unsound  # the process that sends tasks does not need the judge

    question = question_of(task["question"])
    terms = Terms(workers=1, most_devices=task["most_devices"])
    if question.event is not None:
        name, kind = question.event
        terms = replace(terms, notify=lambda message: send(name, plain(kind, message)))
    answer = question.here(question.request.model_validate(task["request"]), terms)
    for file in question.plan_files(answer):
        refuse_unsound(file)
    return plain(question.answer, answer)
