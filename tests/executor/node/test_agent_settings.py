"""The settings of an agent, and the devices and addresses that it finds on its machine."""

from __future__ import annotations

import pytest

from penstock.executor.interfaces import interface_address, interface_of
from penstock.executor.node.settings import AgentSettings
from penstock.schemas.errors import InvalidDocument

SERVER = "http://127.0.0.1:8642"
OPTIONS = {"server": SERVER, "models": {"toy": "toys:job"}}


def load(**fields):
    return AgentSettings.load(environ={}, options=OPTIONS | fields)


def test_the_command_line_holds_over_the_environment_and_that_over_the_file(tmp_path):
    path = tmp_path / "agent.toml"
    path.write_text(
        f'server = "{SERVER}"\nname = "file"\ncpu_devices = 2\ncpu_kind = "slow"\n[models]\ntoy = "toys:job"\n'
    )
    environ = {"PENSTOCK_AGENT_NAME": "environment", "PENSTOCK_AGENT_CPU_DEVICES": "3", "PENSTOCK_HOST": "not ours"}
    settings = AgentSettings.load(path, environ=environ, options={"cpu_devices": 4, "cpu_kind": None})
    assert (settings.name, settings.cpu_devices, settings.cpu_kind) == ("environment", 4, "slow")
    assert settings.models == {"toy": "toys:job"}


def test_every_variable_is_read():
    environ = {
        "PENSTOCK_AGENT_SERVER": SERVER,
        "PENSTOCK_AGENT_MODELS": "a=x:y, b=p.q:r",
        "PENSTOCK_AGENT_ALLOW_ANY_MODEL": "Yes",
        "PENSTOCK_AGENT_PREPARE_LIMIT_S": "2.5",
        "PENSTOCK_AGENT_INTERFACE": "lo",
    }
    settings = AgentSettings.load(environ=environ)
    assert settings.models == {"a": "x:y", "b": "p.q:r"}
    assert (settings.allow_any_model, settings.prepare_limit_s, settings.address()) == (True, 2.5, "127.0.0.1")
    assert settings.model_keys() == ("a", "b", "*")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param({"server": "127.0.0.1:8642"}, "is not an address; write http://host:port", id="no-scheme"),
        pytest.param({"models": {"toy": "toys"}}, "model 'toy' is 'toys'; write module:attribute", id="no-attribute"),
        pytest.param({"models": {}}, "no model is configured", id="no-model"),
        pytest.param({"directory": "/does/not/exist"}, "'/does/not/exist' does not exist", id="no-directory"),
        pytest.param({"name": "a/b"}, "/name", id="a-slash-in-the-name"),
        pytest.param({"cpu_devices": -1}, "/cpu_devices", id="negative-devices"),
        pytest.param({"colour": "red"}, "/colour", id="unknown-field"),
        pytest.param({"interface": "wlan99"}, "interface 'wlan99' is neither an address nor one of", id="no-interface"),
        pytest.param({"stop_grace_s": float("nan")}, "/stop_grace_s", id="nan"),
        pytest.param(
            {"allow_any_model": True, "server": "http://planner.example:1", "interface": "127.0.0.1"},
            "needs a loopback server and interface; these are 'planner.example' and '127.0.0.1'",
            id="any-model-from-afar",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(fields, words):
    with pytest.raises(InvalidDocument) as caught:
        load(**fields)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"PENSTOCK_AGENT_NAMES": "x"}, "PENSTOCK_AGENT_NAMES is not a setting of an agent; known are"),
        ({"PENSTOCK_AGENT_CPU_DEVICES": "two"}, "PENSTOCK_AGENT_CPU_DEVICES is 'two'; give a whole number"),
        ({"PENSTOCK_AGENT_ALLOW_ANY_MODEL": "perhaps"}, "is 'perhaps'; give true or false"),
    ],
)
def test_a_wrong_variable_is_named(environ, words):
    with pytest.raises(InvalidDocument) as caught:
        AgentSettings.load(environ=environ, options=OPTIONS)
    assert words in str(caught.value)


@pytest.mark.parametrize("text", [None, "models = [", "\udcff"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, text):
    path = tmp_path / "agent.toml"
    if text is not None:
        path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(InvalidDocument, match=r"agent\.toml"):
        AgentSettings.load(path, environ={})


def test_a_request_names_a_key_never_a_path():
    assert load().reference("toy") == "toys:job"
    assert load().reference("toys:job") is None
    assert load().reference("os:system") is None
    anything = load(allow_any_model=True)
    assert (anything.reference("mine:job"), anything.reference("mine")) == ("mine:job", None)


def test_addresses():
    assert load().address() == "127.0.0.1"
    assert load(interface="10.1.2.3").address() == "10.1.2.3"
    assert load(interface="lo").address() == "127.0.0.1"
    assert interface_address("lo") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") is None
