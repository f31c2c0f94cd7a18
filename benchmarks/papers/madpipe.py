"""MadPipe (Beaumont et al., 2022): figures 6, 7 and 8 as ratios, and the statements of ALGORITHMS 8 (M2 to M7).

ResNet-50, ResNet-101, Inception-v3 and DenseNet-121 with images of 1000 × 1000 in micro-batches of 8 come from the
shipped analytic profiles on V100, whose times and boundaries grow with the number of pixels. As in the paper, layers
are grouped until one tensor crosses each cut, and a group keeps its input and nothing else (section 4.1). P = 2 … 8
processors of 3 … 16 GB, links of 12 and 24 GB/s.

The baseline is the paper's: PipeDream's straight dynamic program, then 1F1B* with the smallest period that really fits.
Its memory rule, "at most P activations", is read in two ways: P on every stage (ALGORITHMS 4.5), and P - s + 1 on stage
s, which PipeDream's schedule keeps without transfers. MadPipe is this library's planner: the exact contiguous optimum,
and allocations with a special processor, whose patterns come from the periodic program. Periods belong to patterns that
fit; a sample is simulated besides.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import geometric_mean

import numpy as np
from paper_models import profile
from report import Row, Section, main

from penstock.convert import to_problem
from penstock.examples.catalogue import cluster
from penstock.importers.pipedream import read_profile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import MemoryModel, NetworkModel, PlanRequest
from penstock.solvers.model.network import Inside, Network
from penstock.solvers.model.problem import Device, Measured, Problem
from penstock.solvers.planners.madpipe.chain import Chain
from penstock.solvers.planners.madpipe.contiguous import Part, PartsAtPeriod, at_period, contiguous_optimum, line_of
from penstock.solvers.planners.madpipe.label_kernel import EXISTS, Rounding, special
from penstock.solvers.planners.madpipe.labels import TOLERANCE, portfolio, special_optimum
from penstock.solvers.planners.madpipe.paper import first_phase
from penstock.solvers.schedules.periodic import inside_out
from penstock.solvers.schedules.periodic.ilp import solve
from penstock.solvers.schedules.periodic.one_f_one_b_star import groups, minimal_period_ns
from penstock.solvers.schedules.support.stage_line import StageLine
from penstock.solvers.solve import driver

SIDES = {"resnet-50": 224, "resnet-101": 224, "inception-v3": 299, "densenet-121": 224}
"""The side of the images of the shipped profiles."""
TEXTS = {"resnet-101": ("resnet101.txt", 128), "densenet-121": ("densenet121.txt", 64)}
"""The texts of PipeDream's profiles and their micro-batches, images of 224 × 224."""
SIDE = 1000
IMAGE_BYTES = 3 * SIDE * SIDE * 4
MICRO_BATCH = 8
MICRO_BATCHES = 16
PROCESSORS = (2, 4, 6, 8)
MEMORIES_GB = (3, 4, 5, 6, 8, 10, 12, 16)
BANDWIDTHS_GB = (12, 24)
SCALABLE_GB = 12
BETTER = 1.2
BINDS = 1.1
RULES = ("P on every stage", "P - s + 1 on stage s")
"""The readings of PipeDream's memory rule."""


@dataclass(frozen=True)
class Case:
    """The results for one network, P, M and β: periods in ns, 0 without a plan."""

    network: str
    processors: int
    memory_gb: int
    bandwidth_gb: int
    sequential_ns: int
    madpipe_promised_ns: int
    madpipe_ns: int
    contiguous_ns: int
    pipedream_promised_ns: tuple[int, int]
    pipedream_ns: tuple[int, int]

    def ratio(self, rule: int) -> float:
        """Return PipeDream's valid period over MadPipe's."""
        return self.pipedream_ns[rule] / self.madpipe_ns


def sections(quick: bool, folder: Path | None) -> Iterator[Section]:
    """Yield figures 6 to 8, then the statements."""
    names = ["resnet-50"] if quick else list(SIDES)
    processors = (2, 4) if quick else PROCESSORS
    memories = MEMORIES_GB[::3] if quick else MEMORIES_GB
    cases = [
        _case(name, p, memory, bandwidth, folder)
        for name in names
        for p in processors
        for memory in memories
        for bandwidth in BANDWIDTHS_GB
    ]
    yield _figure_6(cases)
    yield _figure_7(cases)
    yield _figure_8(cases)
    yield _statements(names, quick, folder)


def _figure_6(cases: list[Case]) -> Section:
    """Compare, for ResNet-50, PipeDream's valid periods with MadPipe's, and promised periods with valid ones."""
    resnets = [case for case in cases if case.network == "resnet-50"]
    rows = []
    for rule, words in enumerate(RULES):
        both = [case for case in resnets if case.pipedream_ns[rule]]
        ratios = [case.ratio(rule) for case in both]
        optimism = geometric_mean(case.pipedream_ns[rule] / case.pipedream_promised_ns[rule] for case in both)
        largest = max(ratios)
        rows += [
            Row(f"valid period, PipeDream ({words}) over MadPipe, median", "1.2 routinely", f"{np.median(ratios):.2f}"),
            Row("the same, largest", "2 to 3", f"{largest:.2f}", None, _where(both, rule)),
            Row("the same, smallest", "about 1", f"{min(ratios):.3f}", min(ratios) >= 1),
            Row("only MadPipe has a valid schedule", "", f"{len(resnets) - len(both)} of {len(resnets)} cases"),
            Row("valid over promised period, PipeDream", "far above 1 where memory is short", f"{optimism:.2f}"),
        ]
    ours = geometric_mean(case.madpipe_ns / case.madpipe_promised_ns for case in resnets if case.madpipe_ns)
    wrong = _violations(resnets)
    rows.append(Row("valid over promised period, MadPipe", "near 1", f"{ours:.2f}", ours < BETTER, LITERAL))
    rows.append(Row("promised periods never grow with memory", "non-increasing", f"{wrong} violations", wrong == 0))
    return Section("Figure 6: periods for ResNet-50", SETUP, rows)


SETUP = "Valid: the period of a pattern that fits in memory. Promised: what the dynamic program or the search says."
LITERAL = "the search's memory of the special processor is a lower bound, though the tightened one"


def _where(cases: list[Case], rule: int) -> str:
    worst = max(cases, key=lambda case: case.ratio(rule))
    return f"at P = {worst.processors}, M = {worst.memory_gb} GB, {worst.bandwidth_gb} GB/s"


def _violations(cases: list[Case]) -> int:
    """Count neighbouring cases of which the one with more memory promises a longer period."""
    count = 0
    for a, b in pairwise(sorted(cases, key=lambda c: (c.processors, c.bandwidth_gb, c.memory_gb))):
        same = (a.processors, a.bandwidth_gb) == (b.processors, b.bandwidth_gb)
        if same and a.madpipe_promised_ns:
            count += b.madpipe_promised_ns > a.madpipe_promised_ns * (1 + 2 / TOLERANCE)
    return count


def _figure_7(cases: list[Case]) -> Section:
    """Compare geometric means over P and β, for each memory, all networks together."""
    rows = []
    for memory in dict.fromkeys(case.memory_gb for case in cases):
        of_memory = [case for case in cases if case.memory_gb == memory and case.madpipe_ns]
        for rule, words in enumerate(RULES):
            both = [case for case in of_memory if case.pipedream_ns[rule]]
            note = f"{len(both)} cases, {len(of_memory) - len(both)} more only with MadPipe"
            what, printed = f"M = {memory} GB, {words}", "> 1.2" if memory < 10 else "towards 1"
            if not both:
                rows.append(Row(what, printed, "PipeDream has no valid schedule", None, note))
                continue
            mean = geometric_mean(case.ratio(rule) for case in both)
            good = mean > BETTER if memory < 10 else mean < BETTER
            rows.append(Row(what, printed, f"{mean:.3f}", good, note if good else f"{note}; {CAUSE}"))
        gained = [case.contiguous_ns / case.madpipe_ns for case in of_memory if case.contiguous_ns]
        if gained:
            rows.append(Row(f"M = {memory} GB, contiguous optimum over MadPipe", "", f"{geometric_mean(gained):.3f}"))
    rows += _where_memory_binds(cases)
    return Section(
        "Figure 7: PipeDream's period over MadPipe's, geometric mean over P, β and networks",
        "Cases in which both have a valid schedule.",
        rows,
    )


CAUSE = (
    "the tightest cases, in which only MadPipe has a schedule, are left out; the analytic chains are shorter and "
    "smoother than measured ones"
)


def _where_memory_binds(cases: list[Case]) -> Iterator[Row]:
    """Yield the ratios in the paper's regime, for any number of gigabytes.

    There MadPipe's period is longer than with the largest memory.
    """
    best: dict[tuple[str, int, int], int] = {}
    for case in cases:
        if case.madpipe_ns:
            key = (case.network, case.processors, case.bandwidth_gb)
            best[key] = min(best.get(key, case.madpipe_ns), case.madpipe_ns)
    for rule, words in enumerate(RULES):
        bound = [
            case
            for case in cases
            if case.pipedream_ns[rule]
            and case.madpipe_ns > BINDS * best[case.network, case.processors, case.bandwidth_gb]
        ]
        if bound:
            ratios = [case.ratio(rule) for case in bound]
            mean, over = geometric_mean(ratios), sum(ratio > BETTER for ratio in ratios)
            note = f"{len(bound)} cases, {over} of them above 1.2, at most {max(ratios):.2f}"
            yield Row(f"where memory costs MadPipe 10 % or more, {words}", "> 1.2", f"{mean:.3f}", mean > BETTER, note)


def _figure_8(cases: list[Case]) -> Section:
    """Compare U(1, L) / T for large memory."""
    rows = []
    most = max(case.memory_gb for case in cases)
    for p in dict.fromkeys(case.processors for case in cases):
        large = [c for c in cases if c.processors == p and c.memory_gb >= SCALABLE_GB and c.madpipe_ns]
        if not large:
            large = [c for c in cases if c.processors == p and c.memory_gb == most and c.madpipe_ns]
        if not large:
            continue
        ours = geometric_mean(c.sequential_ns / c.madpipe_ns for c in large)
        theirs = [c.sequential_ns / c.pipedream_ns[0] for c in large if c.pipedream_ns[0]]
        baseline = f"{geometric_mean(theirs):.2f}" if theirs else "none"
        rows.append(
            Row(
                f"P = {p}",
                "scales with P; MadPipe above PipeDream",
                f"{ours:.2f}",
                not theirs or ours >= geometric_mean(theirs),
                f"PipeDream {baseline}",
            )
        )
    return Section(
        "Figure 8: speedup over one processor at M = 12 and 16 GB",
        "Geometric mean over networks and β of U(1, L) / T.",
        rows,
    )


def _statements(names: list[str], quick: bool, folder: Path | None) -> Section:
    rows = [_two_p_minus_one(), _target_monotone(quick), _special_is_optimistic(), *_iterations(names, quick, folder)]
    rows += [_judged(name, folder) for name in names]
    return Section(
        "Statements (ALGORITHMS 8, M2 to M7)",
        "M1, that 1F1B* keeps fewest micro-batches, is tested against all patterns of small instances "
        "(tests/solvers/schedules/periodic/test_one_f_one_b_star.py).",
        rows,
    )


def _two_p_minus_one() -> Row:
    """Check M3."""
    draw = random.Random(0)
    seen = 0
    for _ in range(2000):
        stages = draw.randint(2, 6)
        loads = [draw.randint(1, 9) for _ in range(2 * stages - 1)]
        seen += groups(loads, max(loads))[0] > 2 * stages - 1
    reached = groups([3] * 7, 3)[0]
    return Row(
        "M3: most activations on stage 1, P = 4",
        "2P - 1 = 7",
        f"{reached}, {seen} above of 2000",
        reached == 7 == 7 + seen,
    )


def _target_monotone(quick: bool) -> Row:
    """Check M2: what is possible at a target period is possible at every longer one."""
    draw = random.Random(1)
    wrong, count = 0, 40 if quick else 200
    for _ in range(count):
        layers = draw.randint(3, 12)
        chain = Chain.of_layers(
            [draw.randint(1, 9) for _ in range(layers)],
            [draw.randint(1, 20) for _ in range(layers)],
            [draw.randint(0, 9) for _ in range(layers)],
            [draw.randint(1, 9) for _ in range(layers + 1)],
            bandwidth_bytes_per_s=10**9,
            memory_bytes=draw.randint(60, 200),
            processors=draw.randint(2, 4),
        )
        least = chain.least_period_ns()
        for possible in (_with_special, at_period):
            answers = [bool(possible(chain, least * tenths // 10)) for tenths in range(10, 40, 3)]
            wrong += answers != sorted(answers)
    return Row("M2: what is possible at T̂ is possible at longer ones", "always", f"{wrong} violations", wrong == 0)


def _with_special(chain: Chain, period_ns: int) -> bool:
    return bool(special(line_of(chain), period_ns, False, Rounding(1, 1, 1), 10**6)[0] == EXISTS)


def _special_is_optimistic() -> Row:
    """Check M5: ALGORITHMS 4.3 at M = 6."""
    chain = Chain.of_layers(
        [10**9, 2 * 10**9, 10**9],
        [3 * 10**9, 4 * 10**9, 10**9],
        [0] * 3,
        [1000] * 4,
        bandwidth_bytes_per_s=8000,
        memory_bytes=6000,
        processors=2,
    )
    literal = special_optimum(chain, tight=False).allocations[0]
    pattern = solve(_line(chain, literal)).pattern
    tight = special_optimum(chain).allocations[0]
    valid = 0.0 if pattern is None else pattern.period_ns / 1e9
    good = abs(valid - 9.25) < 0.001 and abs(literal.period_ns / 1e9 - 6) < 0.001
    return Row(
        "M5: promised and valid period of the special example, M = 6",
        "6.0 and 9.25",
        f"{literal.period_ns / 1e9:.2f} and {valid:.2f}",
        good,
        f"the tightened memory promises {tight.period_ns / 1e9:.2f}; the contiguous optimum is 8",
    )


def _iterations(names: list[str], quick: bool, folder: Path | None) -> Iterator[Row]:
    """Check M6, on the paper's grid, and compare the grid with the exact search."""
    worst, after, missing, compared = 1.0, [], 0, 0
    for name in names[:1] if quick else names[:2]:
        for memory in MEMORIES_GB[1::3]:
            chain = _chain(name, 2 if quick else 4, memory, 12, folder)
            short, long = first_phase(chain, 10), first_phase(chain, 14 if quick else 40)
            exact = special_optimum(chain, tight=False).allocations
            compared += 1
            missing += bool(exact) and not short
            if short and long and exact:
                worst = max(worst, short[0].period_ns / long[0].period_ns)
                after.append(short[0].period_ns / exact[0].period_ns)
    yield Row("M6: K = 10 iterations over K = 40", "enough (1 %)", f"at most {worst:.4f}", worst <= 1.01)
    if after:
        yield Row(
            "the 101 × 11 × 51 grid over the exact search, same memory",
            "",
            f"{geometric_mean(after):.3f}, at most {max(after):.3f}",
            min(after) >= 1 - 1e-4,
            f"the grid finds nothing in {missing} of {compared}",
        )


def _judged(name: str, folder: Path | None) -> Row:
    """Compare the planner's whole answer, simulated, with the pattern's period."""
    processors, memory, bandwidth = 4, 8, 12
    names = tuple(f"gpu{d}" for d in range(processors))
    problem = replace(
        _base(name, folder),
        devices=tuple(Device(n, 0, "V100", memory * 10**9, 0, None) for n in names),
        network=Network(names, ("node",), (0,) * processors, (Inside("pairs", bandwidth * 10**9, 0, False),), ()),
        _costs={},
    )
    result = driver.solve(problem, "madpipe", options={"width": 1})
    expected = _case(name, processors, memory, bandwidth, folder).madpipe_ns
    what = f"{name}: judged over expected period, P = 4, M = 8 GB"
    if result.best is None:
        return Row(what, "about 1", "none", expected == 0, result.sentence)
    ratio = result.best.value_ns / MICRO_BATCHES / expected
    note = "the judged request has no transfer buffers, so other allocations fit" if abs(ratio - 1) > 0.001 else ""
    return Row(what, "about 1", f"{ratio:.3f}", 0.85 < ratio < 1.02, note)


@cache
def _case(name: str, processors: int, memory_gb: int, bandwidth_gb: int, folder: Path | None) -> Case:
    chain = _chain(name, processors, memory_gb, bandwidth_gb, folder)
    contiguous = contiguous_optimum(chain)
    below = None if contiguous is None else contiguous.period_ns
    searched = portfolio(chain, below)
    periods = [] if contiguous is None else [contiguous.period_ns]
    for allocation in searched.allocations:
        line = _line(chain, allocation)
        pattern = inside_out.smallest(line, below_ns=min(periods, default=None))
        periods += [] if pattern is None else [pattern.period_ns]
        answer = solve(line, below_ns=min(periods, default=None))
        periods += [] if answer.pattern is None else [answer.pattern.period_ns]
    partitions = [_pipedream(chain, position) for position in (False, True)]
    valid = [None if allocation is None else minimal_period_ns(_line(chain, allocation)) for allocation in partitions]
    return Case(
        network=name,
        processors=processors,
        memory_gb=memory_gb,
        bandwidth_gb=bandwidth_gb,
        sequential_ns=int(chain.load_ns[0, -1]),
        madpipe_promised_ns=searched.allocations[0].period_ns if searched.allocations else below or 0,
        madpipe_ns=min(periods, default=0),
        contiguous_ns=below or 0,
        pipedream_promised_ns=(_period(partitions[0]), _period(partitions[1])),
        pipedream_ns=(valid[0] or 0, valid[1] or 0),
    )


def _period(allocation: PartsAtPeriod | None) -> int:
    return 0 if allocation is None else allocation.period_ns


def _pipedream(chain: Chain, by_position: bool) -> PartsAtPeriod | None:
    """Run PipeDream's straight dynamic program (ALGORITHMS 4.5, 7.4), stages numbered from the last one."""
    n, processors = chain.size, chain.processors
    best = np.full((processors + 1, n + 1), np.inf)
    choice = np.zeros((processors + 1, n + 1), dtype=np.int64)
    best[0, n] = 0.0
    for p in range(1, processors + 1):
        resident = chain.fixed_bytes + (p if by_position else processors) * chain.kept_bytes[0] + chain.work_bytes[0]
        for k in range(n):
            load = chain.load_ns[0, k + 1 :] - chain.load_ns[0, k]
            reached = np.maximum(np.maximum(best[p - 1, k + 1 :], load), chain.hop_ns[-1, k])
            reached[resident[k, k + 1 :] > chain.available_bytes] = np.inf
            choice[p, k] = k + 1 + int(np.argmin(reached))
            best[p, k] = reached.min()
    p = int(np.argmin(best[:, 0]))
    if best[p, 0] == np.inf:
        return None
    parts, k, period = [], 0, int(best[p, 0])
    while k < n:
        parts.append(Part(k, int(choice[p, k]), 0))
        k, p = int(choice[p, k]), p - 1
    return PartsAtPeriod(period, tuple(parts))


def _line(chain: Chain, allocation: PartsAtPeriod) -> StageLine:
    """Return the stages of an allocation of the paper's model."""
    forward = [int(chain.forward_ns[part.after] - chain.forward_ns[part.first]) for part in allocation.parts]
    hops = [int(chain.hop_ns[-1, part.after]) // 2 for part in allocation.parts[:-1]]
    place: list[int] = []
    special: int | None = None
    for part in allocation.parts:
        fresh = len(set(place))
        place.append(special if part.special and special is not None else fresh)
        special = place[-1] if part.special else special
    return StageLine(
        tuple(forward),
        tuple(chain.load(part.first, part.after) - f for part, f in zip(allocation.parts, forward, strict=True)),
        tuple(hops),
        tuple(hops),
        tuple(place),
        tuple(int(chain.fixed_bytes[part.first, part.after]) for part in allocation.parts),
        tuple(int(chain.kept_bytes[0, part.first, part.after]) for part in allocation.parts),
        (0,) * len(allocation.parts),
        (chain.available_bytes,) * (max(place) + 1),
        chain.most_in_flight,
    )


def _chain(name: str, processors: int, memory_gb: int, bandwidth_gb: int, folder: Path | None) -> Chain:
    """Return the network in the paper's model (section 4.1)."""
    base = _base(name, folder)
    costs = base.costs("V100", MICRO_BATCH)
    return Chain.of_layers(
        np.diff(costs.forward_ns).tolist(),
        np.diff(costs.backward_ns).tolist(),
        np.diff(base.parameter_bytes).tolist(),
        [*np.diff(costs.stash_bytes).tolist(), 0],
        bandwidth_bytes_per_s=bandwidth_gb * 10**9,
        memory_bytes=memory_gb * 10**9,
        processors=processors,
    )


@cache
def _base(name: str, folder: Path | None) -> Problem:
    """Return the network at 1000 × 1000 as a request; each layer's stash is its input. Weights do not grow."""
    model, side = _model(name, folder)
    request = PlanRequest(
        profile=model,
        topology=cluster("1x8xV100"),
        global_batch_size=MICRO_BATCH * MICRO_BATCHES,
        micro_batch_sizes=(MICRO_BATCH,),
        update_rules=("double_buffered",),
        memory=MemoryModel(optimizer="sgd", precision="full", buffers="none"),
        recompute="never",
        network=NetworkModel(sharing="private", transfer="madpipe", channel="half"),
    )
    problem = to_problem(request)
    pixels = SIDE * SIDE / (side * side)
    costs = problem.costs("V100", MICRO_BATCH)
    cuts = [i + 1 for i, crossing in enumerate(problem.boundary_tensors) if len(crossing) == 1]
    at = [0, *cuts, problem.num_layers]
    forward, backward, weight = (
        _grown(np.diff(each[at]), pixels) for each in (costs.forward_ns, costs.backward_ns, costs.weight_ns)
    )
    sent = _grown(problem.forward_bytes[[cut - 1 for cut in cuts]], pixels)
    inputs = np.concatenate(([IMAGE_BYTES], sent)) * MICRO_BATCH
    return replace(
        problem,
        layer_names=tuple(problem.layer_names[cut] for cut in at[:-1]),
        parameter_bytes=problem.parameter_bytes[at],
        trainable_bytes=problem.trainable_bytes[at],
        update_ns=np.zeros_like(forward, shape=len(at)),
        measured={"V100": (Measured(MICRO_BATCH, forward, backward, weight, inputs, np.zeros_like(inputs)),)},
        kind_source={"V100": ("V100", 1.0)},
        forward_bytes=sent,
        backward_bytes=sent,
        boundary_tensors=tuple(problem.boundary_tensors[cut - 1] for cut in cuts),
        cuttable=np.ones(len(cuts), dtype=bool),
        _costs={},
    )


def _grown(values: np.ndarray, pixels: float) -> np.ndarray:
    return np.ceil(values * pixels).astype(np.int64)


def _model(name: str, folder: Path | None) -> tuple[ModelProfile, int]:
    if folder is None or name not in TEXTS:
        return profile(name), SIDES[name]
    file, size = TEXTS[name]
    return read_profile((folder / file).read_text(), name=name, micro_batch_size=size), 224


if __name__ == "__main__":
    main("MadPipe", sections)
