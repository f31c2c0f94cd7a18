"""Tests of what surrounds every request: its id, its line in the log, its metrics; and no secret in them."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from repository import ROOT
from service_process import Server

from penstock.examples.tiny import tiny_request
from penstock.service import logs


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A service that logs everything, as JSON."""
    server = Server(tmp_path_factory.mktemp("observed") / "observed.sqlite", log_level="debug", slots=1)
    yield server
    assert server.stop() == 0


def lines_of(server: Server, request_id: str, last: str = "route") -> list[dict[str, Any]]:
    """Return a request's log lines, once a line has the field ``last``; it may be written just after the answer."""
    for _ in range(200):
        lines = [line for text in server.log if (line := json.loads(text)).get("request_id") == request_id]
        if any(last in line for line in lines):
            return lines
        httpx.get(f"{server.url}/version")
    raise AssertionError(f"{request_id} was never logged")


def test_a_request_has_one_line_with_what_belongs_to_it(server: Server):
    answer = httpx.get(f"{server.url}/v1/jobs/nothing", headers={"X-Request-ID": "from-a-proxy"})
    assert answer.headers["X-Request-ID"] == answer.json()["request_id"] == "from-a-proxy"
    [line] = lines_of(server, "from-a-proxy")
    assert {name: line[name] for name in ("method", "path", "route", "status", "level", "tenant")} == {
        "method": "GET",
        "path": "/v1/jobs/nothing",
        "route": "/v1/jobs/{id}",
        "status": 404,
        "level": "info",
        "tenant": "default",
    }
    assert line["ms"] > 0
    assert "nothing" in line["problem"]


@pytest.mark.parametrize("request_id", ["", "two words", "x" * 200, "line\tbreak"])
def test_an_id_that_could_upset_a_log_is_replaced(server: Server, request_id: str):
    replacement = httpx.get(f"{server.url}/healthz", headers={"X-Request-ID": request_id}).headers["X-Request-ID"]
    assert re.fullmatch(r"[0-9a-f-]{36}", replacement)
    assert lines_of(server, replacement)[0]["level"] == "debug"


@pytest.mark.tier("nightly")
def test_a_job_s_lines_name_the_request_that_made_it(server: Server):
    answer = httpx.post(
        f"{server.url}/v1/plans",
        json=tiny_request() | {"seed": 11},
        headers={"X-Request-ID": "asked-for-a-plan", "Prefer": "wait=60"},
        timeout=90,
    )
    job = answer.json()
    assert job["state"] == "succeeded"
    lines = lines_of(server, "asked-for-a-plan", "plan_hash")
    of_job = [line for line in lines if line.get("job_id") == job["id"]]
    assert of_job, server.text
    assert job["result"]["plan_hash"] in [line.get("plan_hash") for line in of_job]


def test_no_secret_is_logged(server: Server):
    secret = "psk_abc_c2VjcmV0c2VjcmV0"
    httpx.get(f"{server.url}/v1/jobs/{secret}?token={secret}", headers={"Authorization": f"Bearer {secret}"})
    lines_of(server, httpx.get(f"{server.url}/version").headers["X-Request-ID"])
    assert "c2VjcmV0" not in server.text
    assert "psk_***" in server.text


@pytest.mark.tier("quick")
@pytest.mark.parametrize("form", ["json", "text"])
def test_passwords_are_masked_in_messages_and_tracebacks(form: Any):
    stream = io.StringIO()
    root = logging.getLogger()
    before, level = root.handlers[:], logging.getLogger("penstock").level
    try:
        logs.configure(form, "info", stream)
        log = logging.getLogger("penstock.service")
        log.info("connect to %s", "postgresql+psycopg://penstock:hunter2@db/x")
        try:
            raise RuntimeError("no way to postgresql://penstock:hunter2@db/x with Bearer hunter2")
        except RuntimeError:
            log.exception("failed", extra={"url": "postgresql://u:hunter2@db"})
        logging.getLogger("some.library").info("chatter")
    finally:
        root.handlers[:] = before
        logging.getLogger("penstock").setLevel(level)
    text = stream.getvalue()
    assert "hunter2" not in text
    assert text.count("penstock:***@db/x") >= 2
    assert "chatter" not in text
    assert "RuntimeError" in text


def metrics_of(server: Server) -> dict[str, float]:
    """Return every sample by its name with labels."""
    lines = httpx.get(f"{server.url}/metrics").raise_for_status().text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_metrics_count_what_happened(server: Server):
    before = metrics_of(server)
    request = tiny_request() | {"seed": 12}
    for _ in range(2):
        answer = httpx.post(f"{server.url}/v1/plans", json=request, headers={"Prefer": "wait=60"}, timeout=90)
        assert answer.json()["state"] == "succeeded"
    httpx.get(f"{server.url}/no/such/path")
    now = metrics_of(server)

    def grown(name: str) -> float:
        return now[name] - before.get(name, 0)

    assert grown('penstock_cache_requests_total{result="miss"}') == 1
    assert grown('penstock_cache_requests_total{result="hit"}') == 1
    assert grown('penstock_jobs{state="succeeded"}') == 1
    assert grown('penstock_solve_seconds_count{outcome="feasible",planner="auto"}') == 1
    assert grown("penstock_job_wait_seconds_count") == 1
    assert grown('penstock_plan_gap_count{planner="auto"}') == 1
    assert grown('penstock_http_request_seconds_count{method="POST",route="/v1/plans",status="200"}') == 2
    assert grown('penstock_http_request_seconds_count{method="GET",route="(none)",status="404"}') == 1
    assert (now["penstock_workers_alive"], now["penstock_worker_slots"]) == (1, 1)
    assert now['penstock_jobs{state="queued"}'] == now["penstock_agents_alive"] == 0


def test_the_example_rules_and_the_documentation_name_real_metrics(server: Server):
    text = httpx.get(f"{server.url}/metrics").raise_for_status().text
    real = {name.partition("{")[0] for name in metrics_of(server)}
    for name, kind in re.findall(r"^# TYPE (penstock_[a-z_]+) (\w+)", text, re.MULTILINE):  # without a sample, too
        real |= {name} | ({f"{name}_bucket", f"{name}_sum", f"{name}_count"} if kind == "histogram" else set())
    real |= {re.sub(r"_(total|count|sum|bucket|created)$", "", name) for name in real}
    pages = ("docs/operating.md", "docs/monitoring/penstock-rules.yaml", "docs/monitoring/penstock-dashboard.json")
    for page in pages:
        named = set(re.findall(r"\bpenstock_[a-z_]+\b", (ROOT / page).read_text()))
        assert named, f"{page} names no metric"
        assert named <= real, f"{page} names {sorted(named - real)}, which do not exist"
    documented = set(re.findall(r"`(penstock_[a-z_]+)", (ROOT / pages[0]).read_text()))
    exposed = {re.sub(r"_(total|count|sum|bucket|created)$", "", name) for name in real}
    assert exposed <= {re.sub(r"_total$", "", name) for name in documented}
