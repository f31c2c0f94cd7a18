"""Settings: where they come from, which one holds, what is refused, and what is shown of them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from repository import ROOT

from penstock.cli.main import main
from penstock.schemas.errors import InvalidDocument
from penstock.service.configuration import table
from penstock.service.settings import Settings

pytestmark = pytest.mark.tier("quick")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "penstock.toml"
    path.write_text('database = "postgresql://penstock:hunter2@db/penstock"\nslots = 3\nport = 1\nlease_s = 7\n')
    return path


def test_arguments_before_variables_before_the_file_before_defaults(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PENSTOCK_PORT", "2")
    monkeypatch.setenv("penstock_lease_s", "8")
    settings, origins = Settings.load_with_origins(file, lease_s=9)
    assert (settings.slots, settings.port, settings.lease_s, settings.host) == (3, 2, 9, "127.0.0.1")
    assert origins["slots"] == str(file)
    assert (origins["port"], origins["lease_s"]) == ("environment", "argument")
    assert "host" not in origins


def test_the_file_can_be_named_by_a_variable(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PENSTOCK_SETTINGS", str(file))
    assert Settings.load().slots == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("slot = 3", "'slot' is not a setting; did you mean 'slots'?"),
        ("slots = -1", "/slots: Input should be greater than or equal to 0 (given: -1)"),
        ("slots = ", "cannot read the service's settings"),
        ("[server]\nslots = 1", "'server' is not a setting"),
    ],
)
def test_a_file_that_is_wrong_is_refused(tmp_path: Path, text: str, words: str):
    path = tmp_path / "penstock.toml"
    path.write_text(text)
    with pytest.raises(InvalidDocument) as refused:
        Settings.load(path)
    assert words in str(refused.value)


def test_a_misspelt_variable_is_refused_and_somebody_elses_is_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PENSTOCK_API_KEY", "psk_of_the_client")
    monkeypatch.setenv("PENSTOCK_AGENT_NAME", "node0")
    Settings.load()
    monkeypatch.setenv("PENSTOCK_DATABSE", "x")
    with pytest.raises(InvalidDocument, match="PENSTOCK_DATABSE is not a setting; did you mean PENSTOCK_DATABASE"):
        Settings.load()


@pytest.mark.tier("ci")
def test_what_is_shown_can_be_read_back_and_has_no_password(file: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["serve", "--settings", str(file), "--port", "9", "--show-settings"]) == 0
    shown = capsys.readouterr().out
    assert "hunter2" not in shown
    assert "penstock:***@db" in shown
    read = tomllib.loads(shown)
    assert (read["port"], read["slots"]) == (9, 3)
    assert read.keys() <= Settings.model_fields.keys()


def test_every_setting_is_described_and_documented():
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []
    page = (ROOT / "docs" / "settings.md").read_text()
    assert page == table(Settings), "run scripts/make-settings"
