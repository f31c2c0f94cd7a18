"""What an agent is told, and what it finds on its machine."""

from __future__ import annotations

import pytest

from penstock.executor.interfaces import interface_address, interface_of
from penstock.executor.node.devices import cpu_shares, device_kind, discover, machine_memory_bytes, parse_nvidia_smi
from penstock.executor.node.settings import AgentSettings
from penstock.schemas.errors import InvalidDocument

SERVER = "http://127.0.0.1:8642"
GIVEN = {"server": SERVER, "models": {"toy": "toys:job"}}


def load(**given):
    return AgentSettings.load(environ={}, given=GIVEN | given)


def test_the_command_line_holds_over_the_environment_and_that_over_the_file(tmp_path):
    path = tmp_path / "agent.toml"
    path.write_text(
        f'server = "{SERVER}"\nname = "file"\ncpu_devices = 2\ncpu_kind = "slow"\n[models]\ntoy = "toys:job"\n'
    )
    environ = {"PENSTOCK_AGENT_NAME": "environment", "PENSTOCK_AGENT_CPU_DEVICES": "3", "PENSTOCK_HOST": "not ours"}
    settings = AgentSettings.load(path, environ=environ, given={"cpu_devices": 4, "cpu_kind": None})
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
    ("given", "words"),
    [
        pytest.param({"server": "127.0.0.1:8642"}, "is no address; write http://host:port", id="no-scheme"),
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
def test_settings_that_cannot_be_are_refused(given, words):
    with pytest.raises(InvalidDocument) as caught:
        load(**given)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"PENSTOCK_AGENT_NAMES": "x"}, "PENSTOCK_AGENT_NAMES is no setting of an agent; known are"),
        ({"PENSTOCK_AGENT_CPU_DEVICES": "two"}, "PENSTOCK_AGENT_CPU_DEVICES is 'two'; give a whole number"),
        ({"PENSTOCK_AGENT_ALLOW_ANY_MODEL": "perhaps"}, "is 'perhaps'; give true or false"),
    ],
)
def test_a_wrong_variable_is_named(environ, words):
    with pytest.raises(InvalidDocument) as caught:
        AgentSettings.load(environ=environ, given=GIVEN)
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


SMI = "0, NVIDIA H100 80GB HBM3, 81559\n1, NVIDIA H100 80GB HBM3, 81559\n"


def test_gpus_as_nvidia_smi_lists_them():
    first, second = parse_nvidia_smi("n", SMI, {})
    assert (first.offer.id, first.offer.kind, first.offer.memory_bytes) == ("n/0", "H100", 81559 * 2**20)
    assert (first.torch_name, second.torch_name) == ("cuda:0", "cuda:1")
    assert second.environment() == {"CUDA_VISIBLE_DEVICES": "1"}


def test_only_visible_gpus_are_offered():
    (only,) = parse_nvidia_smi("n", SMI, {"CUDA_VISIBLE_DEVICES": "1"})
    assert (only.offer.id, only.torch_name) == ("n/0", "cuda:1")
    assert parse_nvidia_smi("n", SMI, {"CUDA_VISIBLE_DEVICES": ""}) == ()


def test_what_is_no_list_of_gpus_is_shown():
    with pytest.raises(InvalidDocument, match="'No devices were found'"):
        parse_nvidia_smi("n", "No devices were found\n", {})


@pytest.mark.parametrize(
    ("product", "kind"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA GeForce GTX 1080 Ti", "GTX1080Ti"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA Something Else", "Something Else"),
    ],
)
def test_device_kinds(product, kind):
    assert device_kind(product) == kind


def test_cpu_devices_share_the_memory():
    shares = cpu_shares("n", 3, 10, "cpu")
    assert [(one.offer.id, one.offer.memory_bytes) for one in shares] == [("n/0", 3), ("n/1", 3), ("n/2", 3)]
    assert shares[0].environment()["OMP_NUM_THREADS"] == "1"
    total = sum(one.offer.memory_bytes for one in discover("n", cpu_devices=2))
    assert 0 <= machine_memory_bytes() - total <= 1


def test_memory_is_the_smaller_of_machine_and_control_group(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:       1000 kB\nMemFree: 1 kB\n")
    (tmp_path / "limit").write_text("2048\n")
    (tmp_path / "none").write_text("max\n")
    assert machine_memory_bytes(str(tmp_path / "meminfo"), str(tmp_path / "limit")) == 2048
    assert machine_memory_bytes(str(tmp_path / "meminfo"), str(tmp_path / "none")) == 1000 * 1024


def test_a_machine_without_devices_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidDocument, match="--cpu-devices 2"):
        discover("n", cpu_devices=0)


def test_a_gpu_found_through_nvidia_smi(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, NVIDIA A100-SXM4-40GB, 40960'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (gpu,) = discover("n", cpu_devices=0)
    assert (gpu.offer.kind, gpu.offer.memory_bytes) == ("A100", 40960 * 2**20)
    program.write_text("#!/bin/sh\necho 'driver failed' >&2; exit 9\n")
    with pytest.raises(InvalidDocument, match="has no device"):
        discover("n", cpu_devices=0)
