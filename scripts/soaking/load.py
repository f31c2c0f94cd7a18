"""Load during a soak's kills: plan requests without a break, and every answer that arrived.

Only answers that arrived count. A request whose answer never came may or may not have made a job.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.schemas.errors import RunFailed

if TYPE_CHECKING:
    import httpx

SAY_S = 60.0
"""Delay between two lines about jobs that have not ended, in seconds."""

STUCK_S = 600.0
"""The time without a change of any job's state from which on jobs count as stuck; a lease is over after 2 s."""

MOST_OPEN = 8
ENDED = ("succeeded", "failed", "cancelled")
_PLANNERS = ("gpipe", "dapple", "dp")


@dataclass
class Accepted:
    """A job that the service accepted, and its later reports."""

    seed: int
    accepted: float
    state: str = "queued"
    answers: set[str] = field(default_factory=set)
    code: str | None = None
    events: list[dict[str, Any]] = field(default_factory=list)


class Load(threading.Thread):
    """The client that queries several services in turn, and reads open jobs; ``jobs`` by id."""

    def __init__(self, urls: Sequence[str], seed: int) -> None:
        super().__init__(name="load", daemon=True)
        self._urls, self._random = urls, random.Random(seed)
        self._ending = threading.Event()
        self._next_seed = 0
        self.jobs: dict[str, Accepted] = {}
        self.fault: str | None = None
        self._changed = time.monotonic()
        self.unanswered = self.refused = 0

    def run(self) -> None:
        """Send requests until ``end`` is called, or until an answer is wrong."""
        import httpx

        with httpx.Client(timeout=httpx.Timeout(60.0)) as http:
            while not self._ending.is_set():
                try:
                    self._step(http)
                except httpx.TransportError:
                    self.unanswered += 1
                    self._ending.wait(0.05)
                except RunFailed as error:
                    self.fault = str(error)
                    return

    def stop(self) -> None:
        """Stop sending requests. Raises RunFailed for a wrong answer."""
        self._ending.set()
        self.join()
        self.refuse_fault()

    def refuse_fault(self) -> None:
        """Raise RunFailed for a wrong answer so far, or where no job has made progress for a long time."""
        if self.fault is not None:
            raise RunFailed(self.fault)
        left = [f"{job_id} is {job.state}" for job_id, job in list(self.jobs.items()) if job.state not in ENDED]
        if left and time.monotonic() > self._changed + STUCK_S:
            raise RunFailed(f"{len(left)} jobs are stuck, unchanged for {STUCK_S:.0f} s: {'; '.join(left[:5])}")

    def finished_since(self, moment: float) -> int:
        """Return how many jobs that were accepted since ``moment`` have ended."""
        return sum(job.accepted >= moment and job.state in ENDED for job in list(self.jobs.values()))

    def settle(self, say: Callable[[str], None], refuse_dead: Callable[[], None]) -> None:
        """Wait until every accepted job has ended, and read their events; ``refuse_dead`` raises what ends the wait."""
        import httpx

        left, say_at = list(self.jobs), time.monotonic() + SAY_S
        with httpx.Client(timeout=httpx.Timeout(60.0)) as http:
            while left:
                job = self.jobs[left[-1]]
                self.refuse_fault()
                refuse_dead()
                if time.monotonic() > say_at:
                    say(f"{len(left)} jobs have not ended; {left[-1]} was accepted, and is {job.state}")
                    say_at += SAY_S
                with contextlib.suppress(httpx.TransportError):
                    self._look(http, left[-1])
                    if job.state in ENDED and self._read_events(http, left[-1]):
                        left.pop()
                        continue
                time.sleep(0.02)

    def _step(self, http: httpx.Client) -> None:
        open_jobs = [job_id for job_id, job in self.jobs.items() if job.state not in ENDED]
        if len(open_jobs) < MOST_OPEN:
            self._ask(http)
        if open_jobs:
            self._look(http, self._random.choice(open_jobs))
        if self.jobs and self._random.random() < 0.3:
            self._read_events(http, self._random.choice(list(self.jobs)))
        self._ending.wait(0.05)

    def _ask(self, http: httpx.Client) -> None:
        from penstock.examples.tiny import tiny_request

        self._next_seed += 1
        request = tiny_request() | {"seed": self._next_seed, "planner": self._random.choice(_PLANNERS)}
        answer = self._answer(http, "POST", "/v1/plans", request)
        if answer is not None:
            self.jobs[answer["id"]] = Accepted(self._next_seed, time.monotonic())
            self._take(answer)

    def _look(self, http: httpx.Client, job_id: str) -> None:
        answer = self._answer(http, "GET", f"/v1/jobs/{job_id}")
        if answer is not None:
            self._take(answer)

    def _take(self, answer: dict[str, Any]) -> None:
        job = self.jobs[answer["id"]]
        if job.state in ENDED and answer["state"] != job.state:
            raise RunFailed(f"job {answer['id']} had {job.state}, and is {answer['state']}")
        if answer["state"] != job.state:
            self._changed = time.monotonic()
        job.state = answer["state"]
        job.code = (answer.get("error") or {}).get("code")
        if job.state in ENDED:
            outcome = json.dumps([answer.get("result"), answer.get("error")], sort_keys=True)
            job.answers.add(hashlib.sha256(outcome.encode()).hexdigest())
        if len(job.answers) > 1:
            raise RunFailed(f"job {answer['id']} has had {len(job.answers)} different answers")

    def _read_events(self, http: httpx.Client, job_id: str) -> bool:
        """Read the events so far; earlier ones must be unchanged, and their order must be a job's."""
        page = self._answer(http, "GET", f"/v1/jobs/{job_id}/events?poll=1&after=0")
        if page is None:
            return False
        job, events = self.jobs[job_id], page["items"]
        if events[: len(job.events)] != job.events:
            raise RunFailed(f"job {job_id}: events that were reported have changed: {job.events} became {events}")
        job.events = events
        refuse_disorder(job_id, events)
        return True

    def _answer(self, http: httpx.Client, method: str, path: str, body: Any = None) -> dict[str, Any] | None:
        """Return a good answer; None for a refusal that asks to retry. Raises RunFailed for any other."""
        answer = http.request(method, self._random.choice(self._urls) + path, json=body)
        if answer.status_code in (200, 202):
            document: dict[str, Any] = answer.json()
            return document
        if answer.status_code == 503 and "Retry-After" in answer.headers:
            self.refused += 1
            self._ending.wait(0.05)
            return None
        raise RunFailed(f"{method} {path} was answered {answer.status_code}: {answer.text[:500]}")


FOLLOWS = {
    None: {"queued"},
    "queued": {"running", "cancelled", "failed"},
    "running": {"queued", "running", *ENDED},
}
"""States that may follow each state."""


def refuse_disorder(job_id: str, events: Sequence[dict[str, Any]]) -> None:
    """Raise RunFailed for events whose numbers have gaps or whose states could not follow each other."""
    if [event["sequence"] for event in events] != list(range(1, len(events) + 1)):
        raise RunFailed(f"job {job_id}: the numbers of its events are {[event['sequence'] for event in events]}")
    before: str | None = None
    for event in events:
        after = event["data"].get("state") if event["kind"] == "state" else None
        if after is not None and after not in FOLLOWS.get(before, set()):
            raise RunFailed(f"job {job_id}: {after} came after {before}")
        if before in ENDED:
            raise RunFailed(f"job {job_id}: a {event['kind']} event came after it had {before}")
        before = after or before
