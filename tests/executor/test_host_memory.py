"""Memory that comes and goes with each micro-batch: page faults, which are counted by the kernel."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

CYCLES, BLOCKS, PAGES = 20, 16, 128
CHILD = f"""
import resource
from penstock.executor.host_memory import keep_freed_memory
if KEPT:
    keep_freed_memory()

def cycle():
    held = [b"x" * ({PAGES} * 4096) for _ in range({BLOCKS})]

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for _ in range(5):
    cycle()
before = faults()
for _ in range({CYCLES}):
    cycle()
print(faults() - before)
"""


def faults_of(*, kept: bool) -> int:
    child = [sys.executable, "-c", CHILD.replace("KEPT", str(kept))]
    return int(subprocess.run(child, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library's allocator")
def test_what_is_freed_is_allocated_again_without_page_faults() -> None:
    touched = CYCLES * BLOCKS * PAGES
    assert faults_of(kept=False) > touched / 2, "as glibc is by default"
    assert faults_of(kept=True) < touched / 100
