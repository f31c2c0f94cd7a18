"""The service under load, through HTTP on loopback: each row is one target of a service that people wait for.

Real services and workers run in separate processes, on SQLite; the clients share the processors with them.
Prints ``name value unit target ok|MISSED``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from penstock.examples.tiny import tiny_request

RATE_PER_S, REQUESTS = 100, 500
JOBS = 1000
WAITERS = 500
STREAMS, STREAMED_S = 1000, 30.0
WAITS_S = (1, 2, 5)
PROBES = 100
LEASE_S = 5.0
LAYERS = 20_000
LISTENING = r"listening on (http://[^\s\"]+)"
SETTLED = 0.05
"""The share of a processor that an idle service takes."""
JSON = {"Content-Type": "application/json"}


def request_body() -> bytes:
    """Return a request of 60 layers with different costs at four micro-batch sizes.

    All 64 devices are written out, each with a different id.
    """
    sizes = (1, 2, 4, 8)
    profile: dict[str, Any] = {
        "schema_version": 1,
        "name": "sixty",
        "layers": [{"name": f"layer{i}", "kind": "Block", "parameter_bytes": 40_000_000 + 1000 * i} for i in range(60)],
        "boundaries": [
            [{"name": f"hidden{i}", "bytes_per_sample": 500_000, "gradient_bytes_per_sample": 500_000}]
            for i in range(59)
        ],
        "measurements": [
            {
                "device_kind": "V100",
                "micro_batch_size": size,
                "layers": [
                    {
                        "forward_ns": size * (2_000_000 + 7919 * i),
                        "backward_ns": size * 4_000_000,
                        "stash_bytes": size * 10**6,
                    }
                    for i in range(60)
                ],
            }
            for size in sizes
        ],
        "source": {"method": "imported", "expected_error": 0.2},
    }
    nodes = [
        {
            "name": f"node{n}",
            "devices": [{"id": f"node{n}/{d}", "kind": "V100", "memory_bytes": 16 * 10**9} for d in range(8)],
            "fabric": {"form": "pairs", "bandwidth_bytes_per_s": 25 * 10**9},
        }
        for n in range(8)
    ]
    links = [{"a": f"node{n}", "b": "switch", "bandwidth_bytes_per_s": 3_125_000_000} for n in range(8)]
    topology = {"schema_version": 1, "name": "8x8", "nodes": nodes, "switches": ["switch"], "links": links}
    request = {"profile": profile, "topology": topology, "global_batch_size": 128, "planner": "gpipe"}
    return json.dumps(request).encode()


def long_profile(layers: int) -> bytes:
    """Return a profile of many layers with different costs."""
    profile: dict[str, Any] = {
        "schema_version": 1,
        "name": "long",
        "layers": [{"name": f"layer{i}", "kind": "Block", "parameter_bytes": 40_000_000 + i} for i in range(layers)],
        "boundaries": [
            [{"name": f"hidden{i}", "bytes_per_sample": 500_000, "gradient_bytes_per_sample": 500_000}]
            for i in range(layers - 1)
        ],
        "measurements": [
            {
                "device_kind": "V100",
                "micro_batch_size": 1,
                "layers": [
                    {"forward_ns": 2_000_000 + i, "backward_ns": 4_000_000, "stash_bytes": 10**6} for i in range(layers)
                ],
            }
        ],
        "source": {"method": "imported", "expected_error": 0.2},
    }
    return json.dumps(profile).encode()


class Process:
    """A service or a worker of the command line, and its log."""

    def __init__(self, directory: Path, *command: str, **settings: object) -> None:
        self.log = directory / f"{command[0]}-{time.monotonic_ns()}.log"
        variables = {"database": directory / "bench.sqlite", "log_level": "info", **settings}
        environment = {f"PENSTOCK_{name.upper()}": str(value) for name, value in variables.items()}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "penstock.cli.main", *command],
                stderr=log,
                env=os.environ | environment,
            )

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Return the first match in the log."""
        while self.process.poll() is None:
            if match := re.search(pattern, self.log.read_text(encoding="utf-8")):
                return match
            time.sleep(0.02)
        raise SystemExit(f"{self.process.args} ended:\n{self.log.read_text(encoding='utf-8')}")

    def settle(self) -> None:
        """Wait until the process and its children have loaded and compiled what they keep ready."""
        family = [psutil.Process(self.process.pid)]
        family += family[0].children(recursive=True)
        busy = 1.0
        while busy > SETTLED:
            before = sum(sum(one.cpu_times()[:2]) for one in family)
            time.sleep(2.0)
            busy = (sum(sum(one.cpu_times()[:2]) for one in family) - before) / 2.0

    def stop(self) -> None:
        """Stop the process."""
        self.process.terminate()
        self.process.wait()


@contextlib.contextmanager
def service(directory: Path, **settings: object) -> Iterator[tuple[str, Process]]:
    """Run a service on a free port; yield its URL, and its process."""
    process = Process(directory, "serve", "--port", "0", **settings)
    try:
        url = process.wait_for(LISTENING)[1]
        process.settle()
        yield url, process
    finally:
        process.stop()


def row(name: str, value: float, unit: str, target: float, more: str = "") -> None:
    """Print one row."""
    print(f"{name} {value:.4g} {unit} {target:g} {'ok' if value <= target else 'MISSED'}")
    if more:
        print(f"  {more}")


def cached_plan(url: str) -> None:
    """Measure cached plans in an open loop.

    Requests leave on time, whether the one before is answered or not.
    """
    body = request_body()
    first = httpx.post(f"{url}/v1/plans", content=body, headers=JSON | {"Prefer": "wait=200"}, timeout=300).json()
    assert first["state"] == "succeeded", first
    times_ms = asyncio.run(_at_rate(f"{url}/v1/plans", body))
    median, slow = statistics.median(times_ms), statistics.quantiles(times_ms, n=100)[98]
    rate = f"at {RATE_PER_S} requests a second"
    row(f"cached plan, 60 layers inline, 64 devices, {rate}, median", median, "ms", 10)
    row(f"cached plan, {rate}, p99", slow, "ms", 30, f"request {len(body) / 1000:.0f} kB, {REQUESTS} requests")


async def _at_rate(url: str, body: bytes) -> list[float]:
    limits = httpx.Limits(max_connections=64, max_keepalive_connections=64)
    async with httpx.AsyncClient(timeout=60, headers=JSON, limits=limits) as http:
        await asyncio.gather(*(http.post(url, content=body) for _ in range(16)))  # connections, and both ends awake
        began = time.perf_counter()

        async def ask(number: int) -> float:
            due = began + number / RATE_PER_S
            await asyncio.sleep(due - time.perf_counter())
            answer = await http.post(url, content=body)
            assert answer.headers["cache-status"] == "penstock; hit"
            return 1000 * (time.perf_counter() - due)

        return await asyncio.gather(*(ask(number) for number in range(REQUESTS)))


def queued_jobs(url: str) -> None:
    """Queue distinct requests over eight connections; no worker solves them."""

    async def queue() -> float:
        numbers = iter(range(JOBS))
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:

            async def ask() -> None:
                for number in numbers:
                    answer = await http.post("/v1/plans", json=tiny_request() | {"seed": 10_000 + number})
                    assert answer.status_code == 202, answer.text

            await http.post("/v1/plans:validate", json=tiny_request())  # loads what checks requests
            began = time.perf_counter()
            await asyncio.gather(*(ask() for _ in range(8)))
            return time.perf_counter() - began

    row(f"{JOBS} jobs queued", asyncio.run(queue()), "s", 8)


def idle_waiters(url: str) -> None:
    """Measure the health check while many clients wait.

    They hold event streams, waits for jobs, and agents' calls.
    """
    jobs = [job["id"] for job in httpx.get(f"{url}/v1/jobs?state=queued&limit=50").json()["items"]]

    async def measure() -> list[float]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
            waiting = [asyncio.create_task(_wait(http, number, jobs[number % len(jobs)])) for number in range(WAITERS)]
            while _open_requests(await http.get("/metrics")) < WAITERS:
                assert not any(task.done() for task in waiting), "a waiter did not wait"
                await asyncio.sleep(0.2)
            times_ms = []
            for _ in range(PROBES):
                began = time.perf_counter()
                assert (await http.get("/healthz")).status_code == 200
                times_ms.append(1000 * (time.perf_counter() - began))
                await asyncio.sleep(0.02)
            pending = sum(not task.done() for task in waiting)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            assert pending > 0.9 * WAITERS, f"only {pending} still waited"
            return times_ms

    times_ms = asyncio.run(measure())
    slow = max(times_ms)
    row(
        f"/healthz with {WAITERS} idle waiters, slowest",
        slow,
        "ms",
        50,
        f"median {statistics.median(times_ms):.1f} ms",
    )


def idle_streams(url: str, process: Process) -> None:
    """Measure the share of a processor that idle streams take.

    They are streams of a job's events, and nothing happens to the job.
    """
    job = httpx.post(f"{url}/v1/plans", json=tiny_request() | {"seed": 20_000}, timeout=60).json()["id"]
    host, _, port = url.removeprefix("http://").partition(":")
    message = f"GET /v1/jobs/{job}/events HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()

    async def stream() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(message)
        assert b"200" in await reader.readline()
        return reader, writer  # unless it is kept, the connection is closed

    async def measure() -> float:
        streams: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        for _ in range(STREAMS // 50):
            streams += await asyncio.gather(*(stream() for _ in range(50)))
        reading = [asyncio.create_task(reader.read()) for reader, _ in streams]
        await asyncio.sleep(2.0)
        served = psutil.Process(process.process.pid)
        before = sum(served.cpu_times()[:2])
        await asyncio.sleep(STREAMED_S)
        share = float(sum(served.cpu_times()[:2]) - before) / STREAMED_S
        assert not any(task.done() for task in reading), "a stream has ended"
        for task in reading:
            task.cancel()
        return 100 * share

    row(f"{STREAMS} idle streams of events", asyncio.run(measure()), "% of a processor", 5)


def start_and_end(directory: Path) -> None:
    """Measure the time from a cold process to its first plan, and to its end after SIGTERM.

    Also measures by how much `Prefer: wait` exceeds the requested time.
    """
    began = time.perf_counter()
    process = Process(directory, "serve", "--port", "0", slots=1)
    url = process.wait_for(LISTENING)[1]
    listening_s = time.perf_counter() - began
    first = httpx.post(f"{url}/v1/plans", json=tiny_request(), headers={"Prefer": "wait=200"}, timeout=300).json()
    assert first["state"] == "succeeded", first
    row("first plan after the start", time.perf_counter() - began, "s", 3, f"listening after {listening_s:.2f} s")
    late_s = []
    for seed, wait_s in enumerate(WAITS_S):
        began = time.perf_counter()
        body = tiny_request() | {"seed": 30_000 + seed, "termination": {"time_limit_ns": 60 * 10**9}}
        httpx.post(f"{url}/v1/plans", json=body, headers={"Prefer": f"wait={wait_s}"}, timeout=300).raise_for_status()
        late_s.append(time.perf_counter() - began - wait_s)
    row("Prefer: wait=N, answered after N", max(late_s), "s", 0.5)
    began = time.perf_counter()
    process.stop()
    row("end after SIGTERM", time.perf_counter() - began, "s", 3)


async def _wait(http: httpx.AsyncClient, number: int, job: str) -> None:
    match number % 5:
        case 0 | 1:
            async with http.stream("GET", f"/v1/jobs/{job}/events") as events:
                async for _ in events.aiter_lines():
                    pass
        case 2 | 3:
            await http.get(f"/v1/jobs/{job}", headers={"Prefer": "wait=300"})
        case _:
            body = {"incarnation": "one", "state_version": 0, "models": ["gpt"], "address": "127.0.0.1"}
            body["devices"] = [{"id": "cpu0", "kind": "cpu", "memory_bytes": 10**9}]
            answer = await http.post(f"/v1/agents/waiter{number}:sync", json=body | {"hold": False})
            body["state_version"] = answer.json()["state_version"]
            while True:
                await http.post(f"/v1/agents/waiter{number}:sync", json=body)


def _open_requests(answer: httpx.Response) -> float:
    match = re.search(r"^penstock_http_requests_active (\S+)", answer.text, re.MULTILINE)
    assert match is not None, answer.text
    return float(match[1]) - 1


def large_profile(url: str) -> None:
    """Post a profile once that is new to the service."""
    body = long_profile(LAYERS)
    began = time.perf_counter()
    answer = httpx.post(f"{url}/v1/profiles", content=body, headers=JSON, timeout=60)
    seconds = time.perf_counter() - began
    assert answer.status_code == 201, answer.text
    row(f"a profile of {LAYERS} layers accepted", seconds, "s", 2, f"{len(body) / 1e6:.1f} MB")


def workers(directory: Path) -> None:
    """Measure the start of jobs on a worker with everything loaded, and a take-over.

    The worker is killed in the middle of a job, and another takes it over.
    """
    settings = {"lease_s": LEASE_S, "solve_entry": "soaking.solver:solve"}
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parent.parent / "scripts")
    with service(directory, slots=0, **settings) as (url, _), httpx.Client(base_url=url, timeout=120) as http:
        first = Process(directory, "worker", "--slots", "1", **settings)
        try:
            for number in range(12):
                http.post("/v1/plans", json=_small(2 * number), headers={"Prefer": "wait=100"}).raise_for_status()
            started = [float(text) for text in re.findall(r"started after (\S+) s", first.log.read_text())]
            row("start of a solve after its claim, median", statistics.median(started), "s", 0.1)
            second = Process(directory, "worker", "--slots", "1", **settings)
            second.wait_for("ready|work")
            row(f"take-over after kill -9, lease {LEASE_S:g} s", _take_over(http, first), "s", LEASE_S + 2)
            second.stop()
        finally:
            first.stop()


def _small(seed: int) -> dict[str, Any]:
    return tiny_request() | {"seed": seed, "planner": "gpipe"}


def _take_over(http: httpx.Client, victim: Process) -> float:
    """Return the seconds from the death of a job's worker until another worker has claimed the job."""
    seeds = iter(range(1_000_004, 2_000_000, 5))  # of those, each second one takes half a second
    while True:
        job = http.post("/v1/plans", json=_small(next(seeds))).json()["id"]
        while _states(http, job).count("running") == 0:
            time.sleep(0.005)
        if job in victim.log.read_text() and _states(http, job)[-1] == "running":
            victim.process.kill()
            began = time.perf_counter()
            break
    while _states(http, job).count("running") < 2:
        time.sleep(0.02)
        assert time.perf_counter() - began < 60, _states(http, job)
    return time.perf_counter() - began


def _states(http: httpx.Client, job: str) -> Sequence[str]:
    events = http.get(f"/v1/jobs/{job}/events?poll=1&after=0").json()["items"]
    return [event["data"]["state"] for event in events if event["kind"] == "state"]


def main() -> None:
    """Run all rows."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        start_and_end(directory)
        with service(directory, slots=1) as (url, _):
            cached_plan(url)
        with service(directory, slots=0, agent_hold_s=60) as (url, process):
            queued_jobs(url)
            idle_streams(url, process)
            idle_waiters(url)
            large_profile(url)
        (directory / "of-workers").mkdir()
        workers(directory / "of-workers")


if __name__ == "__main__":
    main()
