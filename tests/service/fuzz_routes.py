"""Runs schemathesis on every route of a real service: ``python tests/service/fuzz_routes.py --examples 200``."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from service_process import Server

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "negative_data_rejection",
)
"""Checks of schemathesis without two kinds.

``positive_data_acceptance`` is left out: no JSON schema says all that a plan has to keep, so much data that fits the
schema is refused. Checks about keys are left out: they have separate tests.
"""

SLOW = (
    "/v1/plans:compare",
    "/v1/plans:explain",
    "/v1/profiles:calibrate",
    "/v1/profiles:calibrate-throughput",
    "/v1/topologies:import",
    "/v1/placements",
)
"""Routes whose requests each start a process.

Their bodies are the bodies of ``:validate`` and ``:verify``; the texts of
``:import`` are torn in tests/importers.
"""


def fuzz_routes(directory: Path, examples: int, seed: int, limit_s: int) -> tuple[int, str]:
    """Exit code and report of schemathesis, with ``examples`` random requests per route, after ``limit_s`` at most."""
    server = Server(directory / "fuzzed.sqlite", slots=1, agent_hold_s=0.05, max_solve_s=20, max_wait_s=1)
    try:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--no-color"]
        command += ["--phases", "examples,coverage,fuzzing", "--checks", ",".join(CHECKS), "--continue-on-failure"]
        command += ["--max-examples", str(examples), "--seed", str(seed), "--generation-database", "none"]
        command += ["--max-time", str(limit_s), *(word for path in SLOW for word in ("--exclude-path", path))]
        command += ["--suppress-health-check", "all", "--warnings", "off", "--request-timeout", "30"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=directory, check=False)
    finally:
        server.stop()
    traces = "\nThe service's log:\n" + server.text if "Traceback" in server.text else ""
    return done.returncode or len(traces) > 0, done.stdout + done.stderr + traces


def main() -> int:
    """Print the report of schemathesis; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--limit-s", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        code, report = fuzz_routes(Path(directory), options.examples, options.seed, options.limit_s)
    sys.stdout.write(report)
    return code


if __name__ == "__main__":
    sys.exit(main())
