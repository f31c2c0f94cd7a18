"""The Python API on real requests: the promises of the design that concern planning and judging."""

import inspect
import subprocess
import sys

import pytest
from repository import ROOT

import penstock
from penstock.convert import to_problem
from penstock.planning.compare import one_device_ns
from penstock.questions.answer import PlanOptions
from penstock.schemas.api.jobs import CompareRequest
from penstock.schemas.api.sweep import SweepRequest
from penstock.schemas.errors import InvalidDocument, InvalidPlan, NotFound, UnsupportedRequest
from penstock.schemas.plan import PlanFile
from penstock.schemas.request import PlanRequest

pytestmark = pytest.mark.tier("ci")


@pytest.fixture(scope="module")
def answer() -> penstock.Answer:
    return penstock.plan("bert-48", "dapple-config-a", global_batch_size=64, planner="dapple")


def test_a_plan_passes_the_judge_and_carries_his_time(answer: penstock.Answer) -> None:
    judgement = penstock.judge(answer.file)
    assert judgement.faults == ()
    assert judgement.plan == answer.file.plan
    assert judgement.timeline.time_per_global_batch_ns == answer.file.plan.prediction.time_per_global_batch_ns
    for device in answer.file.plan.prediction.devices:
        assert device.peak_memory_bytes <= device.memory_bytes
        parts = device.busy_ns + device.communication_ns + device.idle_ns
        assert parts == answer.file.plan.prediction.time_per_global_batch_ns


def test_bounds_of_both_scopes_are_below_the_plan(answer: penstock.Answer) -> None:
    scopes = {c.scope: c for c in answer.result.certificates}
    assert set(scopes) == {"schedule of this allocation", "some plans of this request", "all plans of this request"}
    assert answer.gap == scopes["all plans of this request"].gap >= 0


@pytest.mark.tier("nightly")
def test_the_same_request_gives_the_same_bytes_in_another_process(answer: penstock.Answer) -> None:
    code = (
        "import penstock, sys\n"
        "answer = penstock.plan('bert-48', 'dapple-config-a', global_batch_size=64, planner='dapple')\n"
        "sys.stdout.buffer.write(answer.file.plan.canonical_json())"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert ran.stdout == answer.file.plan.canonical_json()


def test_a_saved_plan_is_read_and_judged_alone(answer: penstock.Answer, tmp_path) -> None:
    answer.save(tmp_path / "plan.json")
    assert penstock.judge(PlanFile.read(tmp_path / "plan.json")).faults == ()


def test_a_plan_that_claims_another_time_is_caught(answer: penstock.Answer) -> None:
    prediction = answer.file.plan.prediction.model_copy(update={"time_per_global_batch_ns": 10**12})
    boastful = answer.file.plan.model_copy(update={"prediction": prediction})
    faults = penstock.judge(PlanFile(plan=boastful, request=answer.request)).faults
    assert any("says 1000000000000 ns" in fault for fault in faults)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        pytest.param({"text": "F0 BANANA"}, "BANANA", id="no operation"),
        pytest.param({"text": "B0:8 F0:8"}, "before", id="backward before forward"),
        pytest.param({"text": "F0:7 B0:7"}, "exactly once", id="a micro-batch missing"),
    ],
)
def test_a_bad_row_is_one_sentence_not_a_crash(answer: penstock.Answer, change: dict[str, str], word: str) -> None:
    plan = answer.file.plan
    row = plan.schedule.rows[0].model_copy(update=change)
    schedule = plan.schedule.model_copy(update={"rows": (row, *plan.schedule.rows[1:])})
    faults = penstock.judge(
        PlanFile(plan=plan.model_copy(update={"schedule": schedule}), request=answer.request)
    ).faults
    assert any(word in fault for fault in faults), faults


def test_programs_of_a_bad_plan_are_refused(answer: penstock.Answer) -> None:
    plan = answer.file.plan
    row = plan.schedule.rows[0].model_copy(update={"text": "F0"})
    schedule = plan.schedule.model_copy(update={"rows": (row,)})
    with pytest.raises(InvalidPlan, match="does not verify"):
        penstock.programs(PlanFile(plan=plan.model_copy(update={"schedule": schedule}), request=answer.request))


def test_every_used_device_has_a_program(answer: penstock.Answer) -> None:
    programs = penstock.programs(answer.file)
    used = {name for stage in answer.file.plan.pipelines[0].stages for name in stage.devices}
    assert {program.device for program in programs} == used
    assert [program.rank for program in programs] == list(range(len(used)))


@pytest.mark.parametrize(
    "change",
    [
        {"update_rules": ["double_buffered"], "planner": "dapple"},
        {"target": "megatron", "planner": "dapple"},
        {"planner": "dappel"},
        {"schedule": "zero-bubble"},
        {"options": {"colour": 1}, "planner": "dapple"},
    ],
)
def test_what_no_planner_does_is_refused_and_named(change: dict[str, object]) -> None:
    with pytest.raises(UnsupportedRequest) as caught:
        penstock.plan("gpt2-small", "2x4xV100", global_batch_size=8, **change)
    assert next(iter(change)).rstrip("s")[:4] in str(caught.value) or caught.value.remedy


def test_what_memory_does_not_have_is_an_assumption_of_the_plan() -> None:
    def assumed(**changes: object) -> list[bool]:
        answer = penstock.plan("gpt2-small", "1x4xV100", global_batch_size=8, micro_batch_sizes=[1], **changes)
        assumptions = " ".join(answer.file.plan.assumptions)
        return ["gradients that wait between the halves" in assumptions, "samples that the first layers" in assumptions]

    assert assumed(planner="gpipe") == [False, False]
    assert assumed(planner="zero-bubble") == [True, False]
    assert assumed(planner="gpipe", recompute="always") == [False, True]


def test_a_pin_on_an_unknown_device_is_refused_with_the_nearest() -> None:
    with pytest.raises(InvalidDocument) as caught:
        penstock.plan("gpt2-small", "2x4xV100", global_batch_size=8, pins=[{"layers": [0, 1], "devices": ["node0/9"]}])
    assert caught.value.faults[0].pointer == "/pins/0/devices/0"
    assert "node0/" in (caught.value.remedy or "")


def test_pins_hold_in_the_answer() -> None:
    pins = [{"layers": [0, 2], "devices": ["node1/2", "node1/3"]}]
    answer = penstock.plan("gpt2-small", "2x4xV100", global_batch_size=8, pins=pins, planner="dapple")
    stages = [stage for stage in answer.file.plan.pipelines[0].stages if stage.layers[0] <= 2]
    assert {name for stage in stages for name in stage.devices} <= {"node1/2", "node1/3"}


def test_a_budget_of_plans_is_kept_and_said() -> None:
    few = penstock.plan("gpt2-small", "2x4xV100", global_batch_size=8, max_plans=1, planner="dapple")
    assert "the limit of 1 plan came before" in few.result.sentence
    more = penstock.plan("gpt2-small", "2x4xV100", global_batch_size=8, planner="dapple")
    assert more.seconds_per_global_batch <= few.seconds_per_global_batch


def test_infeasible_is_an_answer_with_stage_device_bytes_and_remedy() -> None:
    answer = penstock.plan("llama-3-8b", "1x2xV100", global_batch_size=8, planner="dapple")
    assert answer.status == "infeasible"
    why = answer.result.infeasibility
    assert why.missing_bytes > 0
    assert why.device.startswith("node0/")
    assert why.stage.startswith("layers ")
    with pytest.raises(InvalidPlan, match="no plan"):
        _ = answer.file


@pytest.mark.tier("nightly")
def test_compare_has_a_row_for_each_planner() -> None:
    one = {"degrees": {"tensor": 1}, "sharding": "none"}
    request = penstock.plan("gpt2-small", "2x2xV100", global_batch_size=8, planner="dp", max_plans=4, **one).request
    rows = penstock.compare(request)
    assert {row.planner for row in rows} >= {"auto", "dp", "gpipe", "model-parallel", "dapple"}
    best = next(row for row in rows if row.planner == "auto")
    for row in rows:
        assert row.iteration_ns is None or best.iteration_ns <= row.iteration_ns
        assert row.gap is None or row.gap >= 0
        assert row.speedup_vs_one_device is None or row.speedup_vs_one_device <= 4


def test_one_device_is_the_yardstick_of_speedups() -> None:
    request = penstock.plan("gpt2-small", "1x1xV100", global_batch_size=16).request
    answer = penstock.plan("gpt2-small", "1x1xV100", global_batch_size=16)
    assert one_device_ns(to_problem(request)) == answer.file.plan.prediction.time_per_global_batch_ns


def test_unknown_names_list_near_ones() -> None:
    with pytest.raises(NotFound, match="bert-48"):
        penstock.plan("bert-4", "2x4xV100", global_batch_size=8)
    with pytest.raises(InvalidDocument, match="global_batch_size"):
        penstock.plan("bert-48", "2x4xV100", global_batch_size=0)
    with pytest.raises(AttributeError, match="plan"):
        _ = penstock.plam


def with_certificates(answer: penstock.Answer, *certificates: dict[str, object], **plan: object) -> PlanFile:
    """Return the answer's plan with these certificates in place of the original ones."""
    data = answer.file.model_dump(mode="json", exclude_none=True)
    data["plan"] |= {"certificates": list(certificates), **plan}
    return PlanFile.parse(
        {"plan": {k: v for k, v in data["plan"].items() if v is not None}, "request": data["request"]}
    )


def own_certificates(answer: penstock.Answer) -> list[dict[str, object]]:
    return [c.model_dump(mode="json", exclude_none=True) for c in answer.file.plan.certificates]


def test_a_bound_that_is_said_to_cover_the_request_has_to(answer: penstock.Answer) -> None:
    """The class of the second certificate, in the words of one on the request: a sentence that is not true."""
    wide, narrow, certificate = own_certificates(answer)
    assert penstock.judge(with_certificates(answer, wide, narrow, certificate)).faults == ()
    boast = {**narrow, "scope": wide["scope"], "model": "every plan of this request"}
    (fault,) = penstock.judge(with_certificates(answer, boast)).faults
    assert "does not cover every plan of the request" in fault


def test_a_bound_on_other_plans_is_no_certificate_of_this_one(answer: penstock.Answer) -> None:
    certificate = own_certificates(answer)[-1]
    covers = {**certificate["covers"], "backward": ["split"]}  # type: ignore[dict-item]
    model = "this allocation, any order of its operations, split backwards"
    (fault,) = penstock.judge(with_certificates(answer, {**certificate, "covers": covers, "model": model})).faults
    assert "does not cover the plan that carries it" in fault


def test_certificates_of_plans_changed_by_hand_are_proven_again(answer: penstock.Answer) -> None:
    wide, narrow, certificate = own_certificates(answer)
    judged = penstock.judge(with_certificates(answer, wide, narrow, certificate, prediction=None))
    assert judged.faults == ()
    assert [c.scope for c in judged.plan.certificates] == [wide["scope"], certificate["scope"]]
    assert [c.bound_ns for c in judged.plan.certificates] == [wide["bound_ns"], certificate["bound_ns"]]


def test_every_field_of_a_request_is_a_keyword_of_plan() -> None:
    keywords = {*inspect.signature(penstock.plan).parameters, *PlanOptions.__annotations__}
    limits = {"time_limit", "max_plans", "effort", "gap"}
    apart = {"schema_version", "termination"}  # one has nothing to choose, the other is `limits`
    assert set(PlanRequest.model_fields) - apart <= keywords
    computed = {"framework", "sequence_length", "routing_imbalance", "capacity_factor"}  # of a profile that is computed
    assert keywords - set(PlanRequest.model_fields) == limits | computed | {"workers", "on_progress"}


@pytest.mark.parametrize("limit", ["10s", 10, 10.0])
def test_a_time_limit_is_a_duration_or_seconds(limit: str | float) -> None:
    answer = penstock.plan("gpt2-small", "1x1xV100", global_batch_size=8, planner="dp", time_limit=limit)
    assert answer.request.termination.time_limit_ns == 10**10
    assert answer.plan is answer.file.plan


@pytest.mark.parametrize("limit", [float("nan"), float("inf"), True])
def test_a_time_limit_that_is_no_duration_is_refused(limit: float) -> None:
    with pytest.raises(penstock.errors.InvalidDocument, match=f"time_limit is {limit}, which is not a duration"):
        penstock.plan("gpt2-small", "1x1xV100", global_batch_size=8, time_limit=limit)


@pytest.mark.tier("quick")
def test_errors_are_importable_from_the_front() -> None:
    assert penstock.errors.InvalidPlan is InvalidPlan


QUESTIONS = {
    "plan": lambda *model, **more: penstock.plan(*model, **more).request,
    "compare": lambda *model, **more: penstock.compare(*model, planners=["dp"], schedules=["gpipe"], **more),
    "sweep": lambda *model, **more: penstock.sweep(*model, over={"clusters": ["1x1xV100"]}, **more),
}
"""The questions that take a request, each asked as a user would."""


@pytest.mark.parametrize("question", QUESTIONS)
def test_each_question_takes_names_or_a_request(question: str) -> None:
    options = {"global_batch_size": 8, "planner": "dp", "max_plans": 1}
    ask = QUESTIONS[question]
    by_name = ask("gpt2-small", "1x2xV100", **options)
    request = penstock.plan("gpt2-small", "1x2xV100", **options).request
    timeless = {"seconds": 0.0}
    if question == "plan":
        assert by_name == ask(request)
    else:
        rows, again = ([row.model_copy(update=timeless) for row in answer] for answer in (by_name, ask(request)))
        assert rows == again
    with pytest.raises(InvalidDocument, match="the request has all fields already; seed would contradict it"):
        ask(request, seed=1)
    with pytest.raises(InvalidDocument, match="the topology is missing"):
        ask("gpt2-small", global_batch_size=8)
    with pytest.raises(TypeError, match="unexpected keyword 'tensor'; the options are global_batch_size,"):
        ask("gpt2-small", "1x2xV100", global_batch_size=8, tensor=2)
    with pytest.raises(TypeError, match="global_batch_size is missing"):
        ask("gpt2-small", "1x2xV100")


def test_a_layout_is_judged_by_file_and_names() -> None:
    script = ROOT / "examples/clusters/megatron/pretrain.sh"
    options = {"model": "gpt2-small", "compare": False}
    answer = penstock.import_layout(script, "4x1xV100", format="megatron", **options)
    assert "3.03 s per global batch" in answer.sentences[0]
    with pytest.raises(InvalidDocument, match="a layout needs a cluster and a format"):
        penstock.import_layout(script)


def test_nothing_stands_beside_a_document_that_is_the_whole_question() -> None:
    request = penstock.plan("gpt2-small", "1x2xV100", global_batch_size=8, planner="dp", max_plans=1).request
    compare = CompareRequest(request=request, planners=("dp",), schedules=("gpipe",))
    sweep = SweepRequest(request=request)
    for ask, extra in (
        (lambda: penstock.compare(compare, planners=["even"]), "planners"),
        (lambda: penstock.sweep(sweep, over={"global_batch_sizes": [8]}), "over"),
        (lambda: penstock.sweep(sweep, "1x2xV100", seed=1), "topology, seed"),
    ):
        with pytest.raises(InvalidDocument, match=f"the request has all fields already; {extra} would contradict it"):
            ask()
    assert [row.planner for row in penstock.compare(compare)] == ["dp"]
    assert [row.planner for row in penstock.sweep(sweep)] == ["dp"]


def test_the_content_of_a_config_json_is_a_model() -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "intermediate_size": 1024,
        "vocab_size": 1000,
        "max_position_embeddings": 1024,
    }
    answer = penstock.plan(config, "1x2xA100", global_batch_size=8, planner="dp", max_plans=1, sequence_length=256)
    assert answer.request.profile.shape.sequence_length == 256
    assert len(answer.request.profile.layers) == 4
