"""``/v1/placements``: the same answer as Python gives, refusals that help, and the Kubernetes example on top of it."""

from __future__ import annotations

import asyncio
import json
import runpy
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
import yaml
from repository import ROOT

import penstock
from penstock.client import AsyncClient, Client
from penstock.examples.tiny import tiny_placement, tiny_profile, tiny_topology
from penstock.placing import answer
from penstock.schemas.api.placement import PlacementProgress, PlacementRequest
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.profile import ModelProfile
from penstock.schemas.topology import ClusterTopology

EXAMPLE = ROOT / "examples/schedulers/kubernetes"
GATE = "penstock.dev/placement"


def test_the_service_places_as_python_does(client: Client) -> None:
    placement = PlacementRequest.parse(_with_job(planner="gpipe"))
    there = client.place(placement)
    assert there == answer(placement)
    assert there.choices[0].hostlist
    by_hash = _with_job(planner="gpipe") | {
        "topology": client.topologies.create(ClusterTopology.parse(tiny_topology())).hash
    }
    by_hash["jobs"][0]["profile"] = client.profiles.create(ModelProfile.parse(tiny_profile())).hash
    assert client.place(PlacementRequest.parse(by_hash)) == there

    async def elsewhere() -> Any:
        async with AsyncClient(str(client._http.base_url)) as other:
            return await other.place(placement)

    assert asyncio.run(elsewhere()) == there


def test_a_placement_tells_how_far_it_is(client: Client, http: httpx.Client) -> None:
    placement = PlacementRequest.parse(tiny_placement())
    heard: list[PlacementProgress] = []
    there = client.place(placement, on_progress=heard.append)
    assert there == answer(placement)
    settled = [progress.settled for progress in heard]
    assert settled == sorted(settled)
    assert 0 < settled[-1] <= heard[-1].considered
    assert heard[-1].time_per_global_batch_ns == there.choices[0].time_per_global_batch_ns
    with pytest.raises(InvalidDocument, match="'free' names 1 node that the topology"):
        client.place(placement.model_copy(update={"free": ("node9",)}), on_progress=heard.append)
    events = http.post("/v1/placements", json=tiny_placement(), headers={"Accept": "text/event-stream"})
    assert events.headers["content-type"].startswith("text/event-stream")
    names = [line.removeprefix("event: ") for line in events.text.splitlines() if line.startswith("event: ")]
    assert (names[0], *names[-2:]) == ("progress", "result", "end")


def _changed(**fields: Any) -> dict[str, Any]:
    return tiny_placement() | {"free": None, **fields}


def _with_job(**fields: Any) -> dict[str, Any]:
    return tiny_placement() | {"jobs": [tiny_placement()["jobs"][0] | fields]}


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (_changed(free=["node[0-3]"]), 422, "'node2' is neither a node nor a device"),
        (_changed(free=["node[0-"]), 422, "node[0-"),
        (_changed(free=[]), 409, "no device of 'two-nodes' is free"),
        (_changed(busy=["node[0-1]"]), 409, "all are listed as busy"),
        (_changed(free=["node0"], busy=["node1"]), 422, "either `free` or `busy`"),
        (_with_job(nodes={"min": 3, "max": 2}), 422, "min 3 is more than max 2"),
        (_with_job(nodes={"min": 3}), 422, "needs at least 3 nodes, and 2 are free"),
        (_with_job(budget={}), 422, "a budget needs"),
        (_with_job(budget={"price_per_hour": 4}), 422, "without a price"),
        (_with_job(planner="daple"), 422, "did you mean 'dapple'"),
        (_with_job(profile="sha256:" + "0" * 64), 404, "sha256:"),
        (_changed(jobs=[tiny_placement()["jobs"][0]] * 2), 422, "'tiny' occurs twice"),
        (_changed(objective="fastest_within_budget"), 422, "has no budget"),
        (_changed(together="joint", objective="throughput_per_device"), 422, "needs objective 'throughput'"),
    ],
)
def test_what_cannot_be_placed_is_refused_with_what_to_do(
    http: httpx.Client, body: dict[str, Any], status: int, words: str
) -> None:
    refused = http.post("/v1/placements", json=body)
    assert refused.status_code == status, refused.text
    assert words in json.dumps(refused.json(), ensure_ascii=False)


@pytest.mark.tier("nightly")
def test_a_job_that_fits_nowhere_is_an_answer_with_the_bytes_that_are_missing(http: httpx.Client) -> None:
    placed = http.post("/v1/placements", json=_with_job(memory={"headroom_bytes": 15_999_000_000})).json()
    (choice,) = placed["choices"]
    assert choice["status"] == "infeasible"
    assert "bytes) are missing" in choice["why"][0]


class Kubernetes(ThreadingHTTPServer):
    """The few endpoints of an API server that the controller uses, with its rules for gated pods."""

    def __init__(self, pods: list[dict[str, Any]], nodes: list[dict[str, Any]]) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.pods, self.nodes = {pod["metadata"]["name"]: pod for pod in pods}, nodes
        self.maps: dict[str, Any] = {}
        self.changed_meanwhile: set[str] = set()
        self.refused: set[str] = set()


class _Answers(BaseHTTPRequestHandler):
    server: Kubernetes

    def do_GET(self) -> None:
        lists = {"/api/v1/pods": list(self.server.pods.values()), "/api/v1/nodes": self.server.nodes}
        if self.path in lists:
            self._say(200, {"items": lists[self.path]})
        elif (name := self.path.rpartition("/")[2]) in self.server.maps:
            self._say(200, self.server.maps[name])
        else:
            self._say(404, {"kind": "Status", "code": 404})

    def do_POST(self) -> None:
        body = self._body()
        assert len(json.dumps(body)) < 1 << 20
        if body["metadata"]["name"] in self.server.refused:
            self._say(403, {"kind": "Status", "code": 403, "message": "exceeded quota"})
            return
        self.server.maps[body["metadata"]["name"]] = body
        self._say(201, body)

    def do_PATCH(self) -> None:
        assert self.headers["Content-Type"] == "application/merge-patch+json"
        pod, patch = self.server.pods[self.path.rpartition("/")[2]], self._body()
        name = pod["metadata"]["name"]
        if name in self.server.changed_meanwhile:
            self.server.changed_meanwhile.remove(name)
            pod["metadata"]["resourceVersion"] += "1"
        if patch["metadata"]["resourceVersion"] != pod["metadata"]["resourceVersion"]:
            self._say(409, {"kind": "Status", "code": 409})
            return
        before = {gate["name"] for gate in pod["spec"]["schedulingGates"]}
        assert {gate["name"] for gate in patch["spec"]["schedulingGates"]} == before - {GATE}
        assert "nodeSelector" not in pod["spec"], "a gated pod's selector can only be added to"
        pod["spec"] |= patch["spec"]
        self._say(200, pod)

    def _body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def _say(self, status: int, body: Any) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def _node(name: str, *, ready: bool = True, gpus: int = 2, **spec: Any) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    status = {"conditions": conditions, "allocatable": {"cpu": "8", **({"nvidia.com/gpu": str(gpus)} if gpus else {})}}
    return {"metadata": {"name": name}, "spec": spec, "status": status}


def _pods(job: str, profile: str, count: int, born: str, **annotations: str) -> list[dict[str, Any]]:
    """Return the pods that Kubernetes creates for the example's Job."""
    template = yaml.safe_load((EXAMPLE / "job.yaml").read_text())["spec"]["template"]
    annotations_of_pod = template["metadata"]["annotations"] | {
        "penstock.dev/profile": profile,
        "penstock.dev/pods": str(count),
    }
    return [
        {
            "metadata": {
                "name": f"{job}-{index}",
                "namespace": "default",
                "resourceVersion": "7",
                "creationTimestamp": born,
                "ownerReferences": [
                    {"apiVersion": "batch/v1", "kind": "Job", "name": job, "uid": job + born, "controller": True}
                ],
                "labels": {"batch.kubernetes.io/job-name": job},
                "annotations": annotations_of_pod | {"penstock.dev/global-batch-size": "16"} | annotations,
            },
            "spec": json.loads(json.dumps(template["spec"])),
            "status": {"phase": "Pending"},
        }
        for index in range(count)
    ]


@pytest.fixture
def controller_of(client: Client) -> Iterator[Any]:
    """A function that makes a controller for an API server, which it starts."""
    module = runpy.run_path(str(EXAMPLE / "controller.py"))
    uniform = tiny_topology()["uniform"] | {"nodes": 4}
    topology = client.topologies.create(ClusterTopology.parse(tiny_topology() | {"uniform": uniform}).expanded()).hash
    running: list[tuple[Kubernetes, threading.Thread, httpx.Client]] = []

    def make(pods: list[dict[str, Any]], nodes: list[dict[str, Any]]) -> Any:
        server = Kubernetes(pods, nodes)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        connection = httpx.Client(base_url=f"http://127.0.0.1:{server.server_port}")
        running.append((server, thread, connection))
        return server, module["Controller"](connection, client._http, topology)

    yield make
    for server, thread, connection in running:
        connection.close()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.tier("nightly")
def test_gated_pods_of_kubernetes_go_to_nodes_that_the_service_chooses(client: Client, controller_of: Any) -> None:
    profile = client.profiles.create(ModelProfile.parse(tiny_profile())).hash
    first, second = _pods("first", profile, 2, "2026-01-01"), _pods("second", profile, 2, "2026-01-02")
    control = [{"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}]
    nodes = [
        _node("node0"),
        _node("node1", taints=[{"key": "old", "effect": "PreferNoSchedule"}]),
        _node("node2", ready=False),
        _node("node3", unschedulable=True),
        _node("control", gpus=0, taints=control),
        _node("cpu-only", gpus=0),
        _node("new-in-the-cluster"),
    ]
    server, controller = controller_of(first + second, nodes)
    server.changed_meanwhile.add("first-1")
    assert controller.once() == 1, "the other pod was changed by somebody else"
    assert controller.once() == 1
    chosen = {pod["spec"]["nodeSelector"]["kubernetes.io/hostname"] for pod in first}
    assert chosen == {"node0", "node1"}
    assert all(pod["spec"]["schedulingGates"] == [] for pod in first)
    plan = json.loads(server.maps["first-plan"]["data"]["plan.json"])
    assert penstock.judge(penstock.schemas.plan.PlanFile.parse(plan)).faults == ()
    assert all("nodeSelector" not in pod["spec"] for pod in second), "no node is left"
    assert controller.once() == 0
    for pod in first:
        pod["status"]["phase"] = "Succeeded"
    nodes[0]["spec"]["taints"] = [{"key": "dedicated", "value": "x", "effect": "NoSchedule"}]
    assert controller.once() == 0
    second[0]["spec"]["tolerations"] = [{"key": "dedicated", "value": "x", "effect": "NoSchedule"}]
    assert controller.once() == 2


@pytest.mark.tier("nightly")
def test_a_decision_is_carried_out_for_its_own_job_and_on_free_nodes_only(client: Client, controller_of: Any) -> None:
    profile = client.profiles.create(ModelProfile.parse(tiny_profile())).hash
    pods = _pods("train", profile, 2, "2026-01-01")
    nodes = [_node("node0"), _node("node1")]
    server, controller = controller_of(pods, nodes)
    server.changed_meanwhile |= {"train-0", "train-1"}
    assert controller.once() == 0, "the decision is written down, and no gate has fallen"
    decision = server.maps["train-plan"]
    assert decision["metadata"]["ownerReferences"] == [
        {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "train2026-01-01"}
    ]
    nodes[1]["spec"]["unschedulable"] = True
    assert controller.once() == 1
    for pod in pods:
        pod["metadata"]["ownerReferences"][0]["uid"] = "the next job of this name"
    nodes[1]["spec"]["unschedulable"] = False
    assert controller.once() == 0
    decision["metadata"]["ownerReferences"][0]["uid"] = "the next job of this name"
    assert controller.once() == 1


def test_a_job_of_kubernetes_that_is_not_complete_or_not_well_described_waits(
    client: Client, controller_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    profile = client.profiles.create(ModelProfile.parse(tiny_profile())).hash
    incomplete = _pods("incomplete", profile, 2, "2026-01-01")[:1]
    wordy = _pods("wordy", profile, 1, "2026-01-02", **{"penstock.dev/global-batch-size": "many"})
    unknown = _pods("unknown", "sha256:" + "0" * 64, 1, "2026-01-03")
    forbidden = _pods("forbidden", profile, 1, "2026-01-04")
    server, controller = controller_of([*incomplete, *wordy, *unknown, *forbidden], [_node("node0"), _node("node1")])
    server.refused.add("forbidden-plan")
    assert controller.once() == 0
    assert server.maps == {}
    log = caplog.text
    assert "the annotation penstock.dev/global-batch-size of wordy-0 is not a number: 'many'" in log
    assert "unknown: Penstock answers 404" in log
    assert "exceeded quota" in log, "and those before it did not keep it from being tried"
