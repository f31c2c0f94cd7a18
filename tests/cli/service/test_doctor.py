"""``penstock doctor``: what it finds here, and what it says where something is wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from repository import ROOT

from penstock.cli.kernels import announce_compilation
from penstock.cli.main import main


def checks(capsys: pytest.CaptureFixture[str], *arguments: str, expect: int = 0) -> dict[str, dict[str, str]]:
    """Return the rows of ``doctor --json`` by name."""
    assert main(["doctor", "--json", *arguments]) == expect
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)}


def test_a_machine_in_good_health(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = checks(capsys, "--database", str(tmp_path / "new.sqlite"))
    assert {row["verdict"] for row in rows.values()} <= {"ok", "note"}
    assert rows.keys() >= {"Python", "extra [service]", "processors", "kernels", "database", "port"}
    assert not (tmp_path / "new.sqlite").exists(), "it only looks"


@pytest.mark.tier("quick")
def test_who_plans_first_hears_of_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("PENSTOCK_KERNELS", str(tmp_path))
    announce_compilation()
    assert f"once, into {tmp_path}" in capsys.readouterr().err
    (tmp_path / "of-a-kernel.nbi").touch()
    announce_compilation()
    assert capsys.readouterr().err == ""


def test_the_table_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--database", str(tmp_path / "no" / "such.sqlite")]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "FAILED" in shown
    assert "create the directory" in shown


def test_a_file_that_is_no_database(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "x.sqlite").write_text("no database" * 100)
    rows = checks(capsys, "--database", str(tmp_path / "x.sqlite"), expect=1)
    assert rows["database"]["verdict"] == "FAILED"
    assert "file is not a database" in rows["database"]["result"]


def test_keys_that_nobody_is_asked_for_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    database = str(tmp_path / "keys.sqlite")
    assert main(["db", "upgrade", "--database", database]) == 0
    capsys.readouterr()
    assert "keys" not in checks(capsys, "--database", database)
    ids = []
    for name, expires in (("a", "never"), ("b", "90d"), ("over", "0s")):
        words = ["keys", "create", "--name", name, "--scope", "read", "--expires", expires, "--database", database]
        assert main([*words, "--json"]) == 0
        ids.append(json.loads(capsys.readouterr().out)["id"])
    row = checks(capsys, "--database", database)["keys"]
    assert row["verdict"] == "note"
    assert "security is off: 2 keys of this database are not asked for" in row["result"]
    assert "PENSTOCK_SECURITY=keys" in row["remedy"]
    assert main(["keys", "revoke", ids[0], "--database", database]) == 0
    capsys.readouterr()
    assert "1 key of this database is not asked for" in checks(capsys, "--database", database)["keys"]["result"]
    monkeypatch.setenv("PENSTOCK_SECURITY", "keys")
    assert "keys" not in checks(capsys, "--database", database)


def test_settings_that_are_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "penstock.toml").write_text("solts = 3\n")
    rows = checks(capsys, "--settings", str(tmp_path / "penstock.toml"), expect=1)
    assert "did you mean 'slots'?" in rows["settings"]["result"]


def test_a_service_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["--database", str(tmp_path / "x.sqlite"), "--server", "http://127.0.0.1:9"]
    assert checks(capsys, *arguments, expect=1)["service"]["verdict"] == "FAILED"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="install Debian's systemd")
def test_the_systemd_units_are_sound():
    units = sorted((ROOT / "docs").glob("penstock*.service"))
    assert [unit.name for unit in units] == ["penstock-agent.service", "penstock-worker.service", "penstock.service"]
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
