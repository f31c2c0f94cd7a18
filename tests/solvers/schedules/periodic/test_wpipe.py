"""WPipe's order against the paper: the loop of appendix A.5, versions, idle time, Table 1, communication."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Literal

import pytest
from problems import chain, make_problem

from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.program import BACKWARD, FORWARD, KINDS, RECOMPUTE
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import STEP
from penstock.solvers.model.timeline import Timeline
from penstock.solvers.model.unroll import unroll
from penstock.solvers.schedules.periodic.eager import eager
from penstock.solvers.schedules.periodic.wpipe import WarmUp, most_in_flight, wpipe
from penstock.solvers.verify.verifier import verify

DEPTHS = [(n, m) for n in (1, 2, 3, 4) for m in range(n, 9)]
RULE: Literal["double_grouped"] = "double_grouped"


def uniform(depth: int, number: int, groups: int = 2, **settings: object) -> tuple[Problem, Allocation]:
    """Build one layer per part, N devices, M micro-batches of a sample."""
    defaults: dict[str, object] = {"nodes": (depth,), "global_batch_size": number, "count_buffers": False}
    problem = make_problem([10] * groups * depth, **defaults | settings)  # type: ignore[arg-type]
    stages = tuple(Stage(part, part, (part % depth,)) for part in range(groups * depth))
    return problem, single_pipeline(stages, number)


def rows_of(problem: Problem, allocation: Allocation, policy: WarmUp = "A") -> list[list[tuple[int, int, int, int]]]:
    """Return every device's unrolled operations as (kind, group, period, micro-batch of the period)."""
    pattern = wpipe(problem, allocation, policy=policy)
    depth, number = len(allocation.stages) // 2, allocation.num_micro_batches
    rows = unroll(problem, allocation, pattern, RULE).orders.rows
    assert [row.devices for row in rows] == [stage.devices for stage in allocation.stages[:depth]]
    return [[(k, s // depth, m // number, m % number) for k, s, m in row.operations.tolist()] for row in rows]


def judged(problem: Problem, allocation: Allocation, policy: WarmUp = "A") -> Timeline:
    """Return the plan's timeline, verified."""
    pattern = wpipe(problem, allocation, policy=policy)
    timeline = simulate(problem, allocation, pattern, update_rule=RULE)
    assert verify(problem, allocation, pattern, timeline, update_rule=RULE) == []
    return timeline


def loop_of_appendix_a5(number: int, periods: int, lag: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the loop of ALGORITHMS A.5: for v = 0, 1, …: the forward of slot v, the backward of slot v - lag."""

    def slot(v: int) -> tuple[int, int, int]:
        period, rest = divmod(v, 2 * number)
        return period, rest // number, rest % number

    for v in range(2 * number * periods):
        period, group, m = slot(v)
        yield FORWARD, group, period, m
        if v >= lag:
            period, group, m = slot(v - lag)
            if group == 1 or period > 0:
                yield BACKWARD, group, period if group else period - 1, m


def test_order_of_two_devices_and_two_micro_batches() -> None:
    """ALGORITHMS appendix C, printed there from another construction."""
    expected = [
        "F0.0.0 F0.0.1 F1.0.0 F1.0.1 B1.0.0 F0.1.0 B1.0.1 F0.1.1 B0.0.0 F1.1.0 B0.0.1 F1.1.1 B1.1.0",
        "F0.0.0 F0.0.1 F1.0.0 B1.0.0 F1.0.1 B1.0.1 F0.1.0 B0.0.0 F0.1.1 B0.0.1 F1.1.0 B1.1.0 F1.1.1 B1.1.1",
    ]
    for row, text in zip(rows_of(*uniform(2, 2)), expected, strict=True):
        words = [f"{KINDS[k]}{g}.{t}.{m}" for k, g, t, m in row if k != STEP]
        assert " ".join(words[: len(text.split())]) == text


@pytest.mark.parametrize("policy", ["A", "B"])
@pytest.mark.parametrize(("depth", "number"), DEPTHS)
def test_order_is_the_papers_loop(depth: int, number: int, policy: WarmUp) -> None:
    """Section 3.2; also for parts of any lengths, which the order does not depend on."""
    if policy == "B" and number < 2 * depth - 2:
        return
    problem, allocation = uniform(depth, number)
    lengths = [1 + 7 * part % 5 for part in range(2 * depth)]
    uneven = make_problem(lengths, nodes=(depth,), global_batch_size=number)
    rows = rows_of(problem, allocation, policy)
    assert rows == rows_of(uneven, allocation, policy)
    for i, row in enumerate(rows):
        lag = (depth - 1 - i) * (1 if policy == "A" else 2)
        operations = [operation for operation in row if operation[0] != STEP]
        rounds = max(t for _k, _g, t, _m in operations)
        expected = [each for each in loop_of_appendix_a5(number, rounds + 3, lag) if each[2] <= rounds]
        assert operations == expected[: len(operations)]


@pytest.mark.parametrize(("depth", "number"), DEPTHS)
def test_group_0_needs_two_versions_and_group_1_one(depth: int, number: int) -> None:
    """Table 1 and section 3.2: gradients of group 0 are one update late, gradients of group 1 on time (claim W1)."""
    for policy in ("A", "B") if number >= 2 * depth - 2 else ("A",):
        for row in rows_of(*uniform(depth, number), policy):
            for group in (0, 1):
                newest, used = 0, {}
                alive, late = 1, set()
                for kind, group_of_operation, period, m in row:
                    if group_of_operation != group:
                        continue
                    if kind == STEP:
                        newest += 1
                    elif kind == FORWARD:
                        used[period, m] = newest
                    else:
                        version = used.pop((period, m))
                        alive = max(alive, newest - min([version, *used.values()]) + 1)
                        late.add(period - version)
                assert alive <= (2 if group == 0 else 1)
                assert late == ({0, 1} if group == 0 else {0})


@pytest.mark.parametrize("backward_ns", [10, 20])
@pytest.mark.parametrize(("depth", "number"), DEPTHS)
def test_no_device_idles_once_the_pipeline_is_full(depth: int, number: int, backward_ns: int) -> None:
    """Bubble 0 for M ≥ N (Table 1; claim W1)."""
    problem, allocation = uniform(depth, number, backward_ns=[backward_ns] * 2 * depth)
    timeline = judged(problem, allocation)
    assert timeline.time_per_global_batch_ns == 2 * number * (10 + backward_ns)
    assert all(use.idle_ns == use.communication_ns == 0 for use in timeline.uses.values())


def test_nominal_starts_are_a_schedule_without_transfers() -> None:
    """Every operation begins after what it needs has ended, in all periods; devices run one at a time."""
    problem, allocation = uniform(3, 4, backward_ns=[25] * 6)
    allocation = replace_recompute(allocation, True)
    pattern = wpipe(problem, allocation)
    durations = {FORWARD: 10, RECOMPUTE: 10, BACKWARD: 25}
    start = {(o.kind, o.stage, o.micro_batch): o.start_ns + o.shift * pattern.period_ns for o in pattern.operations}
    assert all(0 <= o.start_ns < pattern.period_ns for o in pattern.operations)
    for (kind, part, m), at in start.items():
        after = {
            FORWARD: (FORWARD, part - 1, m),
            RECOMPUTE: (FORWARD, part, m),
            BACKWARD: (BACKWARD, part + 1, m) if part < 5 else (FORWARD, part, m),
        }[kind]
        if after in start:
            assert at >= start[after] + durations[after[0]]
    for device in range(3):
        busy = sorted(
            (at % pattern.period_ns, durations[kind]) for (kind, part, _m), at in start.items() if part % 3 == device
        )
        ends = [at + length for at, length in busy]
        assert all(end <= at for end, (at, _length) in zip(ends, busy[1:], strict=False))
        assert ends[-1] <= busy[0][0] + pattern.period_ns


def test_one_device_holds_both_groups() -> None:
    """ALGORITHMS B.2: N = 1, group 0 still a period late, nothing travels."""
    problem, allocation = uniform(1, 1, boundary_bytes=1000)
    (row,) = rows_of(problem, allocation)
    words = [f"{KINDS[k] if k != STEP else 'S'}{g}.{t}" for k, g, t, _m in row]
    assert words[:9] == ["F0.0", "F1.0", "B1.0", "F0.1", "B0.0", "S1.0", "F1.1", "B1.1", "S0.0"]
    timeline = judged(problem, allocation)
    assert timeline.time_per_global_batch_ns == 60
    assert len(timeline.transfers.stage) == 0


def test_communication_per_micro_batch() -> None:
    """Section 3.4, claim W4: C_WPipe = 2 (2N - 1) C_a, twice 2BW's 2 (N - 1) C_a and two more around the ring."""
    for depth in (2, 3, 4):
        problem, allocation = uniform(depth, depth, boundary_bytes=1)
        timeline = judged(problem, allocation)
        middle = [int(m) for m in timeline.transfers.micro_batch if depth <= m < 2 * depth]
        assert len(middle) == depth * 2 * (2 * depth - 1)
        single, stages = uniform(depth, depth, groups=1, boundary_bytes=1)
        pattern = eager(single, stages, update_rule="double_buffered")
        other = simulate(single, stages, pattern, update_rule="double_buffered")
        middle = [int(m) for m in other.transfers.micro_batch if depth <= m < 2 * depth]
        assert len(middle) == depth * 2 * (depth - 1)


def test_a_longer_warm_up_hides_transfers() -> None:
    """K = N - i waits for N + N operations and 2 (N - 1) transfers per N slots; 2 (N - i) - 1 hides them all."""
    problem, allocation = uniform(4, 8, boundary_bytes=6, channel="full")
    assert judged(problem, allocation, "B").time_per_global_batch_ns == 2 * 8 * 30
    assert judged(problem, allocation, "A").time_per_global_batch_ns == 2 * 8 * (30 + 2 * 6 * 3 // 4)


def test_recomputation_runs_while_the_gradient_travels() -> None:
    """Section 5.6 of ALGORITHMS: up to a forward's time of each wait is hidden."""
    problem, allocation = uniform(2, 4, boundary_bytes=4, channel="full", stash_bytes=5)
    again = replace_recompute(allocation, True)
    apart = judged(problem, again)
    pattern = wpipe(problem, again)
    joined = replace(pattern, operations=tuple(o for o in pattern.operations if o.kind != RECOMPUTE))
    waiting = simulate(problem, again, joined, update_rule=RULE)
    assert apart.time_per_global_batch_ns < waiting.time_per_global_batch_ns


def replace_recompute(allocation: Allocation, recompute: bool) -> Allocation:
    stages = allocation.pipelines[0].stages
    again = tuple(replace(s, recompute=((s.first, s.last),) if recompute else ()) for s in stages)
    return single_pipeline(again, allocation.num_micro_batches)


class Table1:
    """Table 1 as printed: bubble, buffers in S_m, activations in S_a without and with recomputation (R-24, R-25).

    Its M in the last three rows is what stage 0 has in flight, so it is exact at M = N.
    """

    @staticmethod
    def buffers(system: str, n: int) -> Fraction:
        return {"pipedream": Fraction(n + 1, 2), "2bw": Fraction(2), "wpipe": Fraction(1)}[system]

    @staticmethod
    def activations(system: str, n: int, m: int) -> Fraction:
        return Fraction(4 * m - n + 1, 4) if system == "wpipe" else Fraction(2 * m - n + 1, 2)


def weights_and_activations(system: str, n: int, m: int, recompute: bool = False) -> tuple[Fraction, list[int]]:
    """Return (all versions of all weights) / S_m, and each device's peak of activations, S_a = 8 n bytes, simulated.

    Activations that a backward rebuilds inside itself are the only workspace of the simulator. Received inputs are left
    out, as in the table.
    """
    groups = 2 if system == "wpipe" else 1
    part = 8 // groups
    settings: dict[str, object] = {"parameter_bytes": 6 // groups, "stash_bytes": part, "gradient_factor": 0}
    problem, allocation = uniform(n, m, groups, **settings)
    allocation = replace_recompute(allocation, recompute)
    if system == "wpipe":
        timeline = judged(problem, allocation)
    else:
        rule: Literal["weight_stashing", "double_buffered"] = (
            "weight_stashing" if system == "pipedream" else "double_buffered"
        )
        pattern = eager(problem, allocation, update_rule=rule)
        timeline = simulate(problem, allocation, pattern, update_rule=rule)
    uses = [use.memory for use in timeline.uses.values()]
    weights = Fraction(sum(u.parameters + u.versions for u in uses), 6 * n)
    return weights, [u.activations + u.workspace for u in uses]


@pytest.mark.parametrize("n", [2, 3, 4, 6])
def test_table_1_at_as_many_micro_batches_as_stages(n: int) -> None:
    """Claim W2. A group with one version has no buffer in the table; group 1's half of the weights comes on top."""
    for system in ("pipedream", "2bw", "wpipe"):
        weights, peaks = weights_and_activations(system, n, n)
        assert weights == Table1.buffers(system, n) + (Fraction(1, 2) if system == "wpipe" else 0)
        assert Fraction(sum(peaks), 8 * n) == Table1.activations(system, n, n)


@pytest.mark.parametrize(("n", "m"), [(2, 3), (4, 8), (3, 7)])
def test_activations_for_more_micro_batches(n: int, m: int) -> None:
    """R-25: M + N - i half stages per device, (2M + N + 1)/4 S_a in all; fewer than in the printed formula."""
    _weights, peaks = weights_and_activations("wpipe", n, m)
    assert [peak // 4 for peak in peaks] == [m + n - i for i in range(n)]
    assert Fraction(sum(peaks), 8 * n) == Fraction(2 * m + n + 1, 4) < Table1.activations("wpipe", n, m)
    assert [max(sum(peak) for peak in most_in_flight(n, i, "A", m)) for i in range(n)] == [m + n - i for i in range(n)]


def test_worked_example_in_gigabytes() -> None:
    """ALGORITHMS 5.3: N = M = 4, S_m = 8, S_a = 4: WPipe 8, 13 and 2 with recomputation; 2BW 16, 10 and 4."""
    sizes = {s: (8 * Table1.buffers(s, 4), 4 * Table1.activations(s, 4, 4)) for s in ("wpipe", "2bw")}
    assert sizes == {"wpipe": (8, 13), "2bw": (16, 10)}
    live = {s: weights_and_activations(s, 4, 4, recompute=True)[1] for s in ("wpipe", "2bw")}
    assert {s: 4 * Fraction(sum(peaks), 32) for s, peaks in live.items()} == {"wpipe": 2, "2bw": 4}


def test_recomputation_keeps_the_inputs_of_every_micro_batch_in_flight() -> None:
    """R-25: the paper leaves out (M + N - i) boundary tensors."""
    problem, allocation = uniform(3, 5, boundary_bytes=7, stash_bytes=100, count_buffers=True)
    uses = judged(problem, replace_recompute(allocation, True)).uses
    for i in (1, 2):
        assert uses[i].memory.buffers >= 7 * (5 + 3 - i)


def test_refusals() -> None:
    """Each refusal names what is supported instead."""
    problem, allocation = uniform(4, 3)
    with pytest.raises(UnsupportedRequest, match="at least 4 micro-batches per update; the plan has 3") as refused:
        wpipe(problem, allocation)
    assert refused.value.remedy is not None
    assert "pipelines of at most 3 devices" in refused.value.remedy
    problem, allocation = uniform(4, 5)
    wpipe(problem, allocation)
    with pytest.raises(UnsupportedRequest, match="warm-up B, needs at least 6") as refused:
        wpipe(problem, allocation, policy="B")
    assert refused.value.remedy is not None
    assert "pipelines of at most 3 devices" in refused.value.remedy
    problem, allocation = uniform(4, 8, groups=1)
    with pytest.raises(UnsupportedRequest, match="one pipeline of 2N stages"):
        wpipe(problem, allocation)
    dealt = chain([(1, [0, 1]), (1, [0, 1])], 4, dispatch="round_robin")
    with pytest.raises(UnsupportedRequest, match="share every micro-batch by rows"):
        wpipe(make_problem([1, 1]), dealt)
