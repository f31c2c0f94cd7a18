"""Pages without a browser: each is whole, no link is dead, forms say what is wrong, nothing inline becomes markup."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pages_read import NAMES, Form, Page
from service_process import Server

import penstock
from penstock.client import Client
from penstock.examples import catalogue
from penstock.examples.tiny import tiny_profile, tiny_request
from penstock.planning.inputs import with_open_degrees
from penstock.schemas.api.jobs import JobOut
from penstock.schemas.request import PlanRequest
from penstock.service.pages.form import EXAMPLES

MOST_BYTES = 300_000
AS_A_BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
FORM = {
    "model": "gpt2-small",
    "cluster": "1x4xV100",
    "global_batch_size": "16",
    "planner": "dp",
    "schedule": "auto",
    "update_rules": "synchronous",
    "time_limit": "60",
}


@pytest.fixture(scope="module")
def shared_server(own_server: Server) -> Server:
    """Every page of it is read."""
    return own_server


@pytest.fixture(scope="module")
def http(shared_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=shared_server.url, timeout=120) as http:
        yield http


@pytest.fixture(scope="module")
def planned(shared_server: Server) -> JobOut:
    """A job whose plan is there."""
    return shared_server.client.plans.create(PlanRequest.parse(tiny_request() | {"planner": "dp"}))


def read(http: httpx.Client, address: str) -> Page:
    answer = http.get(address, headers=AS_A_BROWSER, follow_redirects=True)
    assert answer.status_code == 200, f"{address}: {answer.status_code} {answer.text[:300]}"
    return Page(answer.text)


def form(page: Page, action: str) -> Form:
    return next(form for form in page.forms if form.action == action)


def send(http: httpx.Client, action: str, fields: Any) -> httpx.Response:
    return http.post(action, data=fields, headers={"Sec-Fetch-Site": "same-origin"})


def ended(http: httpx.Client, job_id: str) -> JobOut:
    """Return a job once it has ended."""
    answer = http.get(f"/v1/jobs/{job_id.rpartition('/')[2]}", headers={"Prefer": "wait=100"})
    return JobOut.model_validate_json(answer.raise_for_status().content)


def body_of(form: Form, **changed: str) -> dict[str, list[str]]:
    """Return a form's fields, with some of them changed."""
    fields: dict[str, list[str]] = {}
    for name, value in form.fields:
        fields.setdefault(name, []).append(value)
    return fields | {name: [value] for name, value in changed.items()}


@pytest.mark.tier("nightly")
def test_every_page_is_whole_and_no_link_is_dead(http: httpx.Client, planned: JobOut):
    sweep = send(http, "/compare", body_of(form(read(http, f"/plan?from={planned.id}"), "/plan"), planners="dp, gpipe"))
    assert sweep.status_code == 303
    assert planned.result is not None
    waiting = ["/", sweep.headers["location"], f"/compare?job={planned.id}", f"/plans/{planned.result.plan_hash}"]
    seen: set[str] = set()
    while waiting:
        address = waiting.pop()
        if address in seen or address.endswith("/what-if"):  # it searches for seconds, and has a separate test
            continue
        seen.add(address)
        answer = http.get(address, headers=AS_A_BROWSER, follow_redirects=True)
        assert answer.status_code == 200, f"{address}: {answer.status_code} {answer.text[:300]}"
        if not answer.headers["content-type"].startswith("text/html") or address.endswith("/report"):
            continue
        page = Page(answer.text)
        assert page.inline == [], address
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert (page.tags.count("h1"), page.tags.count("main"), page.tags.count("nav") > 0) == (1, 1, True), address
        assert len(page.ids) == len(set(page.ids)), f"{address}: an id is there twice"
        assert page.unnamed == [], f"{address}: fields without a label"
        inside = [link for link in (*page.links, *page.sources) if not link.startswith("#")]
        assert all(link.startswith(("/", "?")) for link in inside), address
        assert {link[1:] for link in page.links if link.startswith("#")} <= {*page.ids, ""}, address
        waiting += [link.partition("#")[0] for link in inside if link.startswith("/")]
        weight = len(answer.content) + sum(len(http.get(source).content) for source in set(page.sources))
        assert weight <= MOST_BYTES, f"{address} weighs {weight} bytes, with its scripts and styles"
    assert {f"/{name}" for name in NAMES} <= seen
    assert {f"/plan?{query}" for _, query in EXAMPLES} <= seen


@pytest.mark.tier("nightly")
def test_a_form_goes_to_its_plan(http: httpx.Client):
    first = send(http, "/plan", FORM)
    assert first.status_code == 303, first.text
    job_id = first.headers["location"].removeprefix("/jobs/")
    job = ended(http, job_id)
    assert job.result is not None
    assert job.result.plan_hash is not None
    again = send(http, "/plan", FORM)
    assert again.headers["location"] == f"/plans/{job.result.plan_hash}", "a known answer is shown at once"
    assert http.get(f"/jobs/{job_id}").status_code == 200
    assert f"/plan?from={job.result.plan_hash}" in read(http, f"/plans/{job_id}").links


@pytest.mark.parametrize(
    "request_more", [{"planner": "dp"}, {"planner": "dapple", "options": {"paper": True}, "recompute": "always"}]
)
def test_plan_again_begins_with_the_same_request(http: httpx.Client, client: Client, request_more: dict[str, Any]):
    more: dict[str, Any] = {
        "micro_batch_sizes": [1, 2],
        "termination": {"time_limit_ns": 90_000_000_000},
        "memory": {"headroom_bytes": 1024, "optimizer": "momentum"},
        "pins": [{"layers": [0, 0], "devices": ["node0/0"]}],
        **request_more,
    }
    request = PlanRequest.parse(tiny_request() | {"planner": "gpipe"} | more)
    job = client.plans.create(request)
    assert job.result is not None
    plan_form = form(read(http, f"/plan?from={job.id}"), "/plan")
    same = send(http, "/plan", body_of(plan_form))
    assert same.headers["location"] == f"/plans/{job.result.plan_hash}"
    other = send(http, "/plan", body_of(plan_form, global_batch_size="8"))
    assert other.status_code == 303
    changed = ended(http, other.headers["location"])
    assert changed.request_hash == request.model_copy(update={"global_batch_size": 8}).content_hash()


@pytest.mark.parametrize(
    ("changed", "fields"),
    [
        ({"global_batch_size": "many"}, ["global_batch_size"]),
        ({"global_batch_size": ""}, ["global_batch_size"]),
        ({"cluster": "8x8xH1000"}, ["cluster"]),
        ({"cluster": "nowhere", "model": "nothing", "time_limit": "soon"}, ["model", "cluster", "time_limit"]),
        ({"cluster": "agents"}, ["cluster"]),
        ({"profile_text": "{"}, ["profile_text"]),
        ({"profile_text": '{"name": 3}', "headroom": "much"}, ["profile_text", "headroom"]),
        ({"topology_text": '{"name": "x"}'}, ["topology_text"]),
        ({"planner": "gpipe", "option.gpipe.stages": "wide"}, ["option.gpipe.stages"]),
        ({"from": "sha256:" + "0" * 64}, []),
        ({"planner": "nobody"}, []),
        ({"planner": "wpipe"}, []),
        ({"update_rules": "sometimes"}, ["update_rules"]),
        ({"seed": "-1", "gap": "7", "max_plans": "0"}, ["seed", "gap", "max_plans"]),
    ],
)
def test_faults_stand_at_their_fields(http: httpx.Client, changed: dict[str, str], fields: list[str]):
    answer = send(http, "/plan", FORM | changed)
    assert answer.status_code == 422, answer.headers
    page = Page(answer.text)
    for name in fields:
        assert f"{name}-fault1" in page.ids, f"{name}: {''.join(page.text)}"
    assert "faults" in page.ids
    sent = dict(form(page, "/plan").fields)
    assert sent.get("global_batch_size") == (FORM | changed)["global_batch_size"], "what was typed is still there"


def test_compare_says_what_it_cannot(http: httpx.Client):
    for changed, fault in (
        ({"clusters": "2x2xV100, 9x9xNONE"}, "clusters-fault1"),
        ({"batches": "16, much"}, "batches-fault1"),
        ({"planners": "dp, dp"}, "faults"),
    ):
        answer = send(http, "/compare", FORM | changed)
        assert answer.status_code == 422
        assert fault in Page(answer.text).ids, answer.text


def test_buttons_of_a_job(http: httpx.Client, planned: JobOut):
    refused = send(http, f"/jobs/{planned.id}/cancel", {})
    assert refused.status_code == 409
    assert "has already ended (succeeded)" in "".join(Page(refused.text).text)
    assert send(http, "/jobs/nobody/cancel", {}).status_code == 404
    assert send(http, f"/jobs/{planned.id}/explode", {}).status_code == 422
    strange = http.post("/plan", data=FORM, headers={"Sec-Fetch-Site": "cross-site"})
    assert strange.status_code == 403, "another site may not press our buttons"


def test_what_a_document_holds_is_never_markup(http: httpx.Client, client: Client):
    profile: Any = tiny_profile() | {"name": "</title></script><script>alert(1)</script><b onclick=alert(2)>"}
    job = client.plans.create(PlanRequest.parse(tiny_request() | {"profile": profile, "planner": "dp"}))
    for address in (
        "/",
        "/jobs",
        f"/jobs/{job.id}",
        f"/plans/{job.id}",
        f"/compare?job={job.id}",
        f"/plan?from={job.id}",
    ):
        page = read(http, address)
        assert "b" not in page.tags
        assert page.inline == []
    plain = client.plans.create(PlanRequest.parse(tiny_request() | {"planner": "dp"}))
    tags = [Page(http.get(f"/plans/{one.id}/report").raise_for_status().text).tags for one in (job, plain)]
    assert tags[0].count("script") == tags[1].count("script") > 0
    assert "b" not in tags[0]


@pytest.mark.tier("nightly")
def test_the_same_in_python_and_on_the_command_line(
    http: httpx.Client, client: Client, monkeypatch: pytest.MonkeyPatch
):
    sent = send(http, "/plan", FORM | {"recompute": "always", "option.dp.overlap": "no"})
    job = ended(http, sent.headers["location"])
    text = "".join(read(http, f"/plans/{job.id}").text)
    requests: list[PlanRequest] = []

    class Kept:
        def save(self, path: str) -> None:
            assert path == "plan.json"

    def plan(profile: str, topology: str, **more: Any) -> Kept:
        documents = {
            "profile": penstock.planning.inputs.find_profile(profile),
            "topology": penstock.planning.inputs.find_topology(topology),
        }
        more["termination"] = {"time_limit_ns": round(more.pop("time_limit") * 1e9)}
        requests.append(PlanRequest.parse(documents | more))
        return Kept()

    monkeypatch.setattr(penstock, "plan", plan)
    call = text[text.index("import penstock") :]
    exec(call[: call.index('answer.save("plan.json")') + len('answer.save("plan.json")')], {})
    assert [request.content_hash() for request in requests] == [job.request_hash]
    words = "penstock plan --example gpt2-small --cluster 1x4xV100 -b 16 --planner dp --recompute always"
    assert f"{words} --set overlap=no --time-limit 60 -o plan.json" in text
    request = http.get(f"/plans/{job.id}/request").content
    assert PlanRequest.parse_json(request).content_hash() == job.request_hash


def test_a_plan_says_how_it_was_found(http: httpx.Client, planned: JobOut, client: Client):
    """Every clause of the answer is on the pages of the job and of its plan, by either address."""
    answered = client.plans.create(PlanRequest.parse(tiny_request()))
    for job in (planned, answered):
        assert job.result is not None
        clauses = job.result.why
        assert len(clauses) > 1
        for address in (f"/jobs/{job.id}", f"/plans/{job.id}", f"/plans/{job.result.plan_hash}"):
            text = "".join(read(http, address).text)
            assert "How it was found" in text
            assert all(clause in text for clause in clauses), address


def test_a_plan_lists_the_degrees_that_were_compared(http: httpx.Client, client: Client):
    profile, cluster = catalogue.profile("gpt2-small"), catalogue.cluster("1x2xV100")
    request = PlanRequest(profile=profile, topology=cluster, global_batch_size=4, planner="even")
    result = client.plans.create(with_open_degrees(request)).result
    assert result is not None
    assert len(result.alternatives) > 4
    text = "".join(read(http, f"/plans/{result.plan_hash}").text)
    assert "Degrees compared" in text
    assert all(row.why in text for row in result.alternatives)
    assert "TP 2, optimizer sharded" in text


def test_timelines_and_finer_parts(http: httpx.Client, planned: JobOut):
    whole = http.get(f"/plans/{planned.id}/timeline").raise_for_status().json()
    assert len(whole["lanes"]) == 2
    part = {"from": 0, "to": whole["end_ns"] // 2, "columns": 100}
    finer = http.get(f"/plans/{planned.id}/timeline", params=part).raise_for_status().json()
    assert (finer["from_ns"], finer["to_ns"]) == (0, whole["end_ns"] // 2)
    assert http.get("/plans/nobody/timeline").status_code == 404


def test_what_if(http: httpx.Client, planned: JobOut):
    text = "".join(read(http, f"/plans/{planned.id}/what-if?change=bandwidth%3D2").text)
    assert "What if" in text
    assert "bandwidth" in text
    wrong = "".join(read(http, f"/plans/{planned.id}/what-if?change=nonsense%3D2").text)
    assert "could not be tried" in wrong


def test_static_files_are_kept_for_ever(http: httpx.Client):
    script = next(source for source in read(http, "/").sources if source.endswith("live.js"))
    answer = http.get(script)
    assert answer.headers["content-type"].startswith("text/javascript")
    assert "immutable" in answer.headers["cache-control"]
    old = http.get(f"/static/0123456789abcdef/{script.rpartition('/')[2]}")
    assert (old.status_code, old.headers["cache-control"]) == (200, "no-store")
    for name in ("nothing.js", "..%2Fassets.py", "__init__.py"):
        assert http.get(f"/static/x/{name}").status_code == 404


@pytest.mark.parametrize("key", ["psk_x", f"psk_0123456789ab_{'a' * 64}"], ids=["no key", "of another service"])
def test_a_wrong_key_where_none_is_asked_for(http: httpx.Client, key: str):
    """Programs are refused with what to do; browsers see a page that says so, and that asks for no key."""
    header = {"Authorization": f"Bearer {key}"}
    program = http.get("/v1/jobs", headers=header)
    assert program.status_code == 401
    assert "this service requires no key, because its security is off" in program.json()["detail"]
    assert "unset PENSTOCK_API_KEY" in program.json()["remedy"]
    browser = http.get("/jobs", headers=header | AS_A_BROWSER)
    assert (browser.status_code, browser.headers["Location"]) == (303, "/sign-in?next=/jobs")
    shown = read(http, "/sign-in?next=/jobs")
    assert "This service asks for no key" in "".join(shown.text)
    assert "/jobs" in shown.links
    assert not [form for form in shown.forms if form.action == "/sign-in"]
    typed = send(http, "/sign-in", {"key": key})
    assert typed.status_code == 401
    assert "this service requires no key" in " ".join("".join(Page(typed.text).text).split())


@pytest.mark.parametrize("address", ["/plans/nobody", "/runs/nobody", "/jobs/nobody", "/sweeps/nobody"])
def test_what_is_not_there(http: httpx.Client, address: str):
    answer = http.get(address)
    assert answer.status_code == 404
    assert "nobody" in "".join(Page(answer.text).text)
    assert Page(answer.text).tags.count("h1") == 1


def test_an_unknown_address_is_a_page_for_browsers_and_a_problem_for_programs(http: httpx.Client) -> None:
    answer = http.get("/nothere", headers=AS_A_BROWSER)
    assert answer.status_code == 404
    assert "there is no page at /nothere" in answer.text
    assert "To the overview" in answer.text
    for address, headers in (("/nothere", {}), ("/v1/nothere", AS_A_BROWSER)):
        answer = http.get(address, headers=headers)
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["status"] == 404
    assert "GET /v1" not in http.get("/jobs/nobody", headers=AS_A_BROWSER).text


def test_a_config_json_is_planned(http: httpx.Client) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 2816,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    }
    fields = {**FORM, "cluster": "1x4xA100", "profile_text": json.dumps(config), "sequence_length": "512"}
    answer = http.post("/plan", data=fields, headers=AS_A_BROWSER)
    assert answer.status_code == 303, answer.text
    job = answer.headers["location"].rpartition("/")[2]
    request = http.get(f"/plans/{job}/request").json()
    assert request["profile"]["shape"]["sequence_length"] == 512
    assert len(request["profile"]["layers"]) == 6
    refused = http.post("/plan", data={**fields, "profile_text": json.dumps({**config, "model_type": "unheard-of"})})
    assert "unheard-of" in refused.text


def test_layouts_that_fit_are_bars_with_the_capacity(http: httpx.Client) -> None:
    text = http.get("/fits?model=llama-3-70b&cluster=8x8xH100&tensor=8", headers=AS_A_BROWSER).text
    assert "TP 8 · PP 8 · DP 1 · ZeRO-1" in text
    assert "each GPU has 78.7 GiB" in text
    assert text.count("<svg") >= 4
