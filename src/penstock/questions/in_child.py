"""Answers a question of the table in a child process, and gives the child its task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.questions.table import json_of, question_of
from penstock.schemas.api.terms import Terms
from penstock.schemas.document import Document
from penstock.workers.protocol import Message

ENTRY = "penstock.questions.in_child:answer_task"


def task_of(name: str, request: Document, *, most_devices: int, most_micro_batches: int, memory_bytes: int) -> Message:
    """Return the task of a child that answers a question, whose documents are inline."""
    most = {"most_devices": most_devices, "most_micro_batches": most_micro_batches}
    facts = {"entry": ENTRY, "question": name, "most": most, "memory_bytes": memory_bytes}
    return Message("ask", facts, request.model_dump_json(exclude_unset=True).encode())


def answer_task(task: Message, send: Callable[[str, bytes], None]) -> bytes:
    """Answer a task of ``task_of`` in a child; return the answer as JSON.

    ``send`` is called with the name and the JSON of each message before the answer.
    Raises InvalidPlan where a plan of ours does not verify.
    """
    from penstock.planning.judge import refuse_unsound  # the process that sends tasks does not need the judge

    question = question_of(task.facts["question"])
    terms = Terms(workers=1, **task.facts["most"])
    if question.event is not None:
        name, kind = question.event
        terms = replace(terms, notify=lambda message: send(name, json_of(kind, message)))
    answer = question.here(question.request.model_validate_json(task.body), terms)
    for file in question.plan_files(answer):
        refuse_unsound(file)
    return json_of(question.answer, answer)
