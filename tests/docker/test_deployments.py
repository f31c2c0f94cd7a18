"""The files that start Penstock elsewhere: valid by their schemas, and true to the existing settings and images."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from repository import ROOT

from penstock.executor.node.settings import PREFIX, AgentSettings
from penstock.service.settings import Settings

DOCKER = ROOT / "docker"
KUBERNETES = "1.30"
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
RESOURCES = [
    pytest.param(resource, id=f"{path.stem}-{resource['kind']}")
    for path in sorted((DOCKER / "kubernetes").glob("*.yaml"))
    if path.stem != "kustomization"
    for resource in yaml.safe_load_all(path.read_text())
]
TARGETS = set(re.findall(r"^FROM .* AS (service|worker|agent)$", (DOCKER / "Dockerfile").read_text(), re.M))


def refuse_unknown(variables: set[str]) -> None:
    """Check that each is a variable of the service or of an agent."""
    service = {f"PENSTOCK_{name.upper()}" for name in Settings.model_fields}
    agent = {PREFIX + name.upper() for name in AgentSettings.model_fields}
    assert {one for one in variables if one.startswith("PENSTOCK_")} <= service | agent


def containers_of(resource: dict[str, Any]) -> list[dict[str, Any]]:
    pod = resource.get("spec", {}).get("template", {}).get("spec", {})
    return [*pod.get("containers", []), *pod.get("initContainers", [])]


def test_compose_keeps_to_its_specification() -> None:
    schema = json.loads((Path(__file__).parent / "compose-spec.json").read_text())
    newer = {"name"}
    specified_part = {key: value for key, value in COMPOSE.items() if key not in newer}
    jsonschema.Draft201909Validator(schema).validate(specified_part)


def test_compose_starts_images_that_there_are_with_settings_that_there_are() -> None:
    built = {one["build"]["target"] for one in COMPOSE["services"].values() if "build" in one}
    assert built <= TARGETS
    images = {one["image"] for one in COMPOSE["services"].values() if one["image"].startswith("penstock-")}
    assert images == {f"penstock-{target}" for target in built}
    refuse_unknown({name for one in COMPOSE["services"].values() for name in one.get("environment", {})})


def test_compose_gives_ours_no_rights_and_lets_them_end() -> None:
    ours = {name: one for name, one in COMPOSE["services"].items() if one["image"].startswith("penstock-")}
    assert len(ours) == 3
    for one in ours.values():
        assert one["cap_drop"] == ["ALL"]
        assert one["security_opt"] == ["no-new-privileges:true"]
        assert one["init"] is True
        assert one["read_only"] is True
        assert "/tmp" in one["tmpfs"]
        assert one.get("restart") == "no" or one["stop_grace_period"]


@pytest.mark.parametrize("resource", RESOURCES)
def test_kubernetes_knows_every_field(resource: dict[str, Any]) -> None:
    kubernetes_validate.validate(resource, KUBERNETES, strict=True)


@pytest.mark.parametrize("resource", RESOURCES)
def test_pods_are_not_root_and_know_their_settings(resource: dict[str, Any]) -> None:
    for container in containers_of(resource):
        pod = resource["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        image = container["image"]
        if image.startswith("penstock"):
            assert container["securityContext"]["readOnlyRootFilesystem"]
            mounts = {mount["mountPath"] for mount in container.get("volumeMounts", [])}
            assert "/tmp" in mounts or container in pod.get("initContainers", []), "what Python and torch write to"
        assert image.removeprefix("penstock-") in TARGETS or not image.startswith("penstock")
        refuse_unknown({one["name"] for one in container.get("env", [])})


def test_every_port_has_a_policy_that_opens_it() -> None:
    policies = {
        one.values[0]["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/name"]: one.values[0]["spec"]
        for one in RESOURCES
        if one.values[0]["kind"] == "NetworkPolicy"
    }
    assert policies.keys() == {"postgresql", "penstock-service", "penstock-worker"}
    for policy in policies.values():
        (rule,) = policy["ingress"]
        assert rule["from"]
        assert rule["ports"]


def test_the_kustomization_names_what_lies_there() -> None:
    folder = DOCKER / "kubernetes"
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert set(kustomization["resources"]) == {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
    assert {one["name"] for one in kustomization["images"]} == {f"penstock-{target}" for target in TARGETS}


@pytest.mark.tier("ci")
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_kustomize_makes_what_pods_refer_to(tmp_path: Path) -> None:
    """Rendered as by `kubectl apply -k`: one namespace, and every Secret and ConfigMap there but the agents' key."""
    folder = tmp_path / "kubernetes"
    shutil.copytree(DOCKER / "kubernetes", folder, ignore=shutil.ignore_patterns("*.env"))
    (folder / "postgresql.env").write_text("POSTGRES_PASSWORD=secret\n")
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    objects = list(yaml.safe_load_all(done.stdout))
    for one in objects:
        kubernetes_validate.validate(one, KUBERNETES, strict=True)
        assert one["kind"] == "Namespace" or one["metadata"]["namespace"] == "penstock"
    there = {one["metadata"]["name"] for one in objects if one["kind"] in ("Secret", "ConfigMap")}
    sources = [
        v["valueFrom"] for one in objects for c in containers_of(one) for v in c.get("env", []) if "valueFrom" in v
    ]
    wanted = {source[key]["name"] for source in sources for key in ("secretKeyRef", "configMapKeyRef") if key in source}
    assert wanted - there == {"penstock-agent"}
    claims = {one["metadata"]["name"] for one in objects if one["kind"] == "PersistentVolumeClaim"}
    assert claims == {"penstock-training"}


def test_every_image_says_what_it_is() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    for name in TARGETS:
        assert f'org.opencontainers.image.title="penstock-{name}"' in text


def test_images_of_others_are_named_by_digest() -> None:
    """A build and a deployment start from the same files next year, and one PostgreSQL serves both."""
    composed = [one["image"] for one in COMPOSE["services"].values()]
    deployed = [container["image"] for one in RESOURCES for container in containers_of(one.values[0])]
    bases = re.findall(r"^ARG BASE=(\S+)$", (DOCKER / "Dockerfile").read_text(), re.M)
    others = [image for image in (*composed, *deployed, *bases) if not image.startswith("penstock-")]
    assert len(others) == 3
    assert all(re.fullmatch(r"[a-z]+:[\w.-]+@sha256:[0-9a-f]{64}", image) for image in others)
    assert len({image for image in others if image.startswith("postgres:")}) == 1


def test_the_image_sets_settings_that_there_are() -> None:
    refuse_unknown(set(re.findall(r"\b(PENSTOCK_[A-Z_]+)=", (DOCKER / "Dockerfile").read_text())))
