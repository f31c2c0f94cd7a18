"""``GET /v1/plans/{hash}:export``: schedulers' jobs over HTTP, as one file or as an archive."""

from __future__ import annotations

import io
import stat
import zipfile
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from penstock.cli.main import main
from penstock.client import Client
from penstock.examples.tiny import tiny_topology
from penstock.manifests import make
from penstock.schemas.errors import Conflict, InvalidDocument, NotFound
from penstock.schemas.ranks.launch import LaunchSettings
from penstock.schemas.topology import ClusterTopology

JOB = {"model": "m:job", "steps": "3"}


def test_one_file_comes_as_it_is(http: httpx.Client, planned: Any) -> None:
    query = {"to": "jobset", "image": "i", "environment": ["A=1", "B=2"], **JOB}
    answer = http.get(f"/v1/plans/{planned.result.plan_hash}:export", params=query)
    assert answer.status_code == 200
    assert answer.headers["content-type"].partition(";")[0] == "application/yaml"
    assert answer.headers["content-disposition"] == 'attachment; filename="job.yaml"'
    _, job = yaml.safe_load_all(answer.text)
    assert job["metadata"]["annotations"]["penstock/plan"] == planned.result.plan_hash
    pod = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert [one["name"] for one in pod["containers"][0]["env"][-2:]] == ["A", "B"]


def test_several_files_come_as_an_archive_that_is_always_the_same(
    http: httpx.Client, client: Client, planned: Any
) -> None:
    answer = http.get(f"/v1/plans/{planned.result.plan_hash}:export", params={"to": "sbatch", **JOB})
    assert answer.headers["content-type"] == "application/zip"
    assert answer.headers["content-disposition"].endswith('.sbatch.zip"')
    settings = LaunchSettings.parse(JOB)
    assert client.plans.export(planned.id, "sbatch", settings) == answer.content
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        contents = {
            entry.filename: (archive.read(entry).decode(), entry.external_attr >> 16) for entry in archive.infolist()
        }
    exported = make(client.plans.file(planned.id), "sbatch", settings)
    assert {name: text for name, (text, _) in contents.items()} == {each.name: each.text for each in exported}
    assert stat.S_IMODE(contents["job.sbatch"][1]) == 0o755


@pytest.mark.parametrize(
    ("query", "pointer"),
    [
        pytest.param({"to": "sbatch", "steps": "x"}, "/query/steps", id="number"),
        pytest.param({"to": "sbatch", "unheard": "1"}, "/query/unheard", id="unknown"),
        pytest.param({"to": "png"}, "/query/to", id="form"),
    ],
)
def test_bad_parameters_are_named(http: httpx.Client, planned: Any, query: dict[str, str], pointer: str) -> None:
    answer = http.get(f"/v1/plans/{planned.result.plan_hash}:export", params=query)
    assert answer.status_code == 422
    assert [fault["pointer"] for fault in answer.json()["errors"]] == [pointer]


def test_the_clients_error_is_the_services(client: Client, planned: Any) -> None:
    with pytest.raises(InvalidDocument, match="sbatch needs `model` and `steps`") as caught:
        client.plans.export(planned.id, "sbatch")
    assert caught.value.remedy == "--set model=… --set steps=…; over HTTP &model=…&steps=… in the query"


def test_a_plan_for_nodes_that_are_gone(client: Client, planned: Any) -> None:
    there = ClusterTopology.parse(tiny_topology())
    assert (
        client.plans.export(planned.id, "hostfile", against=client.topologies.create(there).hash) == b"node0\nnode1\n"
    )
    assert there.uniform is not None
    fewer = client.topologies.create(
        there.model_copy(update={"uniform": there.uniform.model_copy(update={"nodes": 1})})
    ).hash
    with pytest.raises(Conflict, match="there is no node 'node1'"):
        client.plans.export(planned.id, "hostfile", against=fewer)
    with pytest.raises(NotFound):
        client.plans.export(planned.id, "hostfile", against="sha256:" + "7" * 64)


def test_the_command_line_asks_a_service(http: httpx.Client, planned: Any, tmp_path: Path) -> None:
    command = ["export", planned.id, "--server", str(http.base_url), "--job", "m:job", "--steps", "3"]
    assert main([*command, "--to", "sbatch", "-o", str(tmp_path / "job")]) == 0
    assert (tmp_path / "job" / "job.sbatch").stat().st_mode & 0o111
    assert main([*command, "--to", "jobset", "--image", "i", "-o", str(tmp_path)]) == 0
    assert (tmp_path / "job.yaml").exists()
