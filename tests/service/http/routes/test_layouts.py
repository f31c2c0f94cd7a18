"""POST /v1/layouts:import, its client, the forms of other trainers, and the command with --server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from urllib.parse import unquote

import httpx
import pytest
from in_process import in_process
from service_process import Server

from penstock.cli.main import main
from penstock.client import Client
from penstock.examples.tiny import tiny_layout, tiny_request
from penstock.schemas.api.layouts import LayoutRequest
from penstock.schemas.errors import InvalidDocument, UnsupportedRequest
from penstock.schemas.plan import Plan
from penstock.schemas.request import PlanRequest

PATH = "/v1/layouts:import"


def test_a_layout_is_judged_beside_the_best(client: Client, http: httpx.Client) -> None:
    layout_request = LayoutRequest.parse(tiny_layout() | {"compare": True})
    imported = client.import_layout(layout_request)
    assert (imported.fits, imported.faults) == (True, ())
    assert [rival.choice for rival in imported.rivals] == ["within what deepspeed can express", "without limits"]
    assert imported.plan.prediction is not None
    assert all(rival.time_ns <= imported.plan.prediction.time_per_global_batch_ns for rival in imported.rivals)  # type: ignore[operator]
    profile = client.profiles.create(layout_request.request.profile)  # type: ignore[arg-type]
    topology = client.topologies.create(layout_request.request.topology)  # type: ignore[arg-type]
    by_hash = tiny_layout() | {"request": tiny_request() | {"profile": profile.hash, "topology": topology.hash}}
    assert http.post(PATH, json=by_hash).json()["plan"] == imported.plan.model_dump(mode="json")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layout": '{"parts": [0, 5]}'}, "from 0 to 4"),
        ({"format": "megatron"}, "do not say which"),
        ({"format": "gpipe"}, "format"),
        ({"layout": ""}, "layout"),
        ({"nodes": "node[0-"}, ""),
        ({"nodes": "node7"}, "no node 'node7'"),
        ({"devices_per_node": 2}, "has 1 devices, not 2"),
        ({"micro_batch_size": 0}, "micro_batch_size"),
        ({"colour": 1}, "colour"),
    ],
)
def test_bad_layouts_are_told(http: httpx.Client, changes: dict[str, object], words: str) -> None:
    answer = http.post(PATH, json=tiny_layout() | changes)
    assert answer.status_code == 422
    assert words in answer.text


def test_releases_and_what_a_file_has_no_place_for(client: Client, http: httpx.Client) -> None:
    job = client.plans.create(PlanRequest.parse(tiny_request() | {"target": "torchtitan", "recompute": "always"}))
    path = f"/v1/plans/{job.result.plan_hash}:export"
    for release, kind, ending in (("0.3", "text/x-python", "py"), ("0.2.2", "application/toml", "toml")):
        answer = http.get(path, params={"to": "torchtitan", "release": release})
        assert answer.headers["content-type"].partition(";")[0] == kind
        assert answer.headers["content-disposition"].endswith(f'.torchtitan.{ending}"')
    assert http.get(path, params={"to": "torchtitan"}).content == http.get(
        path, params={"to": "torchtitan", "release": "0.3"}
    ).content  # fmt: skip
    for params in ({"to": "torchtitan", "release": "0.1"}, {"to": "csv", "release": "0.3"}):
        assert http.get(path, params=params).status_code == 422
    answer = http.get(path, params={"to": "csv"})
    assert answer.status_code == 200
    assert "recomputed are stage 0 layers" in unquote(answer.headers["penstock-notes"])
    assert "penstock-notes" not in http.get(path, params={"to": "svg"}).headers


def test_plans_are_exported_for_trainers_that_can_express_them(client: Client) -> None:
    job = client.plans.create(PlanRequest.parse(tiny_request() | {"target": "deepspeed"}))
    assert b"PARTS = [0, " in client.plans.export(job.id, "deepspeed")
    assert json.loads(client.plans.export(job.id, "ranges"))["layers"][0][0] == 0
    with pytest.raises(UnsupportedRequest, match="do not say which"):
        client.plans.export(job.id, "megatron")


def test_the_command_asks_a_service(shared_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request, layout, plan = tmp_path / "request.json", tmp_path / "parts.json", tmp_path / "plan.json"
    request.write_text(json.dumps(tiny_request()))
    layout.write_text(tiny_layout()["layout"])
    command = ["import", "layout", str(layout), "--from", "deepspeed", "--request", str(request), "--alone"]
    assert main([*command, "--server", shared_server.url, "-o", str(plan)]) == 0
    assert "per global batch" in capsys.readouterr().out
    assert plan.stat().st_size > 0
    layout.write_text('{"parts": [0, 2]}')
    assert main([*command, "--server", shared_server.url]) == InvalidDocument.exit_code
    assert "from 0 to 2" in capsys.readouterr().err


def test_a_question_that_plans_nothing_has_seconds_and_says_so(tmp_path: Path) -> None:
    async def run() -> None:
        async with in_process(tmp_path, max_question_s=1e-6) as client:
            refused = await client.post(PATH, json=tiny_layout() | {"compare": False})
            assert (refused.status_code, refused.json()["code"]) == (504, "time-limit")
            assert (await client.post(PATH, json=tiny_layout() | {"compare": True})).status_code == 200

    asyncio.run(run())


def test_a_script_that_stands_for_too_much_is_refused(http: httpx.Client) -> None:
    lines = ["A0=x", *(f"A{i}=$A{i - 1}$A{i - 1}" for i in range(1, 29))]
    script = "\n".join([*lines, "torchrun pretrain_gpt.py --pipeline-model-parallel-size $A28"])
    request = {"model": "gpt2-small", "cluster": "4x1xV100", "global_batch_size": 8}
    body = {"schema_version": 1, "format": "megatron", "layout": script, "request": request, "compare": False}
    refused = http.post(PATH, json=body)
    assert refused.status_code == 422
    assert "reading the layout takes more than the allowed 200,000 steps" in refused.text


SCRIPT = """
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
  --micro-batch-size 1 --global-batch-size 32 --num-layers 4 --hidden-size 512 --ffn-hidden-size 1536 --bf16
  --num-attention-heads 8 --seq-length 256 --position-embedding-type rope --vocab-size 1024
""".replace("\n  ", " ")


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ({}, []),
        ({"model": "gpt2-small", "sequence_length": 512}, ["--example", "gpt2-small", "--sequence-length", "512"]),
    ],
    ids=["the model of the script", "a model by name"],
)
def test_a_script_alone_is_judged_as_the_command_judges_it(
    http: httpx.Client, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: dict[str, object], options: list[str]
) -> None:
    """Its batch and, without a name, its model are read by the service, with costs at its degrees."""
    script = SCRIPT if not model else SCRIPT.partition("--num-layers")[0]
    (tmp_path / "train.sh").write_text(script)
    command = ["import", "layout", str(tmp_path / "train.sh"), "--from", "megatron", "--cluster", "1x8xH100", *options]
    assert main([*command, "--alone", "--json"]) == 0
    mine = json.loads(capsys.readouterr().out)
    job = {"cluster": "1x8xH100", **model}
    body = {"format": "megatron", "layout": script, "source": "train.sh", "request": job, "compare": False}
    answer = http.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    theirs = answer.json()
    assert Plan.parse(theirs["plan"]) == Plan.parse(mine["plan"])
    assert theirs["plan"]["degrees"]["tensor"] == 2
    assert theirs["request"]["global_batch_size"] == 32
    assert theirs["sentences"] == mine["sentences"]


@pytest.mark.parametrize(
    ("layout", "job", "words"),
    [
        (SCRIPT.replace("--num-layers 4", ""), {}, "num-layers"),
        (SCRIPT.replace("--global-batch-size 32", "--global-batch-size $B"), {}, "$B"),
        (SCRIPT.replace("size 32", "size 900000000"), {}, "more than the limit of 1048576 micro-batches"),
        (SCRIPT, {"model": "gpt2-smal"}, "gpt2-small"),
        (SCRIPT, {"model": "resnet-50", "sequence_length": 512}, "not of no stated framework and samples of 512"),
        (SCRIPT, {"model": "gpt2-small", "profile": "sha256:" + "0" * 64}, "not both"),
        (SCRIPT, {"hugging_face": {"model_type": "nothing"}}, "nothing"),
    ],
)
def test_what_a_script_leaves_open_is_said(http: httpx.Client, layout: str, job: dict[str, object], words: str) -> None:
    body = {"format": "megatron", "layout": layout, "request": {"cluster": "1x8xH100", **job}, "compare": False}
    answer = http.post(PATH, json=body)
    assert answer.status_code == 422
    assert words in answer.text
