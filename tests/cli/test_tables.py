"""Tables of sweeps and jobs: what was found stands beside what was asked, and ids stay whole in a pipe."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.cli.plan.sweeping import show_rows
from penstock.cli.service import jobs
from penstock.cli.show import Screen
from penstock.planning.sweep import with_front
from penstock.schemas.api.jobs import JobOut
from penstock.schemas.api.sweep import SweepRow

SAME: dict[str, Any] = {
    "topology": "1x8xV100",
    "global_batch_size": 64,
    "update_rules": ("synchronous",),
    "state": "succeeded",
    "status": "feasible",
    "time_per_global_batch_ns": 10**9,
    "devices": 8,
}


def _method(planner: str, schedule: str, update_rule: str = "synchronous") -> dict[str, str]:
    return {"planner": planner, "schedule": schedule, "update_rule": update_rule}


def _row(planner: str, method: dict[str, str], samples_per_s: float, memory: int, **more: Any) -> SweepRow:
    request = {"planner": planner, "schedule": "auto", "method": method}
    return SweepRow(**(SAME | request | {"samples_per_s": samples_per_s, "peak_memory_bytes": memory} | more))


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "150")


def test_a_sweep_says_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        _row("auto", _method("relax", "early-backward"), 100.0, 2**30),
        _row("gpipe", _method("gpipe", "gpipe"), 50.0, 2**31, schedule="gpipe"),
        SweepRow(**(SAME | {"planner": "spp", "schedule": "auto", "status": "infeasible", "why": "too large"})),
    ]
    show_rows(Screen.of(), with_front(rows))
    out = capsys.readouterr().out
    cells = [" ".join(line.split()) for line in out.splitlines()]
    assert any(line.startswith("* 1x8xV100 64 auto relax with early-backward feasible") for line in cells)
    assert any(line.startswith("1x8xV100 64 gpipe with gpipe gpipe feasible") for line in cells)
    assert any(line.startswith("1x8xV100 64 spp – infeasible") for line in cells)
    assert "cost" not in cells[1]


@pytest.mark.tier("quick")
def test_a_sweep_over_rules_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    rules = ("weight_stashing",)
    show_rows(Screen.of(), [_row("auto", _method("wpipe", "wpipe", "weight_stashing"), 1.0, 1, update_rules=rules)])
    assert "auto, weight stashing" in capsys.readouterr().out


def test_a_thousandth_of_memory_is_no_reason_to_be_on_the_front() -> None:
    """Of plans on as many devices a fast one beats plans that save 0.1 % of memory, but not one that saves 20 %."""
    rows = [
        _row("a", _method("a", "x"), 100.0, 1_000_000),
        _row("b", _method("b", "x"), 80.0, 999_000),
        _row("c", _method("c", "x"), 60.0, 800_000),
        _row("d", _method("d", "x"), 100.0, 1_000_000),
        _row("e", _method("e", "x"), 99.9, 1_000_100),
        _row("f", _method("f", "x"), 80.0, 1_000_000, devices=7),
    ]
    assert [row.pareto for row in with_front(rows)] == [True, False, True, True, False, True]
    assert with_front([]) == ()


@pytest.mark.tier("quick")
def test_ids_of_jobs_stay_whole_in_a_pipe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    name = "0123456789abcdef" * 2
    job = JobOut(
        id=name,
        state="succeeded",
        request_hash="sha256:" + "0" * 64,
        planner="auto",
        created_at="2026-11-22T16:04:00.123456Z",
        incumbent_ns=20_900_000_000,
        bound_ns=10_100_000_000,
    )

    class Jobs:
        def page(self, **_parameters: object) -> Any:
            return type("Page", (), {"items": (job,), "next_cursor": None})()

    class Client:
        jobs = Jobs()

        def __enter__(self) -> Client:
            return self

        def __exit__(self, *_arguments: object) -> None:
            pass

    monkeypatch.setattr(jobs, "connect", lambda _server: Client())
    monkeypatch.setenv("COLUMNS", "70")
    jobs.list_jobs(state=None, tag=None, planner=None, limit=50)
    assert name in capsys.readouterr().out
