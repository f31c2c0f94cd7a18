"""Layouts in the shapes that sites have them: scripts with variables, configurations, settings of several versions."""

from __future__ import annotations

import re
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_texts import parsed
from test_trainers import GPT, imported, request, stages_of

from penstock.convert import to_problem
from penstock.convert.layer_roles import Roles, roles_of
from penstock.layouts.deepspeed import _balanced
from penstock.layouts.files.shell import Unsaid, Value, Variables
from penstock.layouts.megatron.flags import Flags
from penstock.layouts.megatron.layout_string import print_layout, read_layout
from penstock.schemas.api.layouts import LayoutImported
from penstock.schemas.bounded.budget import Budget
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.request import PlanRequest
from penstock.solvers.bounds.trainer import within_bounds

pytestmark = pytest.mark.tier("ci")

PP = "--pipeline-model-parallel-size"

SCRIPT = """#!/bin/bash
GPUS_PER_NODE=2
NNODES=${SLURM_NNODES:-"2"}
TP=1; CP=1
export PP_SIZE=${PP_SIZE:-2}   # ranks
MICRO_BATCH_SIZE=1
GLOBAL_BATCH_SIZE=$(( GPUS_PER_NODE * $NNODES * 4 ))
num_layers=8
# PPL="Et*4|t*4L"
PPL="Ettttt|(ttt)*1L"

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE --nnodes "$NNODES"
)
MODEL_ARGS=(
    --num-layers ${num_layers}
)
TRAINING_ARGS=(
    --micro-batch-size $MICRO_BATCH_SIZE \\
    --global-batch-size \\
        ${GLOBAL_BATCH_SIZE}
    # --recompute-granularity full
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size ${TP}
    --pipeline-model-parallel-size "$PP_SIZE"
    --pipeline-model-parallel-layout ${PPL}
    --num-workers $UNKNOWN
    --use-distributed-optimizer
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} ${TRAINING_ARGS[@]} ${PARALLEL_ARGS[@]}
"""


def test_a_scripts_variables_are_looked_up() -> None:
    assert parsed("megatron", SCRIPT).batch() == 16
    result = imported("megatron", SCRIPT)
    assert stages_of(result) == [(0, 5), (6, 9)]
    assert result.plan.num_micro_batches == 8
    assert result.request.memory.optimizer_sharding == "over_replicas"
    fewer = imported("megatron", SCRIPT.replace("GPUS_PER_NODE=2", "GPUS_PER_NODE=4").replace("* 4 ))", "* 2 ))"))
    assert any("start 8 devices; judged is a job on 4" in each for each in fewer.assumptions)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (f"{PP} $PP", r"line 1, column 32: .*\$PP is not set above it"),
        (f"{PP} ${{PP}}\nPP=2", r"line 1, column 32: .*\$PP is not set above it"),
        (f"{PP} $(cat ranks)", "comes from a command"),
        (f"{PP} $1", r"\$1 is not set"),
        (f"if [ $A ]; then\n  PP=2\nelse\n  PP=4\nfi\n{PP} $PP", r"\$PP is 2 in line 2 and 4 in line 4"),
        (f"PP=4\n[ $A ] && PP=2\n{PP} $PP", r"\$PP is 4 in line 1 and 2 in line 2"),
        (f"PP=four\n{PP} $PP", "line 1, column 4: .*'four', not a whole number of at least 1"),
        (f"A=$B\nB=$A\nC=$B\n{PP} $C", "is not set above it"),
        (f"{PP} $((2 ** 9))", "not a whole-number sum"),
        (f"L='Et*4|txt*3L'\n{PP} 2\n--pipeline-model-parallel-layout $L", "line 1, column 10: 'x' is no letter"),
        ("\n--pipeline-model-paralel-size 4", "line 2, column 1: .*did you mean --pipeline-model-parallel-size"),
        (f"{PP} 2 --pipeline-model-parallel-layout 'Et*4|t*4L' --decoder-first-pipeline-num-layers 3", "not both"),
        (f"{PP} 2 --recompute-granularity full", "needs --recompute-method uniform or block, which is absent"),
        (f"{PP} 2 --num-virtual-stages-per-pipeline-rank 2 --microbatch-group-size-per-virtual-pipeline-stage 5 "
         "--micro-batch-size 1", "8 micro-batches in groups of 5 leave 3|equal"),
        (f"{PP} 4 --num-virtual-stages-per-pipeline-rank 2 --microbatch-group-size-per-virtual-pipeline-stage 3",
         "groups of 3 do not fit 16 micro-batches"),
        (f"{PP} 4 --decoder-first-pipeline-num-layers 3", "cannot be split evenly"),
        ("# Readme\n\nWhat it is: a thing.", "neither Megatron's pipeline flags nor a layout string"),
        ("[training]\nglobal_batch_size = 16", "neither Megatron's pipeline flags nor a layout string"),
        ("--lr 0.1", "neither Megatron's pipeline flags nor a layout string"),
    ],
)  # fmt: skip
def test_what_cannot_be_known_is_said(script: str, words: str) -> None:
    if "leave 3" in words:  # three are enough for two ranks
        assert imported("megatron", script).plan.num_micro_batches == 8
        return
    with pytest.raises(InvalidDocument) as caught:
        imported("megatron", script)
    assert re.search(words, str(caught.value)), caught.value


@pytest.mark.parametrize(
    "text",
    [
        f'PP=9\nPP=4\nPP=2\n"{PP}" "$PP" --x',
        f": ${{PP:=2}}\n{PP}=${{PP}}",
        f"PP=${{PP:-2}}\n{PP} $PP",
        f"PP=${{1:-2}}\n{PP} $PP",
        f"TP=1 PP=$((4/2)) bash -c 'x'\n{PP} ${{PP}} \\",
        f"args:\n- {PP}\n- '2'\n- --num-layers\n- '8'",
        f'"args": ["{PP}", "2", "--num-layers", "8"]',
        "model:\n  pipeline_model_parallel_size: 2\n  virtual_pipeline_model_parallel_size: null\n  num_layers: 8",
        "model.pipeline_model_parallel_size=2 model.overlap_grad_reduce=false",
        '{"pipeline_model_parallel_size": 2, "num_layers": 8}',
        "GPTModelProvider(pipeline_model_parallel_size=2, num_layers_in_first_pipeline_stage=4)",
        "pipeline_model_parallel_size: 2\npipeline_model_parallel_layout: Et*4|t*4L",
    ],
)
def test_two_ranks_in_every_spelling(text: str) -> None:
    result = imported("megatron", text)
    assert stages_of(result) == [(0, 4), (5, 9)]
    assert not result.plan.overlap_all_reduce


def test_settings_of_configurations() -> None:
    text = (
        "pipeline_model_parallel_size: 2\nvirtual_pipeline_model_parallel_size: 2\noverlap_grad_reduce: true\n"
        "activations_checkpoint_granularity: full\nactivations_checkpoint_method: block\n"
        "activations_checkpoint_num_layers: 1\nmicro_batch_size: 4\nmicro_batch_size: 2\n"
    )
    result = imported("megatron", text)
    assert stages_of(result) == [(0, 2), (3, 4), (5, 6), (7, 9)]
    assert result.plan.schedule.name == "interleaved"
    assert result.plan.overlap_all_reduce
    assert [stage.recompute for stage in result.plan.pipelines[0].stages] == [((a, a),) for a in (1, 3, 5, 7)]
    assert any("--micro-batch-size is given 2 times" in each for each in result.assumptions)


@pytest.mark.parametrize(
    ("flags", "stages"),
    [
        ("--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 6", [(0, 2), (3, 9)]),
        ("--decoder-first-pipeline-num-layers 2 --num-virtual-stages-per-pipeline-rank 2",
         [(0, 1), (2, 4), (5, 5), (6, 9)]),
    ],
)  # fmt: skip
def test_uneven_ends_as_megatron_shares_them(flags: str, stages: list[tuple[int, int]]) -> None:
    assert stages_of(imported("megatron", f"{PP} 2 {flags}")) == stages


@pytest.mark.tier("quick")
def test_multi_token_prediction_is_a_layer_of_its_own() -> None:
    roles = Roles(1, 8, 2, "", 1)
    for text, stages in {
        "Et*3|(tt|)*2t,m|L": [(0, 3), (4, 5), (6, 7), (8, 9), (10, 10)],
        "Et*8|mL": [(0, 8), (9, 10)],
    }.items():
        assert list(read_layout(text, roles)) == stages
        assert read_layout(print_layout(stages, roles), roles) == tuple(stages)
    for text, words in {"Et*8L": "0 m, the profile 1", "Et*7mtL": "t comes after m"}.items():
        with pytest.raises(InvalidDocument, match="has") as caught:
            read_layout(text, roles)
        assert any(words in fault.detail for fault in caught.value.faults), caught.value
    layers = list(GPT.layers)
    mtp = layers[-2].model_copy(update={"name": "mtp.0", "kind": "mtp"})
    with_mtp = roles_of(GPT.model_copy(update={"layers": (*layers[:-1], mtp, layers[-1])}))
    assert with_mtp is not None
    assert with_mtp[:3] == (1, 8, 2)
    assert with_mtp.mtp == 1


@pytest.mark.tier("quick")
def test_commands_and_conditions_of_a_shell() -> None:
    variables = Variables("A=1\nB=\"$A\"\nC='$A'\nD=${A}${B}x\nE=$(( (A + 5) * 2 % 7 ))\nF=\n", Budget("the script"))
    end = 10**6
    for word, meaning in {"$B": "1", "$C": "$A", "$D": "11x", "$E": "5", "${F:-7}": "7", "'$A'": "$A"}.items():
        assert variables.value(Value(word, end)).text == meaning
    for word in ("$(date)", "$Z", "${A//1/2}", "$((1/0))"):
        with pytest.raises(Unsaid):
            variables.value(Value(word, end))


@pytest.mark.tier("quick")
@given(st.text(alphabet="PA=$(){}:-1+*/\"' \n&;#", max_size=80))
@settings(max_examples=200)
def test_no_script_breaks_the_reader(text: str) -> None:
    number: int | None = 1
    with suppress(InvalidDocument):
        number = Flags(f"{text}\n{PP} $P{text}", "x").number("pipeline-model-parallel-size")
    assert number is None or number > 0


TITAN = """
[training]
local_batch_size = 8
[parallelism]
pipeline_parallel_degree = 2
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 1
"""


@pytest.mark.parametrize(
    ("text", "stages", "schedule"),
    [
        (TITAN, [(0, 4), (5, 9)], "early-backward"),
        (TITAN + 'pipeline_parallel_schedule = "interleaved1f1b"', [(0, 2), (3, 5), (6, 7), (8, 9)], "interleaved"),
        (TITAN + 'pipeline_parallel_schedule = "ZBVZeroBubble"', [(0, 2), (3, 5), (6, 7), (8, 9)], "zb-v"),
        (TITAN + 'pipeline_parallel_schedule = "LoopedBFS"\npipeline_parallel_layers_per_stage = 2\n'
         "pipeline_parallel_first_stage_less_layers = 0\npipeline_parallel_last_stage_less_layers = 0",
         [(0, 2), (3, 4), (5, 6), (7, 9)], "looped-bfs-lifo"),
        (TITAN + 'pipeline_parallel_split_points = ["layers.5"]', [(0, 5), (6, 9)], "early-backward"),
        ("[experimental]\npipeline_parallel_degree = 2\npipeline_parallel_split_points = 'layers.5'",
         [(0, 5), (6, 9)], "early-backward"),
        ("torchtitan --parallelism.pipeline_parallel_degree 2 \\\n --parallelism.pipeline_parallel_schedule=GPipe",
         [(0, 4), (5, 9)], "gpipe"),
        ("def two():\n    config = one()\n    config.parallelism.pipeline_parallel_degree = 2\n"
         "    config.training.dtype = torch.bfloat16\n    return config", [(0, 4), (5, 9)], "early-backward"),
    ],
)  # fmt: skip
def test_torchtitan_cuts_and_orders_as_it_does(text: str, stages: list[tuple[int, int]], schedule: str) -> None:
    result = imported("torchtitan", text)
    assert stages_of(result) == stages
    assert result.plan.schedule.name == schedule
    if schedule == "zb-v":
        devices = [stage.devices for stage in result.plan.pipelines[0].stages]
        assert devices[0] == devices[3] != devices[1] == devices[2]


def test_gradient_accumulation_and_degrees_are_told() -> None:
    settings = TITAN.replace("local_batch_size = 8", "local_batch_size = 4").replace(
        "replicate_degree = 2", "replicate_degree = 4"
    )
    result = imported("torchtitan", settings)
    assert any("the step is 2 pipelines of 4 samples" in each for each in result.assumptions)
    assert any("start 8 devices; judged is a job on 4" in each for each in result.assumptions)
    assert result.request.memory.optimizer_sharding == "none"
    sharded = settings.replace("shard_degree = 1", "shard_degree = -1")
    hybrid = imported("torchtitan", sharded)
    assert hybrid.request.memory.optimizer_sharding == "none"
    assert any("HSDP" in each and "counted whole" in each for each in hybrid.assumptions)
    plain = imported("torchtitan", sharded.replace("replicate_degree = 4", "replicate_degree = 1"))
    assert plain.request.memory.optimizer_sharding == "over_replicas"


@pytest.mark.parametrize(
    ("form", "text", "words"),
    [
        ("torchtitan", TITAN + 'pipeline_parallel_schedule = "DualPipeV"', "line 8: .*a backward of one rank at once"),
        ("torchtitan", TITAN + 'pipeline_parallel_schedule = "2F2B"', "line 8: .*is none of 1F1B"),
        ("torchtitan", TITAN + "pipeline_parallel_layers_per_stage = 2", "line 8: .*5 model parts|line 5"),
        ("torchtitan", TITAN.replace("degree = 2", "degree = 12", 1), "too few for 12 stages"),
        ("torchtitan", TITAN + 'pipeline_parallel_split_points = ["layers.9"]', "no list of modules"),
        ("torchtitan", TITAN + 'pipeline_parallel_split_points = ["layers.5", "layers.2"]', "order of the model"),
        ("torchtitan", TITAN.replace("8", "3"), "3 samples on each of 2 replicas make a global batch of 6"),
        ("torchtitan", "def f(:", "not valid Python, line 1"),
        ("deepspeed", "model = PipelineModule(layers=l, num_stages=args.stages)", "line 1, column .*: num_stages is"),
        ("deepspeed", '{"num_stages": 2, "zero_optimization": {"stage": 3}}', "zero_optimization.stage is 3"),
        ("deepspeed", '{"num_stages": 2, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}',
         "4 samples on each of 2 replicas make a global batch of 8; the request has 16"),
    ],
)  # fmt: skip
def test_contradictions_are_said(form: str, text: str, words: str) -> None:
    with pytest.raises(InvalidDocument) as caught:
        imported(form, text)
    assert re.search(words, str(caught.value)), caught.value


@pytest.mark.parametrize(
    "text",
    [
        "net = PipelineModule(layers=specs, loss_fn=loss, num_stages=2, partition_method='uniform')",
        "topo = PipeDataParallelTopology(num_pp=2, num_dp=4)\nPipelineModule(specs(), topology=topo, "
        "partition_method='uniform')",
        '{"train_batch_size": 16, "pipeline": {"stages": 2, "partition": "uniform"}}',
    ],
)
def test_deepspeed_as_it_is_called(text: str) -> None:
    assert stages_of(imported("deepspeed", text)) == [(0, 4), (5, 9)]


def least_spread(weights: list[int], parts: int) -> tuple[float, list[int]]:
    """Compute DeepSpeed's recurrence in plain words: entries by prefix and parts, each from the best before.

    Of equal entries the last one counts.
    """
    before = np.concatenate(([0], np.cumsum(weights)))
    cells: dict[tuple[int, int], tuple[float, float, list[int]]] = {(0, 0): (0.0, float("inf"), [0])}
    for end in range(1, len(weights) + 1):
        for part in range(1, min(end, parts) + 1):
            for begin in range(end):
                if (begin, part - 1) not in cells:
                    continue
                most, least, bounds = cells[begin, part - 1]
                weight = float(before[end] - before[begin])
                most, least = max(most, weight), min(least, weight)
                best = cells.get((end, part))
                if best is None or most - least <= best[0] - best[1]:
                    cells[end, part] = most, least, [*bounds, end]
    most, least, bounds = cells[len(weights), parts]
    return most - least, bounds


@pytest.mark.tier("quick")
@given(st.lists(st.integers(0, 9), min_size=2, max_size=9), st.data())
@settings(max_examples=80)
def test_deepspeeds_balance(weights: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(weights) - 1))
    assert _balanced(weights, parts) == least_spread(weights, parts)[1]


def test_a_v_is_the_targets_too() -> None:
    plan_request = request("torchtitan")
    text = imported("torchtitan", TITAN + 'pipeline_parallel_schedule = "ZBVZeroBubble"', request=plan_request)
    assert text.fits
    assert text.plan.request_hash == text.request.content_hash()
    assert min(each.bound_ns for each in text.plan.certificates) <= text.plan.prediction.time_per_global_batch_ns


def test_a_layout_that_lacks_memory_may_be_quicker_than_what_fits() -> None:
    document = request("megatron").model_dump(mode="json")

    def with_headroom(size: int) -> LayoutImported:
        plan_request = PlanRequest.parse(document | {"memory": document["memory"] | {"headroom_bytes": size}})
        return imported("megatron", f"{PP} 1 --micro-batch-size 4", request=plan_request)

    everything = int(15.75 * 2**30) - 2**29  # of a V100, less its context
    needed = with_headroom(everything).missing_bytes
    result = with_headroom(everything - needed // 5)
    value = result.plan.prediction.time_per_global_batch_ns
    assert not result.fits
    assert any(value < bound.bound_ns for bound in within_bounds(to_problem(result.request)))
    assert all(bound.bound_ns <= value for bound in result.plan.certificates)


@pytest.mark.tier("nightly")
def test_the_largest_text_on_one_line_is_read() -> None:
    """Each line is looked through once for conditions: not once for each of its 49,000 assignments."""
    text = f"a=1 && PP=4 {PP} $PP " + "value=3 --some-flag " * 49_000
    assert len(text) < 1_000_000
    flags = Flags(text, "x")
    assert flags.number("pipeline-model-parallel-size") == 4
    with pytest.raises(InvalidDocument, match="did you mean --pipeline-model-parallel-size"):
        Flags(text + " --pipeline-model-paralel-size 4", "x")
