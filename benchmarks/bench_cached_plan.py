"""A plan that is known already, through HTTP: a 60-layer profile inline and 64 devices, a request with keep-alive.

A real service answers in a child process. The request is sent whole each time, so that the service validates it,
computes its canonical hash and looks it up. Prints ``name value unit target ok|MISSED``.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

REQUESTS = 200
TARGET_MS = 20.0
SERVE = "from penstock.service.app import serve; from penstock.service.settings import Settings; import sys; "
SERVE += "serve(Settings(database=sys.argv[1], port=0))"


def request_body() -> bytes:
    """60 layers with different costs at four micro-batch sizes, all 64 devices written out, each with its own id."""
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


def main() -> None:
    """Start a service, have it plan once, and ask for the same plan again and again."""
    body = request_body()
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-c", SERVE, str(Path(directory) / "bench.sqlite")]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as service:
            try:
                times_ms = _ask(_url(service), body)
            finally:
                service.terminate()
    median, slow = statistics.median(times_ms), statistics.quantiles(times_ms, n=100)[98]
    verdict = "ok" if median <= TARGET_MS else "MISSED"
    name = f"cached plan through HTTP, 60 layers, 64 devices, median of {REQUESTS}"
    print(f"{name} {median:.1f} ms {TARGET_MS:.0f} {verdict}")
    print(f"  request {len(body) / 1000:.0f} kB, p99 {slow:.1f} ms, best {min(times_ms):.1f} ms")


def _url(service: subprocess.Popen[str]) -> str:
    assert service.stderr is not None
    for line in service.stderr:
        if match := re.search(r"listening on ([^\s\"]+)", line):
            return match[1]
    raise SystemExit("the service did not start")


def _ask(url: str, body: bytes) -> list[float]:
    headers = {"Content-Type": "application/json", "Prefer": "wait=200"}
    times_ms = []
    with httpx.Client(base_url=url, timeout=300, headers=headers) as client:
        first = client.post("/v1/plans", content=body).raise_for_status().json()
        assert first["state"] == "succeeded", first
        for _ in range(REQUESTS):
            began = time.perf_counter()
            answer = client.post("/v1/plans", content=body)
            times_ms.append(1000 * (time.perf_counter() - began))
            assert answer.json()["cached"]
    return times_ms


if __name__ == "__main__":
    main()
