"""The bridge between documents and the core: faithful both ways, strict on the way in."""

import numpy as np
import pytest
from small_request import a_request

from penstock.convert import from_plan, to_problem
from penstock.schemas.errors import InvalidDocument, InvalidPlan
from penstock.schemas.plan import Plan
from penstock.schemas.profile import ModelProfile
from penstock.solvers.costs.memory import static_bytes
from penstock.solvers.model.allocation import Stage


def test_arrays_are_prefix_sums_and_frozen() -> None:
    problem = to_problem(a_request())
    assert problem.parameter_bytes.tolist() == [0, 0, 100, 300, 600]
    assert problem.trainable_bytes.tolist() == [0, 0, 100, 100, 400]
    assert (problem.forward_bytes.tolist(), problem.backward_bytes.tolist()) == ([4] * 3, [2] * 3)
    with pytest.raises(ValueError, match="read-only"):
        problem.parameter_bytes[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        problem.costs("V100", 3).forward_ns[0] = 1


def test_what_steps_need_is_left_out_where_it_is_nothing() -> None:
    plain = a_request()
    assert to_problem(plain).update_workspace_bytes is None
    assert b"update_" not in plain.canonical_json().replace(b"update_ns", b"").replace(b"update_rules", b"")
    needed = [{"name": f"l{i}", "parameter_bytes": 100, "update_workspace_bytes": 7 * i or None} for i in range(4)]
    problem = to_problem(a_request(profile={"layers": needed, "update_in_turn": True}))
    assert problem.update_workspace_bytes is not None
    assert (problem.update_workspace_bytes.tolist(), problem.update_in_turn) == ([0, 7, 14, 21], True)


def test_copies_of_weights_are_held_and_not_trained() -> None:
    """As parameters they stay; they have neither gradients nor states, and no message brings them."""
    plain = to_problem(a_request())
    layers = [
        {"name": f"l{i}", "parameter_bytes": 100 * i, "trainable": i != 2, "copied_bytes": 7 * i or None}
        for i in range(4)
    ]
    problem = to_problem(a_request(profile={"layers": layers}))
    assert (problem.parameter_bytes - plain.parameter_bytes).tolist() == [0, 0, 7, 21, 42]
    assert problem.trainable_bytes.tolist() == plain.trainable_bytes.tolist()
    before, after = (static_bytes(one, Stage(1, 3, (0,))) for one in (plain, problem))
    assert after == before._replace(parameters=before.parameters + 42)


def test_linear_scaling_rounds_each_layer_up() -> None:
    costs = to_problem(a_request()).costs("V100", 3)
    assert np.diff(costs.forward_ns).tolist() == [15] * 4
    assert np.diff(costs.backward_ns).tolist() == [32] * 4
    assert np.diff(costs.weight_ns).tolist() == [15] * 4


def test_measured_scaling_interpolates_and_is_clamped_below() -> None:
    points = [
        {
            "device_kind": "V100",
            "micro_batch_size": size,
            "layers": [{"forward_ns": f, "backward_ns": 2 * f, "stash_bytes": size}] * 4,
        }
        for size, f in ((2, 10), (6, 20))
    ]
    problem = to_problem(a_request(profile={"measurements": points, "scaling": "measured"}))
    forward = [int(problem.costs("V100", rows).forward_ns[1]) for rows in (1, 2, 3, 6, 12)]
    assert forward == [10, 10, 13, 20, 40]


@pytest.mark.parametrize(
    ("optimizer", "precision", "dtype", "gradient", "expected"),
    [
        pytest.param(
            "adam", "mixed", "fp32", "parameter", (1, 2), id="16 bytes per fp32 parameter (DAPPLE, Table VIII)"
        ),
        pytest.param("adam", "mixed", "bf16", "parameter", (1, 6), id="master copy and two states in fp32"),
        pytest.param("adam", "full", "bf16", "fp32", (2, 2), id="fp32 gradients of 16-bit parameters"),
        pytest.param("momentum", "mixed", "fp32", "fp32", (1, 1), id="momentum"),
        pytest.param("sgd", "mixed", "fp32", "parameter", (1, 0), id="no state"),
    ],
)
def test_memory_factors(optimizer: str, precision: str, dtype: str, gradient: str, expected: tuple[int, int]) -> None:
    memory = {"optimizer": optimizer, "precision": precision, "gradient": gradient}
    rules = to_problem(a_request(memory=memory, profile={"parameter_dtype": dtype})).memory
    assert (rules.gradient_factor, rules.state_factor) == expected


@pytest.mark.parametrize(
    ("kind", "kinds", "words"),
    [
        ("V1000", ("GTX1080Ti", "V100", "A100"), "scale_from: V100, speed: 1.0"),
        ("a100-sxm", ("GTX1080Ti", "V100", "A100"), "scale_from: A100, speed: 1.0"),
        ("B200", ("GTX1080Ti", "V100", "H100"), "scale_from: H100, speed: 2.28"),
        ("abacus", ("GTX1080Ti", "V100", "H100"), "scale_from: H100, speed: ..."),
    ],
)
def test_an_unkinds_kind_is_compared_with_the_nearest(kind: str, kinds: tuple[str, ...], words: str) -> None:
    """By its peak where that is kinds, else by its name; without either its speed stays open."""
    device = {"id": "a/0", "kind": kind, "memory_bytes": 1000}
    request = a_request(topology={"nodes": [{"name": "a", "devices": [device]}], "links": []})
    profile = request.profile
    assert isinstance(profile, ModelProfile)
    rows = [row.model_copy(update={"device_kind": each}) for each in kinds for row in profile.measurements]
    source = profile.source.model_copy(update={"method": "analytic"})
    computed = profile.model_copy(update={"measurements": tuple(rows), "source": source})
    with pytest.raises(InvalidDocument) as refused:
        to_problem(request.model_copy(update={"profile": computed}))
    assert f"{{name: {kind}, {words}}}" in str(refused.value)
    assert "only computed costs of 'GTX1080Ti'" in str(refused.value)


def test_an_unknown_kind_is_refused_unless_it_is_scaled() -> None:
    device = {"id": "a/0", "kind": "H100", "memory_bytes": 1000}
    topology = {"nodes": [{"name": "a", "devices": [device]}], "links": []}
    with pytest.raises(InvalidDocument, match=r"H100(.|\n)*scale_from: V100"):
        to_problem(a_request(topology=topology))
    kinds = [{"name": "H100", "scale_from": "V100", "speed": 4}]
    costs = to_problem(a_request(topology=topology | {"kinds": kinds})).costs("H100", 2)
    assert np.diff(costs.forward_ns).tolist() == [3] * 4


def test_a_disconnected_topology_names_two_devices() -> None:
    with pytest.raises(InvalidDocument, match="nothing connects 'a/0' and 'b/0'"):
        to_problem(a_request(topology={"links": []}))


def test_a_node_without_fabric_uses_its_link() -> None:
    nodes = [
        {"name": n, "devices": [{"id": f"{n}/{d}", "kind": "V100", "memory_bytes": 1} for d in range(2)]}
        for n in ("a", "b")
    ]
    network = to_problem(a_request(topology={"nodes": nodes})).network
    assert network.bandwidth(0, 1) == 10


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        pytest.param({"global_batch_size": 2**53 - 1}, "time of one global batch", id="time"),
        pytest.param(
            {"profile": {"layers": [{"name": f"l{i}", "parameter_bytes": 2**52} for i in range(4)]}},
            "parameters add up",
            id="parameters",
        ),
    ],
)
def test_sums_that_cannot_be_counted_are_refused(changes: dict[str, object], word: str) -> None:
    with pytest.raises(InvalidDocument, match=word):
        to_problem(a_request(**changes))


def test_kinds_that_the_topology_lacks_may_be_too_slow_to_be_counted() -> None:
    layer = {"forward_ns": 10, "backward_ns": 21, "stash_bytes": 8}
    slow = layer | {"forward_ns": 2**52, "backward_ns": 2**52}
    measured = [
        {"device_kind": "V100", "micro_batch_size": 1, "layers": [layer] * 4},
        {"device_kind": "abacus", "micro_batch_size": 1, "layers": [slow] * 4},
    ]
    kinds = [{"name": "V100", "scale_from": "abacus", "speed": 1.0}]
    assert to_problem(a_request(profile={"measurements": measured})).num_devices == 4
    with pytest.raises(InvalidDocument, match="time of one global batch") as caught:
        to_problem(a_request(profile={"measurements": measured[1:]}, topology={"kinds": kinds}))
    assert caught.value.faults[0].pointer == "/profile/measurements/0"


def test_a_request_by_hash_says_what_is_missing() -> None:
    request = a_request().model_copy(update={"profile": "sha256:" + "0" * 64})
    with pytest.raises(InvalidDocument, match="profile by hash"):
        to_problem(request)


def a_plan(**changes: object) -> Plan:
    stages = [
        {"layers": [0, 1], "devices": ["a/0", "a/1"], "recompute": "full"},
        {"layers": [2, 3], "devices": ["b/0"]},
    ]
    data = {
        "request_hash": "sha256:" + "0" * 64,
        "planner": "mine",
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "num_micro_batches": 4,
        "pipelines": [{"stages": stages, "micro_batches": [0, 3]}],
        "update_rule": "synchronous",
        "schedule": {"name": "gpipe", "rows": [{"devices": ["a/0", "a/1", "b/0"], "text": "F0:4 B0:4"}]},
        "prediction": None,
    }
    return Plan.parse(data | changes)


def test_one_text_serves_devices_of_different_stages() -> None:
    allocation, schedule = from_plan(a_plan(), to_problem(a_request()))
    assert [stage.recompute for stage in allocation.stages] == [((0, 1),), ()]
    assert [(row.devices, set(row.operations[:, 1])) for row in schedule.rows] == [((0, 1), {0}), ((2,), {1})]


@pytest.mark.parametrize(
    ("changes", "pointer"),
    [
        pytest.param(
            {"pipelines": [{"stages": [{"layers": [0, 9], "devices": ["a/0"]}], "micro_batches": [0, 3]}]},
            "/pipelines/0/stages/0/layers",
            id="layers beyond the chain",
        ),
        pytest.param(
            {"pipelines": [{"stages": [{"layers": [0, 3], "devices": ["z/0"]}], "micro_batches": [0, 3]}]},
            "/pipelines/0/stages/0/devices",
            id="unknown device",
        ),
        pytest.param(
            {"schedule": {"name": "x", "rows": [{"devices": ["b/1"], "text": "F0"}]}},
            "/schedule/rows/0/devices",
            id="a device without a stage",
        ),
        pytest.param(
            {"schedule": {"name": "x", "rows": [{"devices": ["a/0"], "text": "F0 BANANA"}]}},
            "/schedule/rows/0/text",
            id="no operation",
        ),
        pytest.param({"micro_batch_size": 3}, "/micro_batch_size", id="sizes that do not add up"),
        pytest.param({"num_micro_batches": 2, "micro_batch_size": 4}, "/pipelines/0/micro_batches", id="too many"),
        pytest.param({"global_batch_size": 6}, "/global_batch_size", id="another batch"),
    ],
)
def test_a_plan_that_does_not_fit_names_the_place(changes: dict[str, object], pointer: str) -> None:
    with pytest.raises(InvalidPlan) as caught:
        from_plan(a_plan(**changes), to_problem(a_request()))
    assert pointer in [fault.pointer for fault in caught.value.faults]
