"""The places where an agent lets runs write, and its credentials for the service."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from test_state import OFFER, assignment, play, synced

from penstock.executor.node import check_model
from penstock.executor.node.agent_state import Offer, State
from penstock.executor.node.settings import AgentSettings
from penstock.schemas.api.run_options import RunOptions
from penstock.schemas.errors import InvalidDocument

CONFINED = Offer("a", OFFER.devices, OFFER.models, outputs=("/shared/out", "/scratch"), directory="/srv/project")
TOKEN = "psk_0123456789ab_" + 64 * "c"


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/shared/out/run1", True),
        ("/shared/out", True),
        ("/scratch/a/../b", True),
        ("/shared/outside", False),
        ("/shared/out/../../etc", False),
        ("/etc/passwd", False),
        ("checkpoints", False),
        ("../../scratch/x", True),
    ],
)
def test_a_run_uses_the_directories_of_the_agents_configuration(path: str, allowed: bool):
    assert CONFINED.may_use(path) == allowed
    for field in ("checkpoint_directory", "metrics_path", "tensorboard_directory"):
        wanted = assignment(options=RunOptions.parse({field: path}))
        state, _ = play(synced(wanted), state=State(CONFINED))
        refused = [event.data["reason"] for event in state.outbox.events if event.kind == "refused"]
        assert bool(refused) != allowed
        if refused:
            assert repr(path) in refused[0]
            assert "'/shared/out', '/scratch'" in refused[0]


def test_symbolic_links_lead_nowhere_else(tmp_path: Path):
    """By its text the path is in an allowed directory; the real place is not."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "shared" / "link").symlink_to(tmp_path / "outside")
    answers = io.StringIO()
    question = {
        "model": "no_such:job",
        "directory": str(tmp_path),
        "layers": [],
        "global_batch_size": 8,
        "paths": ["shared/link/here"],
        "outputs": [str(tmp_path / "shared")],
    }
    check_model.main(io.StringIO(json.dumps(question)), answers)
    answer = json.loads(answers.getvalue())
    assert answer["kind"] == "refused"
    assert f"leads to '{tmp_path}/outside/here', which is outside of the agent's output_directories" in answer["reason"]


def test_a_run_that_writes_nothing_needs_no_directory():
    nowhere = Offer("a", OFFER.devices, OFFER.models, outputs=())
    state, actions = play(synced(assignment()), state=State(nowhere))
    assert actions
    assert not state.outbox.events


def settings(tmp_path: Path, **fields: object) -> AgentSettings:
    return AgentSettings.load(
        environ={},
        options={"name": "n", "models": {"m": "a:b"}, "directory": str(tmp_path), "server": "http://h", **fields},
    )


def test_beyond_loopback_nothing_is_written_where_nothing_was_allowed(tmp_path: Path):
    assert settings(tmp_path, server="http://localhost:1").outputs() is None
    away = {"server": "http://192.0.2.1:1", "interface": "127.0.0.1"}
    assert settings(tmp_path, **away).outputs() == ()
    assert settings(tmp_path, **away, output_directories=["/a/b/", "/c"]).outputs() == ("/a/b", "/c")
    assert settings(tmp_path, server="http://localhost:1", output_directories=["/a"]).outputs() == ("/a",)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"output_directories": ["out"]}, "are relative; give absolute paths"),
        ({"ca": "/no/such/file"}, "is not a file"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, fields: dict[str, object], words: str):
    with pytest.raises(InvalidDocument, match=words):
        settings(tmp_path, server="http://localhost:1", **fields)


def test_a_file_without_certificates_is_named(tmp_path: Path):
    (tmp_path / "empty.pem").write_text("")
    with pytest.raises(InvalidDocument, match=r"empty.pem.* holds no certificate"):
        settings(tmp_path, server="https://localhost:1", ca=str(tmp_path / "empty.pem")).trusted()


def test_the_token_comes_from_the_environment_and_is_never_shown(tmp_path: Path):
    environ = {
        "PENSTOCK_AGENT_TOKEN": TOKEN,
        "PENSTOCK_AGENT_SERVER": "http://localhost:1",
        "PENSTOCK_AGENT_MODELS": "m=a:b",
        "PENSTOCK_AGENT_OUTPUT_DIRECTORIES": "/a:/b",
    }
    loaded = AgentSettings.load(environ=environ, options={"directory": str(tmp_path)})
    assert loaded.credentials() == {"Authorization": f"Bearer {TOKEN}"}
    assert loaded.outputs() == ("/a", "/b")
    assert TOKEN not in repr(loaded) + str(loaded.model_dump()) + loaded.model_dump_json()
    with pytest.raises(InvalidDocument) as refused:
        AgentSettings.load(environ={**environ, "PENSTOCK_AGENT_PROBE_PORT": "70000"}, options={"directory": "/nowhere"})
    assert TOKEN not in str(refused.value)
