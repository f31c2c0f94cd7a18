"""Documents: what is refused and how, canonical JSON, addresses, and print∘parse."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas.document import Document, canonical, canonical_object
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.plan import Plan, PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.quantities import parse_bytes, parse_bytes_per_s, parse_time_ns
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology

LAYER = {"forward_ns": 10, "backward_ns": 20, "stash_bytes": 8}


def a_profile(layers: int = 3) -> dict[str, object]:
    tensor = {"name": "x", "bytes_per_sample": 4, "gradient_bytes_per_sample": 4}
    return {
        "name": "m",
        "layers": [{"name": f"l{i}", "parameter_bytes": 100} for i in range(layers)],
        "boundaries": [[tensor] for _ in range(layers - 1)],
        "measurements": [{"device_kind": "V100", "micro_batch_size": 1, "layers": [LAYER] * layers}],
        "source": {"method": "imported", "expected_error": 0.1},
    }


def a_topology(nodes: int = 2) -> dict[str, object]:
    nic = {"bandwidth_bytes_per_s": 10**9}
    uniform = {"nodes": nodes, "devices_per_node": 1, "kind": "V100", "memory_bytes": 10**9, "nic": nic}
    return {"name": "c", "uniform": uniform}


def faults(document: type[Document], data: object) -> dict[str, str]:
    with pytest.raises(InvalidDocument) as caught:
        document.parse(data)
    return {fault.pointer: fault.detail for fault in caught.value.faults}


@pytest.mark.parametrize(
    ("change", "pointer", "word"),
    [
        pytest.param({"layers": []}, "/layers", "at least 1", id="empty chain"),
        pytest.param({"colour": 1}, "/colour", "not permitted", id="unknown field"),
        pytest.param({"boundaries": []}, "", "2 boundaries", id="missing boundary"),
        pytest.param({"schema_version": 2}, "/schema_version", "1", id="another version"),
        pytest.param({"name": ""}, "/name", "at least 1", id="empty name"),
    ],
)
def test_a_bad_profile_names_the_field(change: dict[str, object], pointer: str, word: str) -> None:
    found_faults = faults(ModelProfile, a_profile() | change)
    assert pointer in found_faults
    assert word in found_faults[pointer]


def measured(**change: object) -> dict[str, object]:
    row = {"operation": "all_reduce", "devices_per_node": 4, "nodes": 2, "size_bytes": 2**20, "time_ns": 70_000}
    return row | change


@pytest.mark.parametrize(
    ("rows", "pointer", "word"),
    [
        pytest.param([measured(time_ns=0)], "/collectives/0/time_ns", "greater than 0", id="no time"),
        pytest.param([measured(size_bytes=0)], "/collectives/0/size_bytes", "greater than 0", id="no bytes"),
        pytest.param([measured(nodes=0)], "/collectives/0/nodes", "at least 1|greater than or equal to 1", id="none"),
        pytest.param([measured(devices_per_node=1, nodes=1)], "/collectives/0", "at least two devices", id="alone"),
        pytest.param([measured(operation="gather")], "/collectives/0/operation", "'all_gather'", id="unknown"),
        pytest.param([measured(seconds=1)], "/collectives/0/seconds", "not permitted", id="unknown field"),
        pytest.param([], "/collectives", "at least 1", id="empty"),
        pytest.param(
            [measured(), measured(time_ns=5)],
            "",
            "'all_reduce of 1048576 bytes, 4 devices × 2 nodes' occurs twice",
            id="twice",
        ),
    ],
)
def test_a_bad_measured_collective_names_the_field(rows: list[object], pointer: str, word: str) -> None:
    found_faults = faults(ClusterTopology, a_topology() | {"collectives": rows})
    assert list(found_faults) == [pointer]
    assert re.search(word, found_faults[pointer])


def test_measured_collectives_stay_with_the_cluster(tmp_path: Path) -> None:
    """Written out, too. A document may have units, and without measurements the field does not exist."""
    text = json.dumps(a_topology() | {"collectives": [measured(size_bytes="1 MiB", time_ns="70 us")]})
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    topology = ClusterTopology.read(path)
    assert topology.expanded().collectives == topology.collectives
    assert ClusterTopology.parse(json.loads(topology.text())) == topology
    assert topology.collectives is not None
    assert (topology.collectives[0].size_bytes, topology.collectives[0].time_ns) == (2**20, 70_000)
    assert "collectives" not in ClusterTopology.parse(a_topology()).text()


@pytest.mark.parametrize("value", [-1, 2**53, 1.5, True, "7"])
def test_a_number_off_the_wire_is_refused_with_its_value(value: object) -> None:
    data = a_profile()
    data["measurements"][0]["layers"][0] = LAYER | {"forward_ns": value}
    found_faults = faults(ModelProfile, data)
    assert list(found_faults) == ["/measurements/0/layers/0/forward_ns"]
    assert repr(value) in found_faults["/measurements/0/layers/0/forward_ns"]


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": Infinity}', '{"a": 1, "a": 2}', "{", "[" * 100_000])
def test_json_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidDocument, match="is not JSON"):
        ModelProfile.parse_json(text)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.yaml", b"", "is empty"),
        ("empty.json", b" \n", "is empty"),
        ("list.json", b"[1, 2]", "but is a list"),
        ("text.yaml", b"only words", "but is a text"),
        (
            "node.yaml",
            b"name: x\nnodes: [[1]]",
            "/nodes/0: has to be an object with fields, as in `name: value`, but is a list",
        ),
        ("utf16.yaml", "name: x".encode("utf-16"), "it is UTF-16\n  try: save it as UTF-8"),
        ("utf16le.json", "{}".encode("utf-16-le"), "it contains zero bytes, as UTF-16 does"),
        ("binary.yaml", b"\x80\x81", "byte 0 is not valid UTF-8"),
        ("missing.yaml", None, "No such file"),
    ],
)
def test_a_file_that_holds_no_document_is_told_what_it_is(
    name: str, content: bytes | None, words: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidDocument) as caught:
        ClusterTopology.read(path)
    assert words in str(caught.value)


def test_a_profile_without_any_cost_is_refused() -> None:
    data = a_profile()
    idle = {"forward_ns": 0, "backward_ns": 0, "stash_bytes": 0}
    data["measurements"] = [{"device_kind": "V100", "micro_batch_size": 1, "layers": [idle] * 3}]
    assert "all layers take 0 ns" in faults(ModelProfile, data)[""]


def test_all_faults_come_at_once() -> None:
    assert len(faults(ModelProfile, {"name": 3, "layers": [{}], "colour": 1})) >= 4


@pytest.mark.parametrize(
    ("change", "word"),
    [
        pytest.param({"links": [{"a": "node0", "b": "nowhere", "bandwidth_bytes_per_s": 1}]}, "nowhere", id="dangling"),
        pytest.param({"links": [{"a": "node0", "b": "node0", "bandwidth_bytes_per_s": 1}]}, "at both ends", id="loop"),
        pytest.param({"switches": ["node0"]}, "unique", id="doubled name"),
        pytest.param({"uniform": a_topology()["uniform"]}, "exactly one", id="two forms"),
    ],
)
def test_a_bad_topology_says_what_is_wrong(change: dict[str, object], word: str) -> None:
    data = ClusterTopology.parse(a_topology()).expanded().model_dump(mode="json", exclude_none=True) | {"links": []}
    assert any(word in detail for detail in faults(ClusterTopology, data | change).values())


def test_uniform_is_the_long_form_in_short() -> None:
    long = ClusterTopology.parse(a_topology(3)).expanded()
    assert [node.devices[0].id for node in long.nodes] == ["node0/0", "node1/0", "node2/0"]
    assert [(link.a, link.b) for link in long.links] == [(f"node{i}", "switch") for i in range(3)]
    assert long.expanded() is long


def test_canonical_json_has_one_address_whatever_the_layout() -> None:
    profile = ModelProfile.parse(a_profile())
    shuffled = json.dumps(dict(reversed(list(a_profile().items()))), indent=3)
    assert ModelProfile.parse_json(shuffled).content_hash() == profile.content_hash()
    assert ModelProfile.parse_json(profile.canonical_json()) == profile
    assert ModelProfile.parse(a_profile(4)).content_hash() != profile.content_hash()


TEXTS = st.text(max_size=4) | st.sampled_from(["\x7f", "\u2028", '"\\', "\x1f/", "\ue000", "\U00010000", "b", "a"])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(1 - 2**53, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([0.0, -0.0, 1e21, 1e-7, 5e-324, 1.0])
    | TEXTS
)
PLAIN = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4), max_leaves=20
)


@given(PLAIN)
def test_any_plain_data_are_written_as_rfc_8785_has_it(value: object) -> None:
    assert canonical(value) == rfc8785.dumps(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [2**53, -(2**53), [{"a": 2**60}], "\ud800", [["\udfff"]], {"a": object()}, {1: 2}])
def test_what_rfc_8785_refuses_is_refused(value: object) -> None:
    for write in (canonical, rfc8785.dumps):
        with pytest.raises(rfc8785.CanonicalizationError):
            write(value)  # type: ignore[arg-type]


def test_canonical_json_is_that_of_rfc_8785() -> None:
    """Also where a document is written field by field."""
    request = PlanRequest.parse({"profile": a_profile(), "topology": a_topology(), "global_batch_size": 4, "seed": 7})
    for document in (request, request.profile, request.topology):
        assert isinstance(document, Document)
        plain = document.model_dump(mode="json", exclude_none=True)
        assert document.canonical_json() == rfc8785.dumps(plain)
        assert canonical_object(document.canonical_fields()) == rfc8785.dumps(plain)


def test_a_document_is_frozen() -> None:
    profile = ModelProfile.parse(a_profile())
    with pytest.raises(ValueError, match="frozen"):
        profile.name = "other"


def test_network_may_be_named_in_one_word() -> None:
    request = {"profile": a_profile(), "topology": a_topology(), "global_batch_size": 4}
    assert PlanRequest.parse(request | {"network": "private"}).network.sharing == "private"
    found_faults = faults(PlanRequest, request | {"micro_batch_sizes": [8]})
    assert "exceed the global batch" in found_faults[""]


def test_a_plan_file_carries_its_documents() -> None:
    request = {"profile": "sha256:" + "0" * 64, "topology": a_topology(), "global_batch_size": 4}
    found_faults = faults(PlanFile, {"plan": a_plan(), "request": request})
    assert any("contains the document itself" in detail for detail in found_faults.values())


def a_plan() -> dict[str, object]:
    return {
        "request_hash": "sha256:" + "0" * 64,
        "planner": "mine",
        "global_batch_size": 4,
        "micro_batch_size": 1,
        "num_micro_batches": 4,
        "pipelines": [{"stages": [{"layers": [0, 2], "devices": ["node0/0"]}], "micro_batches": [0, 3]}],
        "update_rule": "synchronous",
        "schedule": {"name": "1f1b", "rows": [{"devices": ["node0/0"], "text": "(F0 B0)*4"}]},
        "prediction": None,
    }


def test_a_schedule_has_rows_or_a_pattern() -> None:
    assert Plan.parse(a_plan()).schedule.pattern is None
    both = a_plan() | {"schedule": {"name": "none"}}
    assert "either `rows` or a `pattern`" in faults(Plan, both)["/schedule"]


def test_yaml_takes_units_and_the_wire_does_not(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "name: c\nuniform: {nodes: 2, devices_per_node: 1, kind: V100, memory_bytes: 16 GiB, "
        "nic: {bandwidth_bytes_per_s: 25 Gbit/s, latency_ns: 2 us}}\n"
    )
    nic = ClusterTopology.read(path).uniform.nic
    assert (nic.bandwidth_bytes_per_s, nic.latency_ns) == (3_125_000_000, 2000)
    with pytest.raises(InvalidDocument):
        ClusterTopology.parse({"name": "c", "uniform": {"nodes": "2", "memory_bytes": "16 GiB"}})
    path.write_text("name: c\nuniform: {nodes: 2, devices_per_node: 1, kind: V100, memory_bytes: 16 stones}\n")
    with pytest.raises(InvalidDocument, match="GiB"):
        ClusterTopology.read(path)


@pytest.mark.parametrize(
    ("field", "number", "detail"),
    [
        ("memory_bytes", "16", "16 without a unit is 16 B; did you mean 16 GiB or 16 MiB? Write the unit"),
        ("bandwidth_bytes_per_s", "200", "200 without a unit is 200 B/s; did you mean 200 GB/s or 200 Gbit/s? Write"),
    ],
)
def test_a_forgotten_unit_is_asked_about_in_yaml(tmp_path: Path, field: str, number: str, detail: str) -> None:
    path = tmp_path / "c.yaml"
    text = (
        "name: c\nuniform: {nodes: 2, devices_per_node: 1, kind: V100, memory_bytes: 16 GiB, "
        "nic: {bandwidth_bytes_per_s: 25 Gbit/s}}\n"
    )
    plain = re.sub(rf"{field}: [^,}}]*", f"{field}: {number}", text)
    path.write_text(plain)
    with pytest.raises(InvalidDocument) as caught:
        ClusterTopology.read(path)
    (fault,) = caught.value.faults
    assert detail in fault.detail
    path.write_text(plain.replace(f"{field}: {number}", f"{field}: {number} {'B' if number == '16' else 'B/s'}"))
    assert ClusterTopology.read(path).num_devices == 2


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_time_ns, "2 ms", 2_000_000),
        (parse_time_ns, "0.1ns", 1),
        (parse_bytes, "1.5 KiB", 1536),
        (parse_bytes_per_s, "25 Gbit/s", 3_125_000_000),
        (parse_bytes_per_s, "1 Gbps", 125_000_000),
    ],
)
def test_units(parse: Callable[[str], int], text: str, value: int) -> None:
    assert parse(text) == value


@given(nanoseconds=st.integers(0, 2**53 - 1))
def test_a_time_with_its_unit_is_itself(nanoseconds: int) -> None:
    assert parse_time_ns(f"{nanoseconds} ns") == nanoseconds


def test_a_missing_file_is_a_refused_document(tmp_path: Path) -> None:
    with pytest.raises(InvalidDocument, match="cannot read"):
        ModelProfile.read(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"nic": {"bandwidth_bytes_per_s": 7, "lanes": 8}},
            "bandwidth_bytes_per_s 7 is less than 1 for each of 8 lanes",
        ),
        ({"nic": {"bandwidth_bytes_per_s": 8, "lanes": 0}}, "greater than or equal to 1"),
        ({"fabric": {"bandwidth_bytes_per_s": 8, "lanes": 8}}, "`lanes` is not allowed in a fabric"),
    ],
)
def test_lanes_are_the_whole_cards_of_a_nic(changes: dict[str, object], words: str) -> None:
    uniform = {"nodes": 2, "devices_per_node": 8, "kind": "cpu", "memory_bytes": 1} | changes
    with pytest.raises(InvalidDocument, match=words):
        ClusterTopology.parse({"name": "x", "uniform": uniform})


@pytest.mark.parametrize(("a", "b"), [("s", "t"), ("n/0", "s"), ("n/0", "n")])
def test_lanes_are_of_a_nodes_link(a: str, b: str) -> None:
    nodes = [{"name": "n", "devices": [{"id": "n/0", "kind": "cpu", "memory_bytes": 1}]}]
    links = [{"a": a, "b": b, "bandwidth_bytes_per_s": 8, "lanes": 2}]
    with pytest.raises(InvalidDocument, match="has `lanes`, but does not join"):
        ClusterTopology.parse({"name": "x", "nodes": nodes, "switches": ["s", "t"], "links": links})
