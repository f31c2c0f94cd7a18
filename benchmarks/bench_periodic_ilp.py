"""The periodic ILP: how long a proof takes, and what MadPipe's plans gain by it on fresh chains.

Prints ``name value unit target ok|MISSED`` for each row; times are of this process, HiGHS on one thread. The joint
optimum is over every way to put layers on processors; fresh chains follow the paper's model, 50 layers, at 12 GB/s.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import NamedTuple

import chains
import numpy as np

from penstock.solvers.model.problem import MemoryRules, NetworkRules, Problem
from penstock.solvers.planners.madpipe import planner as madpipe
from penstock.solvers.planners.madpipe.chain import Chain
from penstock.solvers.planners.madpipe.contiguous import PartsAtPeriod, contiguous_optimum
from penstock.solvers.planners.madpipe.labels import portfolio
from penstock.solvers.schedules.periodic import inside_out
from penstock.solvers.schedules.periodic.ilp import solve
from penstock.solvers.schedules.periodic.one_f_one_b_star import chain_loads, groups
from penstock.solvers.schedules.support.stage_line import StageLine
from penstock.solvers.solve import driver

TARGETS_S = {4: 3.0, 6: 3.0, 8: 3.0, 10: 3.0, 12: 3.0, 16: 8.0}
MILLION = 10**6
LAYERS = 50
BANDWIDTH_BYTES_PER_S = 12_000 * MILLION


def invented_line(count: int, shared: int, seed: int, *, tight: bool) -> StageLine:
    """Return stages of about equal work.

    ``shared`` of them, no neighbours, are on processor 0, which has enough memory for some.
    """
    draw = np.random.default_rng(seed)
    special: list[int] = []
    while len(special) < shared:
        special = []
        for s in draw.permutation(count).tolist():
            if len(special) < shared and all(abs(s - other) > 1 for other in special):
                special.append(s)
    free = iter(range(1, count))
    processor = [0 if s in special else next(free) for s in range(count)]
    load = draw.uniform(0.75, 1.0, count)
    load[special] /= shared
    hops = [int(h * MILLION) for h in draw.uniform(0.03, 0.3, count - 1)]
    kept = draw.uniform(0.5, 1.0, count) * np.exp(-0.1 * np.arange(count)) * MILLION
    line = StageLine(
        forward_ns=tuple(int(f) for f in load * MILLION / 3),
        backward_ns=tuple(int(b) for b in load * MILLION * 2 / 3),
        hop_forward_ns=tuple(hops),
        hop_backward_ns=tuple(hops),
        processor=tuple(processor),
        fixed_bytes=(0,) * count,
        kept_bytes=tuple(int(k) for k in kept),
        work_bytes=(0,) * count,
        available_bytes=(0,) * (max(processor) + 1),
        most_in_flight=MILLION,
    )
    room = [0.0] * len(line.available_bytes)
    for s, group in enumerate(groups(chain_loads(line), line.load_bound_ns())[::2]):
        if processor[s] == 0:
            room[0] += kept[s] * (group - 1)
        else:
            room[processor[s]] = kept[s] * max(1, group - int(tight and draw.random() < 0.3))
    largest = float(kept[special].max())
    room[0] = max(room[0] + largest * (0.6 if tight else 1.3), largest)
    return replace(line, available_bytes=tuple(int(r) for r in room))


def speed(counts: list[int], seeds: int) -> None:
    """Measure lines of every size.

    Prints the longest time until the proof, and how much shorter than inside-out the pattern is.
    """
    for count in counts:
        seconds, unproven, gains = [], 0, []
        for seed in range(seeds):
            for tight in (False, True):
                line = invented_line(count, 2 if count < 8 else 3, seed, tight=tight)
                began = time.process_time()
                answer = solve(line)
                seconds.append(time.process_time() - began)
                unproven += not answer.proven
                pattern = inside_out.smallest(line)
                if pattern is not None and answer.pattern is not None:
                    gains.append(answer.pattern.period_ns / pattern.period_ns)
        row(f"{count} stages, longest of {len(seconds)}", max(seconds), "s", TARGETS_S[count])
        row(f"{count} stages, not proven", unproven, "lines", 0)
        print(f"{count} stages, period over inside-out's, geometric mean {_mean(gains):.3f} x", flush=True)


class Layers(NamedTuple):
    """Forward and backward ns, weight bytes, and the bytes of the tensor before each layer and after the last."""

    forward: list[int]
    backward: list[int]
    weights: list[int]
    inputs: list[int]

    def memory_bytes(self, processors: int, memory: float) -> int:
        """Return ``memory`` times an even share of three copies of the weights and one micro-batch's activations."""
        return int((3 * sum(self.weights) + sum(self.inputs[:-1])) * memory / processors)


def fresh_layers(seed: int, count: int) -> Layers:
    """Return layers by the generator's rules.

    Work and activations shrink along the chain, weights grow, all unevenly.
    """
    draw = np.random.default_rng(seed)
    place = np.linspace(0, 1, count)
    load = np.exp(draw.normal(0, 0.45, count)) * (1.3 - 0.6 * place) * 10 * MILLION
    inputs = np.exp(draw.normal(0, 0.3, count + 1)) * np.exp(-2.5 * np.linspace(0, 1, count + 1)) * 400 * MILLION
    weights = np.exp(draw.normal(0, 0.5, count)) * np.exp(2.5 * place) * 1.5 * MILLION
    return Layers(*(values.astype(np.int64).tolist() for values in (load / 3, load * 2 / 3, weights, inputs)))


def fresh_chain(seed: int, processors: int, memory: float, count: int = LAYERS) -> Chain:
    """Return a chain in the paper's model (section 4.1)."""
    layers = fresh_layers(seed, count)
    return Chain.of_layers(
        *layers,
        bandwidth_bytes_per_s=BANDWIDTH_BYTES_PER_S,
        memory_bytes=layers.memory_bytes(processors, memory),
        processors=processors,
    )


def fresh_problem(seed: int, processors: int, memory: float) -> Problem:
    """Return the chain as a request, without transfer buffers: each layer's stash is its input."""
    layers = fresh_layers(seed, LAYERS)
    forward, backward, inputs = (np.asarray(each) for each in (layers.forward, layers.backward, layers.inputs))
    return chains.chain(
        chains.star((processors,), BANDWIDTH_BYTES_PER_S, 0, full_duplex=False),
        forward,
        inputs[1:-1],
        np.asarray(layers.weights),
        batch=2 * processors,
        sizes=(1,),
        rules=NetworkRules(False, "half", "madpipe", "flat", 25 * MILLION, False),
        backward_ns=backward,
        weight_ns=backward // 2,
        stash_bytes=inputs[:-1],
        memory_bytes=layers.memory_bytes(processors, memory),
        memory=MemoryRules(1, 0, False, 0, False),
        update_rules=frozenset({"double_buffered"}),
    )


def line_on(chain: Chain, bounds: Sequence[int], places: Sequence[int]) -> StageLine:
    """Return the stages between these boundaries of a chain on these processors."""
    spans = list(pairwise(bounds))
    forward = [int(chain.forward_ns[after] - chain.forward_ns[first]) for first, after in spans]
    hops = tuple(int(chain.hop_ns[-1, after]) // 2 for _first, after in spans[:-1])
    return StageLine(
        tuple(forward),
        tuple(chain.load(*span) - f for span, f in zip(spans, forward, strict=True)),
        hops,
        hops,
        tuple(places),
        tuple(int(chain.fixed_bytes[span]) for span in spans),
        tuple(int(chain.kept_bytes[0, first, after]) for first, after in spans),
        (0,) * len(spans),
        (chain.available_bytes,) * (max(places) + 1),
        chain.most_in_flight,
    )


def line_of_found(chain: Chain, solution: PartsAtPeriod) -> StageLine:
    """Return the line of a search's allocation: normal stages on separate processors, special ones on one."""
    free = iter(range(1, len(solution.parts) + 1))
    places = [0 if part.special else next(free) for part in solution.parts]
    numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
    return line_on(chain, [0, *(part.after for part in solution.parts)], [numbers[place] for place in places])


class Gain(NamedTuple):
    """Shortest periods in ns of one case, None where there is no plan: contiguous, by list scheduling, by the ILP."""

    contiguous: int | None
    listed: int | None
    solved: int | None
    unproven: int
    allocations: int


def shortest(chain: Chain) -> Gain:
    """Return the contiguous optimum, and the best pattern of every allocation of the planner's search."""
    optimum = contiguous_optimum(chain)
    contiguous = None if optimum is None else optimum.period_ns
    listed, solved, unproven = contiguous, contiguous, 0
    searched = portfolio(chain, contiguous).allocations
    for allocation in searched:
        line = line_of_found(chain, allocation)
        pattern = inside_out.smallest(line, below_ns=listed)
        listed = listed if pattern is None else pattern.period_ns
        answer = solve(line, below_ns=solved)
        solved = solved if answer.pattern is None else answer.pattern.period_ns
        unproven += not answer.proven
    return Gain(contiguous, listed, solved, unproven, len(searched))


def fresh(seeds: Sequence[int]) -> None:
    """Compare MadPipe's final periods with the exact contiguous optimum."""
    gains = [
        shortest(fresh_chain(seed, processors, memory))
        for seed, processors, memory in product(seeds, (4, 8), (1.6, 2.5, 4.0, 8.0))
    ]
    for name, periods in (("inside-out", [g.listed for g in gains]), ("periodic ILP", [g.solved for g in gains])):
        both = [(p, g.contiguous) for p, g in zip(periods, gains, strict=True) if p and g.contiguous]
        ratios = [p / c for p, c in both]
        shorter = sum(r < 1 for r in ratios)
        row(f"{name} over contiguous, geometric mean of {len(ratios)} cases", _mean(ratios), "x", 0.97)
        print(f"{name}: shorter than contiguous in {shorter}, at least {min(ratios):.3f} x", flush=True)
    alone = sum(g.solved is not None and g.contiguous is None for g in gains)
    print(f"only with a special processor {alone} of {len(gains)} cases, {sum(g.allocations for g in gains)} ILPs")
    none = [g for g in gains if g.solved is None]
    row("no plan, yet the search does not refute every allocation", sum(g.allocations > 0 for g in none), "cases", 0)
    print(f"no allocation fits in {sum(g.allocations == 0 for g in none)} cases", flush=True)
    row("periodic ILPs that were not proven", sum(g.unproven for g in gains), "ILPs", 0)


def judged(seeds: Sequence[int]) -> None:
    """Compare the planner's whole answer, simulated, with its answer with contiguous allocations alone."""
    ratios, worse, alone, neither = [], 0, 0, 0
    for seed, processors, memory in product(seeds, (4, 8), (1.6, 2.5, 4.0, 8.0)):
        problem = fresh_problem(seed, processors, memory)
        both = driver.solve(problem, "madpipe", options={"width": 1}).best
        optima = [
            plan
            for setup, optimum in madpipe._contiguous(madpipe._setups(problem, 1))
            for plan in madpipe._plans_of(problem, setup, [] if optimum is None else [optimum])
        ]
        contiguous = driver.judged(problem, "madpipe", (madpipe._proposal(problem, plan) for plan in optima)).best
        if both is not None and contiguous is not None:
            ratios.append(both.value_ns / contiguous.value_ns)
        worse += contiguous is not None and (both is None or both.value_ns > contiguous.value_ns)
        alone += both is not None and contiguous is None
        neither += both is None and contiguous is None
    row(f"judged plans over contiguous ones, geometric mean of {len(ratios)} cases", _mean(ratios), "x", 0.97)
    row("judged plans worse than contiguous ones", worse, "cases", 0)
    shorter = sum(r < 1 for r in ratios)
    print(
        f"judged: shorter in {shorter}, at least {min(ratios):.3f} x; only with a special processor {alone}, ", end=""
    )
    print(f"no plan {neither}", flush=True)


def joint_optimum(chain: Chain) -> int | None:
    """Return the smallest period of any allocation and pattern.

    Every way to put layers on processors has an ILP. Neighbouring layers on one processor are one stage. The least
    loaded come first, and only shorter patterns than the
    best so far are searched. The ILP of MadPipe's reference [1] decides the same.
    """
    lines = []
    for places in _layouts(chain.size, chain.processors):
        bounds = [0, *(i for i in range(1, chain.size) if places[i] != places[i - 1]), chain.size]
        lines.append(line_on(chain, bounds, [places[i] for i in bounds[:-1]]))
    best: int | None = None
    for line in sorted(lines, key=lambda line: line.load_bound_ns()):
        if best is not None and line.load_bound_ns() >= best:
            break
        answer = solve(line, below_ns=best)
        assert answer.proven
        best = best if answer.pattern is None else answer.pattern.period_ns
    return best


def _layouts(layers: int, processors: int) -> Iterator[tuple[int, ...]]:
    """Yield the processor of each layer, processors numbered as they appear."""
    layouts: list[tuple[int, ...]] = [(0,)]
    for _ in range(layers - 1):
        layouts = [(*way, place) for way in layouts for place in range(min(max(way) + 2, processors))]
    yield from layouts


def joint(seeds: Sequence[int]) -> None:
    """Compare MadPipe with the optimum over all allocations and patterns."""
    gaps, missing = [], 0
    for seed in seeds:
        for layers, processors in ((6, 2), (7, 3), (8, 3)):
            for memory in (1.6, 2.5, 4.0):
                chain = fresh_chain(seed, processors, memory, layers)
                best, ours = joint_optimum(chain), shortest(chain).solved
                if best is not None and ours is not None:
                    gaps.append(ours / best)
                missing += best is not None and ours is None
    print(f"MadPipe over the joint optimum, geometric mean of {len(gaps)} cases {_mean(gaps):.4f} x", flush=True)
    print(f"equal in {sum(gap < 1.0001 for gap in gaps)}, at most {max(gaps):.3f} x, none found {missing}", flush=True)


def row(name: str, value: float, unit: str, target: float) -> None:
    """Print a line of the report."""
    print(f"{name} {value:.3g} {unit} {target} {'ok' if value <= target else 'MISSED'}", flush=True)


def _mean(values: list[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def main() -> None:
    """Measure speed, the joint optimum, then fresh chains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two seeds")
    arguments = parser.parse_args()
    speed(list(TARGETS_S), 2 if arguments.quick else 5)
    joint(range(1000, 1001 if arguments.quick else 1005))
    fresh(range(1000, 1001 if arguments.quick else 1005))
    judged(range(1000, 1001 if arguments.quick else 1005))


if __name__ == "__main__":
    main()
