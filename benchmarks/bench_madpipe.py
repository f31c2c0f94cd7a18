"""MadPipe's searches: how long they take, and that the exact one is never worse than the paper's grid.

Prints ``name value unit target ok|MISSED`` for each row. Times are of this thread, with compiled code from the cache.
Memory is a multiple of the weights and one micro-batch's activations, shared evenly. With
``--profiles DIR`` (PipeDream's profile texts) ResNet-101 is the profiled graph as a chain of 346 operations, otherwise
the shipped analytic one of 68 layers.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from penstock.examples.catalogue import profile
from penstock.importers.pipedream import read_profile
from penstock.schemas.profile import ModelProfile
from penstock.solvers.planners.madpipe.chain import Chain
from penstock.solvers.planners.madpipe.contiguous import contiguous_optimum
from penstock.solvers.planners.madpipe.labels import TOLERANCE, Searched, special_optimum
from penstock.solvers.planners.madpipe.paper import first_phase

MEMORIES = (1.6, 2.5, 8.0)
BANDWIDTH_BYTES_PER_S = 12 * 10**9
FRESH = """
import time
from penstock.solvers.planners.madpipe.chain import Chain
from penstock.solvers.planners.madpipe.contiguous import contiguous_optimum
from penstock.solvers.planners.madpipe.labels import special_optimum
chain = Chain.of_layers([5, 6, 7], [9, 9, 9], [1, 1, 1], [4, 3, 2, 1], bandwidth_bytes_per_s=10**9,
                        memory_bytes=60, processors=2)
began = time.perf_counter()
contiguous_optimum(chain)
special_optimum(chain)
print(time.perf_counter() - began)
"""


class Layers:
    """A chain's layers, for any number of processors with any memory."""

    def __init__(self, forward: np.ndarray, backward: np.ndarray, weights: np.ndarray, activations: np.ndarray) -> None:
        self._lists = [values.astype(np.int64).tolist() for values in (forward, backward, weights, activations)]
        self.count = len(forward)
        self._whole_bytes = int(3 * weights.sum() + activations[:-1].sum())

    def chain(self, processors: int, memory: float) -> Chain:
        """Return the chain on this number of processors, each with ``memory`` times an even share."""
        forward, backward, weights, activations = self._lists
        return Chain.of_layers(
            forward,
            backward,
            weights,
            activations,
            bandwidth_bytes_per_s=BANDWIDTH_BYTES_PER_S,
            memory_bytes=int(self._whole_bytes * memory / processors),
            processors=processors,
        )


def main() -> None:
    """Measure speed, then quality against the grid, then a fresh process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=Path, help="folder with PipeDream's profile texts")
    arguments = parser.parse_args()
    _search(_random(6).chain(2, 4.0))
    resnet = _resnet(arguments.profiles)
    for memory in MEMORIES:
        _speed("resnet-101", resnet, 8, memory, 0.5 if resnet.count < 100 else 5.0)
    for memory in MEMORIES:
        _speed("random", _random(350), 8, memory, 5.0)
    _speed("random", _random(200), 16, MEMORIES[0], 10.0)
    _grid()
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=True)
    _print("first search of a fresh process", float(done.stdout), "s", 1.0)


def _speed(name: str, layers: Layers, processors: int, memory: float, target: float) -> None:
    """Measure the contiguous optimum and the search below it, as the planner runs them."""
    chain = layers.chain(processors, memory)
    seconds, searched = _timed(lambda: _search(chain))
    exact = "exact" if searched.exact else "rounded"
    label = f"{name} L={chain.size} P={processors} memory x{memory}, {searched.labels} labels, {exact}"
    _print(label, seconds, "s", target)


def _search(chain: Chain) -> Searched:
    contiguous = contiguous_optimum(chain)
    return special_optimum(chain, below_ns=None if contiguous is None else contiguous.period_ns)


def _timed(run: Callable[[], Searched]) -> tuple[float, Searched]:
    began = time.thread_time()
    result = run()
    return time.thread_time() - began, result


def _grid() -> None:
    """Compare the grid with the exact search under the same memory model (literal g - 1).

    Prints how much longer the grid's periods are, and how often it finds no allocation.
    """
    ratios, faster, missing, worse = [], [], 0, 0
    for count in (12, 25, 40):
        for processors in (2, 4):
            for memory in (*MEMORIES, 4.0):
                chain = _random(count).chain(processors, memory)
                began = time.thread_time()
                grid = first_phase(chain)
                middle = time.thread_time()
                exact = special_optimum(chain, tight=False).allocations
                faster.append((middle - began) / (time.thread_time() - middle))
                if grid and exact:
                    ratios.append(grid[0].period_ns / exact[0].period_ns)
                    worse += exact[0].period_ns > grid[0].period_ns * (1 + 1 / TOLERANCE)
                worse += bool(grid) and not exact
                missing += bool(exact) and not grid
    _print(f"exact search worse than the grid, of {len(faster)} chains", worse, "chains", 0)
    print(f"grid finds nothing where the exact search does {missing} chains", flush=True)
    print(f"grid's period over the exact one, geometric mean {_mean(ratios):.3f} x, at most {max(ratios):.3f} x")
    print(f"grid's time over the exact one's, geometric mean {_mean(faster):.0f} x", flush=True)


def _mean(values: list[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def _print(name: str, value: float, unit: str, target: float) -> None:
    print(f"{name} {value:.3g} {unit} {target} {'ok' if value <= target else 'MISSED'}", flush=True)


def _resnet(folder: Path | None) -> Layers:
    if folder is None:
        return _layers(profile("resnet-101"))
    text = (folder / "resnet101.txt").read_text()
    return _layers(read_profile(text, name="resnet-101", micro_batch_size=128))


def _layers(model: ModelProfile) -> Layers:
    """Return a measurement's chain; what a layer keeps is taken as its input."""
    measured = model.measurements[0]
    rows = measured.micro_batch_size
    sent = [sum(tensor.bytes_per_sample for tensor in boundary) * rows for boundary in model.boundaries]
    return Layers(
        np.asarray([layer.forward_ns for layer in measured.layers]),
        np.asarray([layer.backward_ns for layer in measured.layers]),
        np.asarray([layer.parameter_bytes for layer in model.layers]),
        np.asarray([sent[0], *sent, 0]),
    )


def _random(count: int) -> Layers:
    """Return a random network.

    Time and activations shrink along the chain, weights grow, all unevenly.
    """
    draw = np.random.default_rng(count)
    place = np.linspace(0, 1, count)
    load = np.exp(draw.normal(0, 0.45, count)) * (1.3 - 0.6 * place) * 10**7
    activations = np.exp(draw.normal(0, 0.3, count + 1) - 2.5 * np.linspace(0, 1, count + 1)) * 4e8
    weights = np.exp(draw.normal(0, 0.5, count) + 2.5 * place) * 1.5e6
    return Layers(load / 3, load * 2 / 3, weights, activations)


if __name__ == "__main__":
    main()
