"""Manifests of Kubernetes against the published schemas of their kinds, and what they say of pods and nodes."""

from __future__ import annotations

import base64
import gzip
import json
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from plans import plan_on

from penstock.manifests import TARGETS, make, pods
from penstock.manifests.additions import merged
from penstock.manifests.names import legal
from penstock.schemas.errors import InvalidDocument, UnsupportedRequest
from penstock.schemas.plan import PlanFile
from penstock.schemas.ranks.bundle import JobBundle
from penstock.schemas.ranks.launch import LaunchSettings

SCHEMAS = Path(__file__).parent / "schemas" / "kubernetes.json"
NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
EQUAL = {"gpu-b": 2, "gpu-a": 2, "gpu-d": 2, "gpu-c": 2}
UNEQUAL = {"b": 1, "a": 3}
RACKS = {"gpu-b": "s1", "gpu-a": "s1", "gpu-d": "s2", "gpu-c": "s2"}
KINDS = {
    "trainjob": "TrainJob",
    "pytorchjob": "PyTorchJob",
    "jobset": "JobSet",
    "kueue": "JobSet",
    "volcano": "Job",
}
ODD = {
    "name": "My Job: ü " + "x" * 80,
    "directory": "/a b/$(HOME)",
    "environment": ["A=$(NODE_NAME) 'x'\n- y: z", "YES=yes", "EMPTY=", "EQUALS=a=b"],
    "command": "python -m 'my penstock'",
    "claim": "data",
    "mount": "/mnt/x y",
    "namespace": "team-a",
    "cpus_per_task": 4,
    "checkpoint": "/mnt/x y/checkpoints",
    "gpu_resource": "amd.com/gpu",
}


@cache
def validator(kind: str) -> jsonschema.Draft202012Validator:
    schemas = json.loads(SCHEMAS.read_text())
    root = {"$ref": f"#/$defs/{schemas['roots'][kind]}", "$defs": schemas["$defs"]}
    return jsonschema.Draft202012Validator(root, format_checker=jsonschema.FormatChecker())


def manifests_of(to: str, file: PlanFile, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the ConfigMap and the job, after a check by the schema of its kind."""
    base = {"model": "m:job", "steps": 3, "image": "registry.example/train:1"}
    queue = {"queue": "gpus"} if to == "kueue" else {}
    [written] = make(file, to, LaunchSettings.parse(base | queue | more))
    config_map, job = yaml.safe_load_all(written.text)
    assert (written.name, job["kind"]) == (TARGETS[to].only, KINDS[to])
    assert [fault.message for fault in validator(KINDS[to]).iter_errors(job)] == []
    return config_map, job


def pods_of(job: Any) -> list[dict[str, Any]]:
    """Return all pod specs (of a TrainJob: the patch) within a manifest."""
    if isinstance(job, list):
        return [spec for each in job for spec in pods_of(each)]
    if not isinstance(job, dict):
        return []
    return [job] if "containers" in job else [spec for each in job.values() for spec in pods_of(each)]


def nodes_of(spec: dict[str, Any]) -> list[str]:
    required = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    return [field["values"][0] for term in required["nodeSelectorTerms"] for field in term["matchFields"]]


def place_of(command: list[str], number: int) -> str:
    """Return the node number of the ``number``th pod of a group, by torchrun's option or by its variable."""
    option = [word for word in command if word.startswith("--node-rank=")]
    if option:
        assert command[0] == "torchrun"
        return re.sub(r"--node-rank=\$\((JOB_COMPLETION_INDEX|VC_TASK_INDEX)\)", str(number), option[0])
    run = [*(word.replace("$$(", "$(") for word in command[:4]), "printenv", "PET_NODE_RANK"]
    environ = dict.fromkeys(("JOB_COMPLETION_INDEX", "VC_TASK_INDEX"), str(number))
    return subprocess.run(run, env=environ, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("to", KINDS)
def test_every_manifest_keeps_its_schema_with_odd_settings_too(to: str) -> None:
    file = plan_on(EQUAL, switches=RACKS)
    config_map, job = manifests_of(to, file)
    assert JobBundle.parse_json(config_map["data"]["job.json"]).plan_hash == file.plan.content_hash()
    odd_map, odd = manifests_of(to, file, **ODD)
    assert NAME.fullmatch(odd["metadata"]["name"])
    assert len(odd["metadata"]["name"]) <= 40
    assert odd["metadata"]["name"] != job["metadata"]["name"]
    for one in (odd_map, odd):
        assert one["metadata"]["namespace"] == "team-a"
        assert all(LABEL.fullmatch(value) for value in one["metadata"]["labels"].values())
    holds_commands = odd["spec"]["trainer"] if to == "trainjob" else pods_of(odd)[0]["containers"][0]
    command = holds_commands["command"]
    assert command[command.index("--no-python") + 1 :][:4] == ["python", "-m", "my penstock", "rank"]
    assert command[command.index("--directory") + 1] == "/a b/$$(HOME)"
    environment = {one["name"]: one.get("value") for one in holds_commands["env"]}
    assert environment["A"] == "$$(NODE_NAME) 'x'\n- y: z"
    assert (environment["YES"], environment["EMPTY"], environment["EQUALS"]) == ("yes", "", "a=b")
    [mounted] = {
        mount["mountPath"]
        for spec in pods_of(odd)
        for mount in spec["containers"][0]["volumeMounts"]
        if mount["name"] == "data"
    }
    assert mounted == "/mnt/x y"
    resources = odd["spec"]["trainer"]["resourcesPerNode"] if to == "trainjob" else holds_commands["resources"]
    assert resources == {"limits": {"amd.com/gpu": 2}, "requests": {"cpu": 8}}


def test_the_schemas_refuse_what_the_apis_do_not_have() -> None:
    for to, kind in KINDS.items():
        _, job = manifests_of(to, plan_on(EQUAL))
        assert not validator(kind).is_valid(job | {"spec": job["spec"] | {"unheardOf": 1}})
        assert not validator(kind).is_valid(job | {"metadata": {"name": 7}})


@pytest.mark.parametrize("to", ["trainjob", "pytorchjob", "jobset", "volcano"])
def test_pods_go_to_the_plans_nodes_one_each(to: str) -> None:
    """Ranks go by the node's name, so that it does not matter which pod is where."""
    _, job = manifests_of(to, plan_on(EQUAL))
    specs = pods_of(job)
    assert {tuple(nodes_of(spec)) for spec in specs} == {tuple(EQUAL)}
    assert all("podAntiAffinity" in spec["affinity"] for spec in specs)
    container = job["spec"]["trainer"] if to == "trainjob" else specs[0]["containers"][0]
    assert container["env"][0] == {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    _, anywhere = manifests_of(to, plan_on(EQUAL), nodes="any")
    assert "nodeAffinity" not in json.dumps(anywhere)
    assert '"metadata.name"' in json.dumps(anywhere)
    assert "--any-nodes" in json.dumps(anywhere)


def test_numbers_of_pods_and_ranks() -> None:
    file = plan_on(EQUAL)
    trainer = manifests_of("trainjob", file)[1]["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (4, 2)
    torch = manifests_of("pytorchjob", file)[1]["spec"]
    assert torch["nprocPerNode"] == "2"
    assert {role: spec["replicas"] for role, spec in torch["pytorchReplicaSpecs"].items()} == {"Master": 1, "Worker": 3}
    alone = manifests_of("pytorchjob", plan_on({"a": 2}))[1]["spec"]["pytorchReplicaSpecs"]
    assert list(alone) == ["Master"]
    [nodes] = manifests_of("jobset", file)[1]["spec"]["replicatedJobs"]
    assert (nodes["template"]["spec"]["completions"], nodes["template"]["spec"]["parallelism"]) == (4, 4)
    assert manifests_of("volcano", file)[1]["spec"]["minAvailable"] == 4


@pytest.mark.tier("ci")
@pytest.mark.parametrize("to", ["jobset", "volcano"])
def test_unequal_nodes_are_groups_of_their_own(to: str) -> None:
    _, job = manifests_of(to, plan_on(UNEQUAL))
    specs = pods_of(job)
    assert [nodes_of(spec) for spec in specs] == [["b"], ["a"]]
    commands = [spec["containers"][0]["command"] for spec in specs]
    assert [next(word for word in each if "nproc" in word) for each in commands] == [
        "--nproc-per-node=1",
        "--nproc-per-node=3",
    ]
    assert all("--nnodes=2" in each for each in commands)
    assert [place_of(command, 0) for command in commands] == ["0", "1"]
    meetings = {one["value"] for spec in specs for one in spec["containers"][0]["env"] if one["name"] == "MASTER_ADDR"}
    assert len(meetings) == 1


@pytest.mark.parametrize("to", ["trainjob", "pytorchjob", "kueue"])
def test_what_has_no_word_for_unequal_nodes_says_so(to: str) -> None:
    with pytest.raises(UnsupportedRequest, match=rf"{to} cannot express different numbers.*b has 1, a has 3"):
        manifests_of(to, plan_on(UNEQUAL))


def test_kueue_gets_stages_near_each_other_as_slices() -> None:
    level = {"topology_level": "cloud.provider.com/topology-rack"}

    def topology_request(file: PlanFile, **more: Any) -> dict[str, str]:
        job = manifests_of("kueue", file, **more)[1]
        assert job["spec"]["suspend"] is True
        assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
        annotations = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["metadata"]["annotations"]
        return {key.removeprefix("kueue.x-k8s.io/podset-"): value for key, value in annotations.items()}

    rack = level["topology_level"]
    assert topology_request(plan_on(EQUAL, switches=RACKS), **level) == {
        "slice-required-topology": rack,
        "slice-size": "2",
    }
    assert topology_request(plan_on(EQUAL), **level) == {"required-topology": rack}
    scattered = dict(zip(EQUAL, ("s1", "s1", "s1", "s2"), strict=True))
    assert topology_request(plan_on(EQUAL, switches=scattered), **level) == {"preferred-topology": rack}
    assert topology_request(plan_on(EQUAL)) == {"unconstrained-topology": "true"}


def test_kueue_refuses_what_it_cannot_promise() -> None:
    with pytest.raises(UnsupportedRequest, match="any nodes only"):
        manifests_of("kueue", plan_on(EQUAL), nodes="named")
    with pytest.raises(UnsupportedRequest, match="parts of nodes"):
        manifests_of("kueue", plan_on(EQUAL, devices={"gpu-a": 8}))
    with pytest.raises(UnsupportedRequest, match="parts of nodes"):
        manifests_of("kueue", plan_on(EQUAL, kind="cpu"))
    manifests_of("kueue", plan_on(EQUAL, kind="cpu"), cpus_per_task=4)


def test_volcano_gets_stages_near_each_other_as_partitions() -> None:
    _, job = manifests_of("volcano", plan_on(EQUAL, switches=RACKS), highest_tier=1, queue="training", restarts=2)
    [task] = job["spec"]["tasks"]
    assert task["partitionPolicy"] == {
        "totalPartitions": 2,
        "partitionSize": 2,
        "networkTopology": {"mode": "hard", "highestTierAllowed": 1},
    }
    assert "networkTopology" not in job["spec"]
    assert (job["spec"]["queue"], job["spec"]["maxRetry"]) == ("training", 3), "it counts before it restarts"
    _, near = manifests_of("volcano", plan_on(EQUAL), highest_tier=2)
    assert near["spec"]["networkTopology"] == {"mode": "hard", "highestTierAllowed": 2}
    assert "partitionPolicy" not in near["spec"]["tasks"][0]


def test_large_bundles_are_compressed_and_larger_ones_have_to_be_mounted(monkeypatch: pytest.MonkeyPatch) -> None:
    file = plan_on(EQUAL)
    plain, _ = manifests_of("jobset", file)
    monkeypatch.setattr(pods, "LARGEST_PLAIN_BYTES", 100)
    packed, job = manifests_of("jobset", file)
    unpacked = gzip.decompress(base64.b64decode(packed["binaryData"]["job.json.gz"])).decode()
    assert unpacked == plain["data"]["job.json"]
    command = pods_of(job)[0]["containers"][0]["command"]
    assert command[:2] == ["/bin/sh", "-c"]
    assert command[4] == "torchrun"
    assert pods.UNPACKED in command
    monkeypatch.setattr(pods, "LARGEST_CONFIG_MAP_BYTES", 100)
    with pytest.raises(UnsupportedRequest, match="a ConfigMap holds at most 100") as caught:
        manifests_of("jobset", file)
    assert "bundle_path" in str(caught.value)
    settings = LaunchSettings.parse({"model": "m:j", "steps": 1, "image": "i", "bundle_path": "/data/job.json"})
    [written] = make(file, "jobset", settings)
    [job] = yaml.safe_load_all(written.text)
    assert "/data/job.json" in pods_of(job)[0]["containers"][0]["command"]
    assert "configMap" not in written.text


def test_node_names_that_kubernetes_does_not_have() -> None:
    for name in ("Upper", "under_score", "a" * 254, "ü", "a b"):
        with pytest.raises(UnsupportedRequest, match="cannot name the plan's node"):
            manifests_of("jobset", plan_on({name: 1, "other": 1}))
    long = "n" * 60 + "." + "m" * 60
    assert nodes_of(pods_of(manifests_of("jobset", plan_on({long: 1}))[1])[0]) == [long]


SITE = {
    "labels": ["team=vision", "kueue.x-k8s.io/priority-class=high"],
    "annotations": ["k8s.v1.cni.cncf.io/networks=rdma-a, rdma-b"],
    "pod": {
        "nodeSelector": {"pool": "training"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "imagePullSecrets": [{"name": "registry"}],
        "volumes": [
            {"name": "shared-memory", "emptyDir": {"sizeLimit": "64Gi"}},
            {"name": "scratch", "emptyDir": {}},
        ],
    },
    "container": {
        "resources": {"limits": {"rdma/ib": 8, "memory": "1Ti"}},
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
        "env": [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "tracker", "key": "token"}}}],
        "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
    },
}


@pytest.mark.parametrize("to", KINDS)
def test_what_a_site_adds_to_its_pods(to: str) -> None:
    plain, more = (manifests_of(to, plan_on(EQUAL), **settings)[1] for settings in ({}, SITE))
    assert more["metadata"]["labels"].items() >= {"team": "vision", "kueue.x-k8s.io/priority-class": "high"}.items()
    assert more["metadata"]["annotations"].keys() == {"penstock/plan", "k8s.v1.cni.cncf.io/networks"}
    [before, *_], [spec, *_] = pods_of(plain), pods_of(more)
    assert (spec["nodeSelector"], len(spec["tolerations"])) == ({"pool": "training"}, 1)
    assert spec["affinity"] == before["affinity"]
    shared, job, scratch = spec["volumes"]
    assert shared == {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}}
    assert (job, scratch["name"]) == (before["volumes"][1], "scratch")
    [container] = spec["containers"]
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/dev/shm", "/etc/penstock", "/scratch"]
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    starts = more["spec"]["trainer"] if to == "trainjob" else container
    resources = starts["resourcesPerNode" if to == "trainjob" else "resources"]
    assert resources == {"limits": {"nvidia.com/gpu": 2, "rdma/ib": 8, "memory": "1Ti"}}
    assert [one["name"] for one in starts["env"]][:: len(starts["env"]) - 1] == ["NODE_NAME", "TOKEN"]


def test_what_starts_the_ranks_stays_as_it_is() -> None:
    for more, pointer in (
        ({"pod": {"affinity": {}}}, "/pod/affinity"),
        ({"container": {"command": ["sh"]}}, "/container/command"),
        ({"container": {"env": [{"name": "NODE_NAME", "value": "x"}]}}, None),
        ({"pod": '{"a"'}, "/pod"),
        ({"container": []}, "/container"),
        ({"labels": ["team=" + "x" * 64]}, "/labels/0"),
    ):
        with pytest.raises(InvalidDocument) as caught:
            manifests_of("jobset", plan_on(EQUAL), **more)
        assert [fault.pointer for fault in caught.value.faults] == ([] if pointer is None else [pointer])
    with pytest.raises(InvalidDocument, match="trainjob cannot add hostNetwork to a pod"):
        manifests_of("trainjob", plan_on(EQUAL), pod={"hostNetwork": True})
    manifests_of("jobset", plan_on(EQUAL), pod={"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"})


def test_additions_are_merged_by_name() -> None:
    base = {"a": [{"name": "x", "n": 1}], "b": [1], "c": {"d": 1}, "e": 1}
    more = {"a": [{"name": "y"}, {"name": "x", "m": 2}], "b": [2], "c": {"f": 2}, "e": {"g": 3}}
    assert merged(base, more) == {
        "a": [{"name": "x", "n": 1, "m": 2}, {"name": "y"}],
        "b": [1, 2],
        "c": {"d": 1, "f": 2},
        "e": {"g": 3},
    }


def test_restarts_are_of_the_whole_job_as_each_controller_counts_them() -> None:
    """Training Operator sums the restarts of all containers; Volcano's count is in its own test."""
    job = manifests_of("pytorchjob", plan_on(EQUAL), restarts=2)[1]["spec"]
    assert {replica["restartPolicy"] for replica in job["pytorchReplicaSpecs"].values()} == {"OnFailure"}
    assert job["runPolicy"]["backoffLimit"] == 2 * len(EQUAL) + 1
    once = manifests_of("pytorchjob", plan_on(EQUAL))[1]["spec"]
    assert {replica["restartPolicy"] for replica in once["pytorchReplicaSpecs"].values()} == {"Never"}
    assert once["runPolicy"]["backoffLimit"] == 0
    assert manifests_of("jobset", plan_on(EQUAL), restarts=2)[1]["spec"]["failurePolicy"] == {"maxRestarts": 2}


def test_the_name_that_ranks_go_by_is_not_for_users() -> None:
    with pytest.raises(InvalidDocument, match="NODE_NAME"):
        manifests_of("jobset", plan_on(EQUAL), environment=["NODE_NAME=x"])


@given(st.text(min_size=1), st.integers(20, 63))
def test_any_name_becomes_a_legal_one(name: str, longest: int) -> None:
    assert NAME.fullmatch(name_ := legal(name, longest))
    assert len(name_) <= longest
    assert legal(name_, longest) == name_


def test_names_that_are_cut_or_changed_stay_different() -> None:
    names = ["a" * 90 + "1", "a" * 90 + "2", "My Job", "my job", "my-job", "1", "-1"]
    assert len({legal(name, 40) for name in names}) == len(names)
