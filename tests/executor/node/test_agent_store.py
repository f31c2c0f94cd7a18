"""The store's process."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta

import psutil
import pytest
from torch.distributed import TCPStore

pytestmark = pytest.mark.tier("ci")

COMMAND = [sys.executable, "-P", "-m", "penstock.executor.node.tcp_store"]


def test_the_store_serves_on_its_interface_alone_until_stdin_ends():
    with subprocess.Popen([*COMMAND, "127.0.0.1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        host, _, port = json.loads(process.stdout.readline())["address"].rpartition(":")
        listening = [c.laddr for c in psutil.Process(process.pid).net_connections() if c.status == psutil.CONN_LISTEN]
        assert [(one.ip, one.port) for one in listening] == [("127.0.0.1", int(port))]
        first, second = (TCPStore(host, int(port), timeout=timedelta(seconds=20)) for _ in range(2))
        first.set("key", "value")
        assert second.get("key") == b"value"
        process.stdin.close()
        assert process.wait(30) == 0


@pytest.mark.tier("nightly")
def test_two_generations_have_two_stores():
    addresses = set()
    with (
        subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as one,
        subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other,
    ):
        addresses = {json.loads(process.stdout.readline())["address"] for process in (one, other)}
    assert len(addresses) == 2


@pytest.mark.tier("nightly")
def test_a_foreign_address_is_refused():
    ended = subprocess.run(
        [*COMMAND, "192.0.2.1"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 65
    assert "the store cannot listen on '192.0.2.1'" in ended.stderr
    assert "Traceback" not in ended.stderr
