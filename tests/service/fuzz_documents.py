"""Fuzzer that sends mutated documents to a service in this process.

Usage: ``python tests/service/fuzz_documents.py --documents 10000``.

Prints how many were answered with what, and everything that was answered with a 5xx or without problem details.
"""

# ruff: noqa: T201  (it is a command as well)

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from in_process import in_process
from mutations import Mutant, mutants

SLOW_S = 120.0


@dataclass
class Findings:
    """The result of a run."""

    answers: Counter[int] = field(default_factory=Counter)
    bad: list[tuple[int, Mutant, str]] = field(default_factory=list)
    """Number, request and what is wrong with its answer."""


async def fuzz(seed: int, count: int, directory: Path) -> Findings:
    """Send ``count`` documents, one after the other."""
    findings = Findings()
    async with in_process(directory) as client:
        for number, mutant in enumerate(mutants(seed, count)):
            try:
                answer = await asyncio.wait_for(
                    client.post(mutant.path, content=mutant.body, headers=mutant.headers), SLOW_S
                )
            except TimeoutError:
                findings.bad.append((number, mutant, f"no answer within {SLOW_S:.0f} s"))
                continue
            findings.answers[answer.status_code] += 1
            if (wrong := wrong_with(answer)) is not None:
                findings.bad.append((number, mutant, wrong))
    return findings


def wrong_with(answer: httpx.Response) -> str | None:
    """Return an answer's fault: an error inside the service, or a refusal that explains nothing."""
    if answer.status_code >= 500 and answer.status_code != 503:
        return f"{answer.status_code}: {answer.text[:500]}"
    if answer.status_code < 400:
        return None
    if answer.headers["content-type"] != "application/problem+json" or "Traceback" in answer.text:
        return f"{answer.status_code} without problem details: {answer.text[:500]}"
    return None if answer.json()["detail"] else f"{answer.status_code} without a reason"


def main() -> int:
    """Print the findings; return their number, at most 100."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        findings = asyncio.run(fuzz(options.seed, options.documents, Path(directory)))
    for number, mutant, wrong in findings.bad[:20]:
        print(f"{number} {mutant.path} {mutant.changes}: {wrong}\n  {mutant.headers} {mutant.body[:2000]!r}")
    print(
        f"{sum(findings.answers.values())} documents: {dict(sorted(findings.answers.items()))}, "
        f"{len(findings.bad)} findings"
    )
    return min(len(findings.bad), 100)


if __name__ == "__main__":
    sys.exit(main())
