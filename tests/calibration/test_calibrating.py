"""Calibration against a truth that is known: the judge runs a plan under true costs, and its timeline is the trace."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.calibration.calibrate import Calibration, answer, calibrate
from penstock.calibration.cost_fit import fit
from penstock.cli.main import main
from penstock.cli.measure.calibrating import calibrated_lines
from penstock.convert import to_plan, to_problem
from penstock.planning.judge import judge
from penstock.schemas.api.calibration import CalibrationRequest
from penstock.schemas.errors import InvalidDocument, InvalidPlan, UnsupportedRequest
from penstock.schemas.plan import PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.program import KINDS
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology
from penstock.schemas.trace import Hardware, Trace
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Stage, single_pipeline
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.schedules.early_backward import early_backward

US = 1000
FORWARD = [300, 900, 500, 700, 400, 800]
BACKWARD = [700, 1500, 1300, 1100, 900, 1700]


def profile(forward: list[int], backward: list[int], update: int = 50) -> ModelProfile:
    """Build a profile of six layers, measured at 2 rows; times in µs."""
    layers = [
        {"forward_ns": f * US, "backward_ns": b * US, "backward_weight_ns": b * US // 2, "stash_bytes": 100}
        for f, b in zip(forward, backward, strict=True)
    ]
    tensor = {"name": "x", "bytes_per_sample": 40_000, "gradient_bytes_per_sample": 40_000}
    return ModelProfile.parse(
        {
            "name": "six",
            "layers": [{"name": f"l{i}", "parameter_bytes": 4000, "update_ns": update * US} for i in range(6)],
            "boundaries": [[tensor]] * 5,
            "measurements": [{"device_kind": "cpu", "micro_batch_size": 2, "layers": layers}],
            "source": {"method": "measured", "expected_error": 0.15},
        }
    )


def cluster(bandwidth: int = 10**9, latency: int = 20_000, nodes: int = 1) -> ClusterTopology:
    link = {"bandwidth_bytes_per_s": bandwidth, "latency_ns": latency}
    uniform = {"nodes": nodes, "devices_per_node": 3 // nodes, "kind": "cpu", "memory_bytes": 10**9}
    return ClusterTopology.parse({"name": "c", "uniform": {**uniform, "fabric" if nodes == 1 else "nic": link}})


def planned(
    costs: ModelProfile, network: ClusterTopology, cuts: list[int], count: int = 6, *, recompute: bool = False
) -> PlanFile:
    """Plan 1F1B over stages that end after the layers ``cuts``, with 12 samples."""
    request = PlanRequest(profile=costs, topology=network, global_batch_size=12)
    problem = to_problem(request)
    bounds = list(zip([0, *(c + 1 for c in cuts)], [*cuts, 5], strict=True))
    stages = tuple(Stage(a, b, (d,), recompute=((a, b),) if recompute else ()) for d, (a, b) in enumerate(bounds))
    allocation = single_pipeline(stages, count)
    orders = early_backward(problem, allocation)
    timeline = simulate(problem, allocation, orders)
    best = JudgedPlan.of("by-hand", allocation, orders, timeline, True, "synchronous")
    return PlanFile(plan=to_plan(problem, request, best, ()), request=request)


def traced(true: PlanFile, run: PlanFile, clock_error_ns: int = 0) -> Trace:
    """Build the trace that ranks would measure of the plan ``run`` if the judge of ``true`` were the truth."""
    timeline = judge(true).timeline
    assert timeline is not None
    last = max(s for track in timeline.tracks for s in track.operations[:, 1].tolist())
    ranks = []
    for track in timeline.tracks:
        events = []
        for (kind, s, m), a, b in zip(
            track.operations.tolist(), track.start_ns.tolist(), track.end_ns.tolist(), strict=True
        ):
            events.append((f"{s}{KINDS[kind]}{m}", a, b))
            if KINDS[kind] == "F" and s < last:
                events.append((f"{s}SEND_F{m}", b, b))
            if KINDS[kind] == "B" and s:
                events.append((f"{s}SEND_B{m}", b, b))
        (device,) = track.devices
        stage = int(track.operations[0, 1])
        events += [(f"{u.stage}STEP", u.start_ns, u.end_ns) for u in timeline.updates if u.stage == stage]
        ranks.append(
            {
                "rank": device,
                "device": true.plan.pipelines[0].stages[stage].devices[0],
                "step": 0,
                "clock_error_ns": clock_error_ns,
                "events": [{"instruction": i, "start_ns": a, "end_ns": b} for i, a, b in events],
            }
        )
    return Trace.parse(
        {
            "plan_hash": run.plan.content_hash(),
            "predicted_time_per_global_batch_ns": 1,
            "measured_times_per_global_batch_ns": [timeline.time_per_global_batch_ns],
            "ranks": ranks,
            "plan_file": run,
        }
    )


TRUE = profile(FORWARD, BACKWARD)
WRONG = profile([2 * f for f in FORWARD], [3 * b for b in BACKWARD], update=20)
CUTS = [[1, 3], [0, 2], [2], [2, 4], [0, 3]]


def calibrated(cuts: list[list[int]], wrong: ModelProfile, **more: bool) -> Calibration:
    true = cluster(5 * 10**8, 60_000)
    traces = [traced(planned(TRUE, true, c, **more), planned(wrong, cluster(), c, **more)) for c in cuts]
    return calibrate(wrong, traces)


def time_ns(costs: ModelProfile, network: ClusterTopology, cuts: list[int], count: int) -> int:
    prediction = planned(costs, network, cuts, count).plan.prediction
    assert prediction is not None
    return prediction.time_per_global_batch_ns


@pytest.mark.parametrize("recompute", [False, True])
def test_a_profile_that_is_off_by_factors_becomes_the_truth(recompute: bool) -> None:
    """Forward, backward, update and network are all wrong: other partitions and numbers of micro-batches come out."""
    calibration = calibrated([[1, 3]], WRONG, recompute=recompute)
    assert abs(calibration.runs[0].error) < 1e-3
    assert calibration.runs[0].before_ns > 1.5 * calibration.runs[0].measured_ns
    for cuts in CUTS:
        for count in (3, 6, 12):
            wanted = time_ns(TRUE, cluster(5 * 10**8, 60_000), cuts, count)
            assert time_ns(calibration.profile, calibration.topology, cuts, count) == pytest.approx(wanted, rel=0.02)


def test_several_cuts_tell_layers_apart() -> None:
    """A profile in which all layers are alike: one trace cannot know better, three cuts can."""
    alike = profile([600] * 6, [1200] * 6)

    def worst(cuts: list[list[int]]) -> float:
        calibration = calibrated(cuts, alike)
        layers = calibration.profile.measurements[0].layers
        return max(abs(layer.forward_ns / (f * US) - 1) for layer, f in zip(layers, FORWARD, strict=True))

    assert worst(CUTS) < 0.1 < 0.5 < worst(CUTS[:1])


def test_traces_of_two_sizes_correct_the_relation_between_them() -> None:
    """The profile has its 4-row times from a slower moment of the host: one trace keeps that relation, two mend it."""

    def with_size_4(costs: ModelProfile, factor: float) -> ModelProfile:
        (of_2,) = costs.measurements
        layers = []
        for layer in of_2.layers:
            times = {
                key: round(getattr(layer, key) * factor) for key in ("forward_ns", "backward_ns", "backward_weight_ns")
            }
            layers.append(layer.model_copy(update={**times, "stash_bytes": 2 * layer.stash_bytes}))
        return costs.model_copy(
            update={"measurements": (of_2, of_2.model_copy(update={"micro_batch_size": 4, "layers": tuple(layers)}))}
        )

    true, drifted = with_size_4(TRUE, 1.8), with_size_4(TRUE, 2.4)
    of_2, of_4 = (traced(planned(true, cluster(), [1, 3], m), planned(drifted, cluster(), [1, 3], m)) for m in (6, 3))

    def error(*traces: Trace) -> float:
        wanted = time_ns(true, cluster(), [0, 2], 3)
        return abs(time_ns(calibrate(drifted, traces).profile, cluster(), [0, 2], 3) / wanted - 1)

    assert error(of_2) > 0.2
    assert error(of_2, of_4) < 0.02


def test_the_network_is_found_from_messages_that_somebody_waited_for() -> None:
    calibration = calibrated([[1, 3]], TRUE)
    fabric = calibration.topology.uniform.fabric
    assert calibration.num_messages > 4
    planned_ns = 60_000 + 80_000 * 1e9 / 5e8
    assert fabric.latency_ns + 80_000 * 1e9 / fabric.bandwidth_bytes_per_s == pytest.approx(planned_ns, rel=1e-3)


def test_between_nodes_it_is_the_nic_and_bad_clocks_say_nothing() -> None:
    for error, factor in ((0, 0.5), (10**6, 1.0)):
        true, assumed = cluster(5 * 10**8, 40_000, nodes=3), cluster(10**9, 20_000, nodes=3)
        trace = traced(planned(TRUE, true, [1, 3]), planned(TRUE, assumed, [1, 3]), error)
        nic = calibrate(TRUE, [trace]).topology.uniform.nic
        assert nic.bandwidth_bytes_per_s == pytest.approx(factor * 10**9, rel=1e-3)
        assert nic.latency_ns == pytest.approx(20_000 / factor, rel=1e-3)


def test_nodes_links_and_a_matrix_take_the_changes() -> None:
    expanded = cluster(10**9, 20_000, nodes=3).expanded()
    ids = tuple(d.id for node in expanded.nodes for d in node.devices)
    table = tuple(tuple(10**9 for _ in ids) for _ in ids)
    matrix = ClusterTopology.parse(
        {"name": "m", "nodes": expanded.nodes, "matrix": {"devices": ids, "bandwidth_bytes_per_s": table}}
    )
    slow = cluster(5 * 10**8, 0, nodes=3)
    trace = traced(planned(TRUE, slow, [1, 3]), planned(TRUE, expanded, [1, 3]))
    links = calibrate(TRUE, [trace]).topology.links
    assert {link.bandwidth_bytes_per_s for link in links} != {10**9}
    trace = traced(planned(TRUE, slow, [1, 3]), planned(TRUE, matrix, [1, 3]))
    fitted = calibrate(TRUE, [trace]).topology.matrix
    assert fitted.bandwidth_bytes_per_s[0][1] == pytest.approx(5 * 10**8, rel=1e-3)
    assert fitted.bandwidth_bytes_per_s[0][2] == 10**9, "nothing was sent from stage 0 to stage 2"


def test_its_source_says_what_it_was_made_from() -> None:
    source = calibrated([[1, 3], [2]], WRONG).profile.source
    assert source.method == "calibrated"
    assert source.description.count("sha256:") == 2
    assert 0.01 <= source.expected_error < 0.05


def test_what_cannot_be_calibrated_is_refused() -> None:
    file = planned(TRUE, cluster(), [1, 3])
    trace = traced(file, file)
    with pytest.raises(InvalidDocument, match="no trace"):
        calibrate(TRUE, [])
    with pytest.raises(InvalidDocument, match="does not hold the plan"):
        calibrate(TRUE, [trace.model_copy(update={"plan_file": None})])
    other = TRUE.model_copy(update={"layers": (TRUE.layers[0].model_copy(update={"name": "new"}), *TRUE.layers[1:])})
    with pytest.raises(InvalidDocument, match="differ from layer 0"):
        calibrate(other, [trace])
    with pytest.raises(InvalidDocument, match="different clusters"):
        calibrate(TRUE, [trace, traced(file, planned(TRUE, cluster(10**6), [1, 3]))])
    alien = trace.ranks[0].model_copy(update={"device": "mars/0"})
    with pytest.raises(InvalidPlan, match="mars/0"):
        calibrate(TRUE, [trace.model_copy(update={"ranks": (alien,)})])


def computed_on(trace: Trace, **more: Any) -> Trace:
    """Return the trace with what its ranks computed on."""
    facts = {"kind": "cpu", "model": "Xeon", "ranks": 1, "cores": 2, "machine_cores": 2, "cpu_ns": 4, "wall_ns": 10}
    hardware = Hardware.model_validate(facts | {"load_at_start": 0.0, "load_at_end": 0.0} | more)
    return trace.model_copy(
        update={"ranks": tuple(one.model_copy(update={"hardware": hardware}) for one in trace.ranks)}
    )


def of_kind(document: ModelProfile | ClusterTopology, kind: str) -> Any:
    """Return the document with another kind of device."""
    return type(document).parse(json.loads(document.model_dump_json().replace('"cpu"', json.dumps(kind))))


@pytest.mark.parametrize(
    ("of", "kind", "words"),
    [
        pytest.param("A100", "cpu", "rank 0 of the trace computed on cpu (Xeon), but the costs", id="CPU for GPU"),
        pytest.param("A100", "H100", "computed on H100 (Xeon), but the costs of the profile are", id="other GPU"),
        pytest.param("cpu", "H100", "costs of the profile are for cpu", id="GPU for CPU"),
        pytest.param("A100", "Graphics", "[{name: Graphics, scale_from: A100, speed: 1.0}]", id="unknown name"),
        pytest.param("cpu", "cpu", None, id="as measured"),
        pytest.param("A100", "A100", None, id="as planned"),
        pytest.param("laptop", "cpu", None, id="a name of one's own"),
    ],
)
def test_a_trace_of_other_hardware_is_refused(of: str, kind: str, words: str | None) -> None:
    costs = of_kind(TRUE, of)
    file = planned(costs, of_kind(cluster(), of), [1, 3])
    trace = computed_on(traced(file, file), kind=kind)
    if words is None:
        assert calibrate(costs, [trace]).profile.device_kinds == (of,)
        return
    with pytest.raises(UnsupportedRequest) as caught:
        calibrate(costs, [trace], any_factor=True)
    assert words in str(caught.value)


@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_a_factor_that_is_hardly_true_is_asked_about(factor: float) -> None:
    slow = profile([round(f * factor) for f in FORWARD], [round(b * factor) for b in BACKWARD])
    trace = computed_on(traced(planned(slow, cluster(), [1, 3]), planned(TRUE, cluster(), [1, 3])), ranks=4)
    with pytest.raises(UnsupportedRequest, match="beyond the limit of 3: the run took") as caught:
        calibrate(TRUE, [trace])
    for words in ("measured on a busy machine: 4 ranks shared 2 cores, a rank had 40% of one", "--any-factor"):
        assert words in str(caught.value)
    accepted = calibrate(TRUE, [trace], any_factor=True)
    assert abs(accepted.runs[0].error) < 1e-3
    assert accepted.profile.source.expected_error == pytest.approx(min(1, abs(factor - 1)), abs=0.1)
    of_run, of_factor = accepted.profile.assumptions[-2:]
    assert "4 ranks shared 2 cores" in of_run
    assert f"a factor of {accepted.runs[0].measured_ns / accepted.runs[0].before_ns:.3g}" in of_factor
    assert calibrated_lines(accepted, links=False)[1] == f"note             {accepted.runs[0].note}"
    assert "× the predicted" in calibrated_lines(accepted, links=False)[0]
    assert calibrated_lines(replace(accepted, issue_ns=6_799_740.0), links=False)[3] == (
        "issuing messages takes 6.80 ms per operation"
    )


@given(st.data())
def test_the_fit_explains_totals_that_can_be_explained(data: st.DataObject) -> None:
    """Totals made from costs: found again as totals, in proportion where one total is all that is known."""
    count = data.draw(st.integers(1, 6))
    prior = np.array(data.draw(st.lists(st.integers(1, 1000), min_size=count, max_size=count)), dtype=float)
    true = np.array(data.draw(st.lists(st.integers(1, 1000), min_size=count, max_size=count)), dtype=float)
    whole = np.ones((1, count))
    assert fit(whole, whole @ true, prior) == pytest.approx(prior * true.sum() / prior.sum())
    cut = data.draw(st.integers(0, count))
    parts = np.vstack((whole, np.arange(count) < cut))
    fitted = fit(parts, parts @ true, prior)
    assert (fitted >= 0).all()
    if 0 < cut < count and prior.min() * 4 > prior.max() and true.min() * 4 > true.max():
        assert parts @ fitted == pytest.approx(parts @ true, rel=0.02)


@pytest.mark.tier("ci")
def test_the_command_writes_profile_and_topology(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = planned(WRONG, cluster(), [1, 3])
    trace = traced(planned(TRUE, cluster(5 * 10**8, 60_000), [1, 3]), run)
    names = ("wrong", "trace", "plan", "profile", "topology", "chrome")
    wrong, traces, plan, profile_out, topology_out, chrome = (str(tmp_path / f"{name}.json") for name in names)
    WRONG.write(wrong)
    trace.write(traces)
    run.write(plan)
    assert main(["calibrate", wrong, traces, "-o", profile_out, "--output-topology", topology_out]) == 0
    output = capsys.readouterr().out
    assert "before" in output
    assert "expected error" in output
    calibration = calibrate(WRONG, [trace])
    assert main(["calibrate", wrong, traces, "-o", profile_out, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["runs"][0]["before_ns"] != document["runs"][0]["after_ns"]
    assert main(["calibrate", wrong, traces, "-o", profile_out, "--output-topology", topology_out]) == 0
    capsys.readouterr()
    request = CalibrationRequest.parse({"profile": WRONG, "traces": [trace]})
    assert answer(request) == calibration.out()
    assert (ModelProfile.read(profile_out), ClusterTopology.read(topology_out)) == (
        calibration.profile,
        calibration.topology,
    )
    assert main(["calibrate", wrong, traces]) == 0
    printed = ModelProfile.parse(json.loads(capsys.readouterr().out))
    assert printed == calibrate(WRONG, [trace], links=False).profile
    assert main(["export", "chrome", plan, "--trace", traces, "-o", chrome]) == 0
    events = json.loads(Path(chrome).read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"predicted", "measured"}
    assert main(["export", "chrome", plan, "-o", chrome]) == 0
    planned(TRUE, cluster(), [2]).write(plan)
    assert main(["export", "chrome", plan, "--trace", traces, "-o", chrome]) == 65
    assert "the trace is of plan" in capsys.readouterr().err
