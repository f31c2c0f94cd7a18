"""Settings of a trainer's file on memory, model and parallelism: counted, compared, refused, or listed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from test_trainers import GPT, stages_of

from penstock.cli.main import main
from penstock.convert import to_problem
from penstock.examples import catalogue
from penstock.examples.shapes import SHAPES
from penstock.exporting.layouts import layout_text
from penstock.layouts.megatron.other_flags import CHANGING
from penstock.layouts.torchtitan.model_parts import HEADS
from penstock.questions.by_name import import_layout
from penstock.questions.layouts import plan_file
from penstock.questions.solve import solve
from penstock.schemas.api.layouts import LayoutImported, LayoutRequest
from penstock.schemas.errors import InvalidDocument, PenstockError, UnsupportedRequest
from penstock.schemas.plan import PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import PlanRequest
from penstock.solvers.costs.memory import static_bytes
from penstock.solvers.model.allocation import Stage

pytestmark = pytest.mark.tier("ci")

PP = "--pipeline-model-parallel-size"
SMALL = catalogue.profile("gpt2-small")
"""Parameters of 16 bits; 12 transformer layers."""


def fields(profile: ModelProfile = SMALL, cluster: str = "1x4xA100", **more: Any) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "profile": profile.model_dump(mode="json"),
        "topology": catalogue.cluster(cluster).model_dump(mode="json", exclude_none=True),
        "global_batch_size": 16,
    } | more


def imported(form: str, text: str, **more: Any) -> LayoutImported:
    request = PlanRequest.parse(fields(**more))
    return import_layout(LayoutRequest(format=form, layout=text, request=request, compare=False), workers=1)


def per_parameter(request: PlanRequest, replicas: int) -> float:
    """Return the bytes that a device holds for each parameter of a stage of 16-bit transformer layers."""
    problem = to_problem(request)
    static = static_bytes(problem, Stage(2, 5, tuple(range(replicas)))).total
    return static / (int(problem.parameter_bytes[6] - problem.parameter_bytes[2]) / 2)


@pytest.mark.parametrize(
    ("flags", "bytes_each"),
    [
        ("", {1: 18, 4: 18}),
        ("--bf16", {1: 18, 4: 18}),
        ("--bf16 --accumulate-allreduce-grads-in-fp32", {4: 18}),
        ("--bf16 --grad-reduce-in-bf16", {4: 16}),
        ("--bf16 --main-grads-dtype bf16", {4: 16}),
        ("--fp16", {4: 16}),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", {4: 18}),
        ("--bf16 --use-distributed-optimizer", {1: 18, 2: 12, 4: 9}),
        ("--use-distributed-optimizer --bf16 --grad-reduce-in-bf16", {2: 10, 4: 7}),
        ("grad_reduce_in_fp32=False", {4: 16}),
        ("grad_reduce_in_fp32=True bf16=True", {4: 18}),
    ],
)
def test_megatrons_gradients_are_as_wide_as_megatron_has_them(flags: str, bytes_each: dict[int, float]) -> None:
    """18 bytes, or 6 + 12/dp: Megatron's theoretical_memory_usage.py; 16 and 4 + 12/dp with gradients of 16 bits."""
    result = imported("megatron", f"{PP} 2 --num-layers 12\n{flags}")
    for replicas, size in bytes_each.items():
        assert per_parameter(result.request, replicas) == pytest.approx(size, abs=1e-6)
    sentences = [each for each in result.plan.assumptions if "bytes per parameter" in each]
    assert len(sentences) == 1
    whole = max(bytes_each.values()) in (16, 18) and "distributed" not in flags
    assert whole == bool(re.search(r"\b(16|18) bytes per parameter", sentences[0])), sentences


@pytest.mark.tier("quick")
def test_a_target_has_its_gradients_in_the_request_and_its_hash_stays() -> None:
    for target, width in {
        "megatron": "fp32",
        "torchtitan": "fp32",
        "deepspeed": "parameter",
        None: "parameter",
    }.items():
        plan_request = PlanRequest.parse(fields(target=target))
        assert plan_request.memory.gradient == width
        again = PlanRequest.parse(plan_request.model_dump(mode="json"))
        assert again == plan_request
        assert again.content_hash() == plan_request.content_hash()
    overridden = fields(target="megatron", memory={"gradient": "parameter", "optimizer": "sgd"})
    assert PlanRequest.parse(overridden).memory.gradient == "parameter"
    assert json.loads(PlanRequest.parse(fields(target="megatron")).canonical_json())["memory"]["gradient"] == "fp32"
    wrong = fields(target=["megatron"], memory=7)
    with pytest.raises(InvalidDocument):
        PlanRequest.parse(wrong)


def test_a_plan_within_megatron_says_its_gradients_and_exports_them() -> None:
    more = {"target": "megatron", "termination": {"max_plans": 3}, "schedule": "early-backward"}
    for memory, flag, words in (
        ({}, "--accumulate-allreduce-grads-in-fp32", "megatron keeps gradients in fp32: 18 bytes per parameter"),
        ({"gradient": "parameter"}, "--grad-reduce-in-bf16", "in the parameters' bf16, as requested.*: 16 bytes"),
    ):
        plan_request = PlanRequest.parse(fields(cluster="1x2xA100", memory=memory, **more))
        plan = solve(plan_request, workers=1).plan
        assert plan is not None
        assert any(re.search(words, each) for each in plan.assumptions), plan.assumptions
        file = PlanFile(plan=plan, request=plan_request)
        text = layout_text(file, "megatron")
        assert flag in text
        back = import_layout(
            LayoutRequest(format="megatron", layout=text, request=plan_request, compare=False), workers=1
        )
        assert back.plan.prediction == plan.prediction
        assert back.request.memory == plan_request.memory


KEPT = '[activation_checkpoint]\nmode = "none"\n'
TITAN = "[training]\nlocal_batch_size = 4\n[parallelism]\npipeline_parallel_degree = {}\n{}"


def test_torchtitans_fsdp_with_and_without_a_pipeline() -> None:
    pipelined = imported("torchtitan", TITAN.format(2, ""))
    assert per_parameter(pipelined.request, 4) == 9
    assert any("keeps parameters gathered" in each for each in pipelined.assumptions)
    always = imported("torchtitan", TITAN.format(2, 'fsdp_reshard_after_forward = "always"'))
    assert any("gathers parameters again for each pass, which is not timed" in each for each in always.assumptions)
    alone = imported("torchtitan", TITAN.format(1, ""))
    assert alone.plan.num_micro_batches == 1
    assert alone.plan.sharding == "parameters"
    assert not any("memory is counted higher than it is" in each for each in alone.assumptions)
    kept = imported("torchtitan", TITAN.format(1, 'fsdp_reshard_after_forward = "never"'))
    assert kept.plan.sharding == "gradients"
    assert any("gathered once for each micro-batch" in each for each in kept.assumptions)
    whole = imported("torchtitan", TITAN.format(1, "data_parallel_shard_degree = 1"))
    assert not any("FSDP" in each for each in whole.assumptions)
    assert per_parameter(whole.request, 4) == 18
    narrow = TITAN.format(2, "").replace("[parallelism]", 'mixed_precision_reduce = "bfloat16"\n[parallelism]')
    assert per_parameter(imported("torchtitan", narrow).request, 4) == 7


def test_a_job_of_fsdp_alone_that_may_fit_is_not_said_not_to() -> None:
    big = catalogue.profile("llama-3-8b")
    text = TITAN.format(1, "").replace("4", "1")
    whole = imported("torchtitan", text, profile=big, cluster="1x8xA100")
    assert whole.fits, "on all GPUs it is judged as it is"
    request = PlanRequest.parse(fields(profile=big, cluster="2x8xA100"))
    question = LayoutRequest(format="torchtitan", layout=text, request=request, compare=False, nodes="node0")
    result = import_layout(question, workers=1)
    assert any("memory is counted higher than it is" in each for each in result.assumptions)
    assert result.fits is None
    (sentence,) = [each for each in result.sentences if "whether it fits is not known" in each]
    # 8.03e9 parameters, 2 + 4 bytes each, seven eighths of it elsewhere
    assert "up to 39.3 GiB of a device" in sentence, sentence


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "ZBVZeroBubble", "GPipe"])
def test_without_a_pipeline_no_schedule_is_looked_at(schedule: str) -> None:
    result = imported("torchtitan", TITAN.format(1, f'pipeline_parallel_schedule = "{schedule}"'))
    assert stages_of(result) == [(0, 13)]


def test_a_job_without_a_pipeline_is_exported_with_its_local_batch() -> None:
    text = TITAN.format(1, f"data_parallel_shard_degree = 4\n{KEPT}")
    file = plan_file(imported("torchtitan", text, global_batch_size=32))
    assert (file.plan.num_micro_batches, file.plan.sharding) == (2, "parameters")
    for release in HEADS:
        text = layout_text(file, "torchtitan", release)
        assert re.search(r"local_batch_size = 4\n", text)
        assert "memory is counted higher than it is" not in text
        again = imported("torchtitan", text, target="torchtitan", global_batch_size=32)
        assert again.plan.pipelines == file.plan.pipelines


@pytest.mark.parametrize(
    ("text", "recomputed"),
    [
        ("", [2, 4, 6, 8, 10, 12]),
        ('[activation_checkpoint]\nmode = "none"', []),
        ('[activation_checkpoint]\nmode = "full"', list(range(1, 13))),
        ('[activation_checkpoint]\nmode = "selective"', [2, 4, 6, 8, 10, 12]),
        ('[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "3"', [3, 6, 9, 12]),
        ('[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "op"', "operators"),
    ],
)
def test_checkpoints_are_torchtitans(text: str, recomputed: list[int] | str) -> None:
    layout = imported("torchtitan", TITAN.format(2, "") + text, target="torchtitan")
    stages = [stage for pipeline in layout.plan.pipelines for stage in pipeline.stages]
    if recomputed == "operators":
        assert all(getattr(stage.recompute, "modules", ()) == ("operators",) for stage in stages)
    else:
        spans = [stage.recompute for stage in stages if isinstance(stage.recompute, tuple)]
        assert [layer for each in spans for first, last in each for layer in range(first, last + 1)] == recomputed
    assert any("torchtitan's own" in each for each in layout.assumptions) == (not text)
    file = plan_file(layout)
    again = imported("torchtitan", layout_text(file, "torchtitan", "0.2"), target="torchtitan")
    assert again.plan.pipelines == file.plan.pipelines
    if recomputed in ([2, 4, 6, 8, 10, 12], [3, 6, 9, 12]):
        with pytest.raises(UnsupportedRequest, match=r"torchtitan 0\.3 cannot express .* one layer in [23]"):
            layout_text(file, "torchtitan", "0.3")
    else:
        assert imported("torchtitan", layout_text(file, "torchtitan", "0.3")).plan.pipelines == file.plan.pipelines


def test_checkpoints_of_python_are_the_policy_that_it_names() -> None:
    python = "def f(c):\n    c.parallelism.pipeline_parallel_degree = 2\n    c.activation_checkpoint = {}"
    for words, recomputes in {"FullAC.Config()": True, "None": False}.items():
        layout = imported("torchtitan", python.format(words))
        assert (layout.plan.pipelines[0].stages[0].recompute != "none") == recomputes
    layout = imported("torchtitan", python.format("SelectiveAC.Config(x=1)"))
    assert getattr(layout.plan.pipelines[0].stages[0].recompute, "modules", ()) == ("operators",)
    with pytest.raises(InvalidDocument, match="1 fault") as caught:
        imported("torchtitan", python.format("MemoryBudgetAC.Config()"))
    assert "'MemoryBudgetAC.Config()' is none of none, full, selective" in str(caught.value)
    odd = TITAN.format(2, "") + '[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "two"'
    with pytest.raises(InvalidDocument, match="'two' is neither a number nor 'op'"):
        imported("torchtitan", odd)


MEGATRON = "--pipeline-model-parallel-size 1 --micro-batch-size 1 --global-batch-size 16 {}"
ZERO = '{{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {{"stage": 1{}}}}}'


@pytest.mark.parametrize(
    ("form", "text", "feature"),
    [
        (
            "torchtitan",
            TITAN.format(1, "{}").replace("4", "2"),
            '[activation_checkpoint]\nmode = "none"\n[optimizer]\nearly_step_in_backward = true',
        ),
        ("megatron", MEGATRON, "--optimizer-cpu-offload"),
        ("megatron", MEGATRON, "--use-precision-aware-optimizer --exp-avg-dtype fp16"),
        ("deepspeed", ZERO, ', "offload_optimizer": {"device": "cpu"}'),
    ],
)
def test_what_lowers_memory_and_is_not_modelled_is_no_reason_against_a_layout(
    form: str, text: str, feature: str
) -> None:
    """A V100 does not hold what is counted of 8 billion parameters; with the feature it may."""
    big = catalogue.profile("llama-3-8b")
    without = "" if form != "torchtitan" else feature.replace("true", "false")
    plain = imported(form, text.format(without), profile=big, cluster="1x8xV100")
    maybe = imported(form, text.format(feature), profile=big, cluster="1x8xV100")
    assert plain.fits is False
    assert any("it does not fit: " in each for each in plain.sentences)
    assert maybe.fits is None
    assert not any("it does not fit" in each for each in maybe.sentences)
    words = "which lower memory, are not modelled" if "--exp-avg" in feature else "which lowers memory, is not modelled"
    assert any(words in each for each in maybe.sentences)


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ('training.dtype "bfloat16"', "training.dtype bfloat16"),
        ("training.enable_cpu_offload True", "training.enable_cpu_offload"),
        ("optimizer.early_step_in_backward True", "optimizer.early_step_in_backward"),
    ],
)
def test_torchtitans_settings_that_lower_memory_are_no_reason_either(setting: str, names: str) -> None:
    big = catalogue.profile("llama-3-8b")
    flags = "--parallelism.pipeline_parallel_degree 1 --activation_checkpoint.mode full --model.converters float8"
    plain = imported("torchtitan", flags, profile=big, cluster="1x8xV100")
    maybe = imported("torchtitan", f"{flags} --{setting}", profile=big, cluster="1x8xV100")
    assert (plain.fits, maybe.fits) == (False, None)
    assert any(f"{names}" in each and "is not modelled" in each for each in maybe.sentences)
    assert "model.converters float8: matrix products are judged in 16 bits all the same" in maybe.assumptions


def test_torchtitans_optimizer_alone_is_no_job() -> None:
    with pytest.raises(InvalidDocument, match=r"neither \[parallelism\]"):
        imported("torchtitan", '[optimizer]\nname = "AdamW"\n')


def test_releases_of_torchtitan() -> None:
    text = TITAN.format(2, f"data_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 1\n{KEPT}")
    file = plan_file(imported("torchtitan", text))
    assert layout_text(file, "torchtitan") == layout_text(file, "torchtitan", "0.3.0")
    old = layout_text(file, "torchtitan", "0.2")
    assert "data_parallel_shard_degree = 2" in old
    assert "torchtitan 0.2 has no whole replicas of a pipeline" in old
    assert "data_parallel_replicate_degree = 2" in layout_text(file, "torchtitan", "0.3")
    for release in ("0.1", "0.4", "1.0"):
        with pytest.raises(UnsupportedRequest, match=rf"releases 0.3 and 0.2, not {release}"):
            layout_text(file, "torchtitan", release)
    sharded = TITAN.format(2, 'pipeline_parallel_schedule = "ZBVZeroBubble"\npipeline_parallel_microbatch_size = 2\n')
    sharded += KEPT
    file = plan_file(imported("torchtitan", sharded))
    for release in HEADS:
        again = imported("torchtitan", layout_text(file, "torchtitan", release), target="torchtitan")
        assert (again.plan.pipelines, again.plan.prediction) == (file.plan.pipelines, file.plan.prediction)
        assert again.request.memory == file.request.memory


@pytest.mark.tier("quick")
def test_the_shipped_sizes_are_those_of_the_profiles() -> None:
    """Against what layers pass on and what embeddings hold, and the sources of the models."""
    shapes = {name: shape for name, shape in SHAPES.items() if name in catalogue.model_names()}
    for name, sizes in shapes.items():
        profile = catalogue.profile(name)
        width = 4 if profile.parameter_dtype == "fp32" else 2
        assert profile.boundaries[2][0].bytes_per_sample == sizes.hidden * sizes.sequence_length * width, name
        rows, left = divmod(profile.layers[0].parameter_bytes, sizes.hidden * width)
        assert left == 0, name
        beside = {"gpt": sizes.sequence_length, "llama": 0, "bert": 512 + 2 + 2}[re.match("gpt|llama|bert", name)[0]]  # type: ignore[index]
        assert rows == sizes.vocabulary + beside, name
    source = "".join((Path(catalogue.__file__).parent / f"{name}.py").read_text() for name in ("gpt", "llama", "bert"))
    pairs = {(int(w.replace("_", "")), int(h)) for w, h in re.findall(r"width=(\d[\d_]*), heads=(\d+)", source)}
    assert {(sizes.hidden, sizes.heads) for sizes in shapes.values()} <= pairs
    assert len(shapes) == 12


AGREEING = "--hidden-size 768 --num-attention-heads 12 --seq-length 1024 --vocab-size 50304"


@pytest.mark.parametrize(
    ("form", "text", "words"),
    [
        ("megatron", "--hidden-size 8192", "line 2, column 15: --hidden-size is 8192; the profile has 768"),
        ("megatron", "--num-attention-heads 16", "--num-attention-heads is 16; the profile has 12"),
        ("megatron", "--seq-length 32768", "--seq-length is 32768; the profile has 1024"),
        ("megatron", "seq_length: 32768", "--seq-length is 32768; the profile has 1024"),
        ("megatron", "--num-experts 8", "--num-experts is 8; the profile has none"),
        ("megatron", "--vocab-size 32000", "--vocab-size is 32000; the profile has 50257"),
        ("torchtitan", TITAN.format(2, "").replace("[par", "seq_len = 8192\n[par"), "line 3: training.seq_len is 8192"),
    ],
)  # fmt: skip
def test_a_model_that_contradicts_the_profile_is_refused_with_both_numbers(form: str, text: str, words: str) -> None:
    with pytest.raises(InvalidDocument) as caught:
        imported(form, f"{PP} 2\n{text}" if form == "megatron" else text)
    assert words in str(caught.value), caught.value
    assert caught.value.exit_code == 65


def test_what_a_profile_does_not_say_is_listed() -> None:
    assert not any("not compared" in each for each in imported("megatron", f"{PP} 2 {AGREEING}").assumptions)
    unshaped = SMALL.model_copy(update={"name": "mine", "shape": None, "classes": None, "variants": None})
    result = imported("megatron", f"{PP} 2 {AGREEING}", profile=unshaped)
    sentences = [each for each in result.assumptions if "not compared" in each]
    assert sentences == [
        "not compared with the profile, which does not say them: --num-attention-heads 12, --vocab-size 50304"
    ]
    with pytest.raises(InvalidDocument, match="has 1 fault") as caught:
        imported("megatron", f"{PP} 2 {AGREEING.replace('1024', '2048')}", profile=unshaped)
    assert "2048 tokens are 1572864 values" in str(caught.value)
    assert "786432 values of 16 bits" in str(caught.value)


@pytest.mark.parametrize(
    ("form", "text", "words"),
    [
        ("megatron", f"{PP} 2 --tensor-model-parallel-size 8",
         "--tensor-model-parallel-size 8, and no trainer has such a layout: tensor 8 does not divide 12"),
        ("megatron", f"TP=4\n{PP} 2 --tensor-model-parallel-size $TP --context-parallel-size 2",
         "--tensor-model-parallel-size 4, --context-parallel-size 2, and the profile 'gpt2-small' has no costs at"),
        ("megatron", f"{PP} 2 --expert-model-parallel-size 8", "--expert-model-parallel-size 8"),
        ("megatron", "Provider(pipeline_model_parallel_size=2, tensor_model_parallel_size=8)", "-size 8"),
        ("torchtitan", TITAN.format(2, "context_parallel_degree = 4"), "context_parallel_degree 4"),
        ("torchtitan", TITAN.format(2, "expert_parallel_degree = 8"), "expert_parallel_degree 8"),
        ("deepspeed", "PipelineModule(topology=PipeModelDataParallelTopology(num_pp=2, num_mp=8))", "num_mp 8"),
        ("deepspeed", '{"num_stages": 2, "tensor_parallel": {"autotp_size": 5}}', "autotp_size 5"),
    ],
)  # fmt: skip
def test_degrees_that_the_model_or_the_profile_lacks_are_refused(form: str, text: str, words: str) -> None:
    with pytest.raises((UnsupportedRequest, InvalidDocument)) as caught:
        imported(form, text)
    assert words in str(caught.value), caught.value
    assert caught.value.exit_code == 65
    places = {fault.pointer for fault in caught.value.faults}
    assert places
    assert all(re.match("line [1-9]|/[a-z]", place) for place in places), places


def test_devices_that_stand_for_the_group_are_judged() -> None:
    topology = catalogue.cluster("1x4xA100").model_dump(mode="json", exclude_none=True)
    topology["uniform"]["gpus"] = 8
    flags = f"{PP} 2 --tensor-model-parallel-size 8 --nnodes 4 --nproc-per-node 8"
    result = imported("megatron", flags, topology=topology)
    assert any("represents 8 GPUs" in each for each in result.assumptions)
    assert not any("flags start" in each for each in result.assumptions)
    for other in (
        f"{PP} 2 --tensor-model-parallel-size 4",
        f"{PP} 2 --tensor-model-parallel-size 8 --expert-model-parallel-size 2",
    ):
        with pytest.raises(UnsupportedRequest, match="represent 8 GPUs each"):
            imported("megatron", other, topology=topology)


def test_flags_that_change_the_answer_are_all_listed() -> None:
    named = ["fp8-format", "overlap-param-gather", "overlap-moe-expert-parallel-comm", "step-batch-size-schedule"]
    assert set(named) <= CHANGING.keys()
    text = f"{PP} 2 " + " \\\n".join(f"--{name}" + (" e4m3" if name == "fp8-format" else "") for name in CHANGING)
    (sentence,) = [each for each in imported("megatron", text).assumptions if each.startswith("not understood")]
    assert [name for name in CHANGING if f"--{name} (" not in sentence] == []
    settings = "pipeline_model_parallel_size: 2\ndelay_wgrad_compute: true\nfp8: null\noverlap_param_gather: false"
    (sentence,) = [each for each in imported("megatron", settings).assumptions if each.startswith("not understood")]
    assert sentence.endswith(
        "absent, and able to change the answer: --delay-wgrad-compute (" + CHANGING["delay-wgrad-compute"] + ")"
    )
    assert not any("not understood" in each for each in imported("megatron", f"{PP} 2 --lr 0.1").assumptions)


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    "flags",
    [
        "--hybrid-override-pattern M-M*-M-M*-M-",
        "--hybrid-layer-pattern 'M-M-|M*-M-'",
        "--is-hybrid-model \\\n --num-layers 12",
        "--hybrid-attention-ratio 0.08",
        "--encoder-num-layers 12 --decoder-num-layers 12",
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_layers_of_several_kinds_are_refused(flags: str, ranks: int) -> None:
    with pytest.raises(InvalidDocument, match="1 fault") as caught:
        imported("megatron", f"{PP} {ranks} {flags}")
    assert "Megatron cuts by other rules" in str(caught.value)


def test_stages_without_transformer_layers_where_embedding_and_head_count() -> None:
    flags = (
        f"{PP} 7 --num-layers 12 --num-layers-per-virtual-pipeline-stage 1 --account-for-embedding-in-pipeline-split "
        "--account-for-loss-in-pipeline-split --micro-batch-size 1"
    )
    result = imported("megatron", flags, cluster="1x7xA100", global_batch_size=14)
    assert stages_of(result) == [(i, i) for i in range(14)]
    assert result.plan.schedule.name == "interleaved"
    exported = layout_text(plan_file(result), "megatron")
    assert "'E|(t|)*12L'" in exported
    again = imported("megatron", exported, cluster="1x7xA100", global_batch_size=14)
    assert again.plan.pipelines == result.plan.pipelines


@pytest.mark.parametrize("more", ["--mtp-num-layers 1", "--pipeline-model-parallel-layout 'Et*6|t*6mL'"])
def test_multi_token_prediction_that_the_profile_lacks_is_named(more: str) -> None:
    result = imported("megatron", f"{PP} 2 {more}")
    assert stages_of(result) == [(0, 6), (7, 13)]
    assert any("multi-token prediction changes the answer and is not modelled" in each for each in result.assumptions)


def test_multi_token_prediction_on_a_stage_of_its_own_is_refused() -> None:
    with pytest.raises(
        InvalidDocument, match="a stage for multi-token prediction alone, and the profile has no such layer"
    ):
        imported("megatron", f"{PP} 3 --pipeline-model-parallel-layout 'Et*6|t*6|m*1|L'")


def test_no_multi_token_prediction_may_be_said() -> None:
    assert stages_of(imported("megatron", f"{PP} 2 --mtp-num-layers 0")) == [(0, 6), (7, 13)]
    with pytest.raises(InvalidDocument) as caught:
        imported("megatron", f"{PP} 2 --num-layers 0")
    assert "not a whole number of at least 1" in str(caught.value)


def test_ranks_may_count_along_the_pipeline_first() -> None:
    for ranks in (1, 4):
        flags = f"{PP} {ranks} --use-tp-pp-dp-mapping"
        assert stages_of(imported("megatron", flags)) == stages_of(imported("megatron", f"{PP} {ranks}"))
    result = imported("megatron", f"{PP} 2 --use-tp-pp-dp-mapping")
    assert [stage.devices for stage in result.plan.pipelines[0].stages] == [
        ("node0/0", "node0/2"),
        ("node0/1", "node0/3"),
    ]


def test_groups_smaller_than_the_pipeline_are_refused_as_megatron_refuses_them() -> None:
    group = "--microbatch-group-size-per-virtual-pipeline-stage 3"
    flags = f"{PP} 4 --num-virtual-stages-per-pipeline-rank 3 --micro-batch-size 1 {group}"
    with pytest.raises(InvalidDocument, match="also the last one, has 4 to 3 micro-batches"):
        imported("megatron", flags, global_batch_size=3)
    assert imported("megatron", flags.replace("stage 3", "stage 4"), global_batch_size=8).plan.num_micro_batches == 8


def test_the_command_line_takes_a_release_and_says_what_a_csv_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        f"{PP} 2 --micro-batch-size 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    )
    path = tmp_path / "plan.json"
    plan_file(imported("megatron", flags)).write(path)
    assert main(["export", str(path), "--to", "torchtitan", "--set", "release=0.2", "-o", str(tmp_path)]) == 0
    assert main(["export", str(path), "--to", "torchtitan", "-o", str(tmp_path)]) == 0
    assert sorted(each.suffix for each in tmp_path.glob("*.torchtitan.*")) == [".py", ".toml"]
    assert '"norm", "output"]' in next(tmp_path.glob("*.toml")).read_text()
    assert '"norm", "lm_head"]' in next(tmp_path.glob("*.py")).read_text()
    assert main(["export", str(path), "--to", "torchtitan", "--set", "release=0.1"]) == 65
    assert main(["export", str(path), "--to", "megatron", "--set", "release=0.3"]) == 65
    capsys.readouterr()
    for command in (["export", str(path), "--to", "csv"], ["export", "schedule", str(path)]):
        assert main(command) == 0
        output = capsys.readouterr()
        assert output.out.splitlines()[1].startswith("1F0,1B0,1F1")
        assert "note: each line is of 2 replicas" in output.err
        assert "note: recomputed are stage 0 layers 1, 2, 3, 4, 5, 6; stage 1 layers 7" in output.err


def test_every_refusal_here_is_of_the_input() -> None:
    """No refusal is an internal error, with a shipped profile or another."""
    texts = [f"{PP} 2 --hidden-size 7", f"{PP} 2 --tensor-model-parallel-size $TP", f"{PP} 2 --num-experts x"]
    for text in texts:
        with pytest.raises(PenstockError) as caught:
            imported("megatron", text, profile=GPT)
        assert caught.value.exit_code == 65
