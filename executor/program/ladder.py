"""AvgPipe's algorithm 1 while training: how many forwards in advance are fastest (section 4.2; ALGORITHMS 6.2).

Rung i of the ladder is the program with δ = i, lowered ahead; the ladder ends where memory does. Starting at 1F1B, a
rung is tried for some iterations; while the next one is faster the climb goes on, and the first that is not is left
again for good. Pure: takes times, returns rungs. All ranks have to pass the same times.

Symbols: adv_1 - (K - 1) -> the rung. Faster is more than 1 % of the mean of at least three iterations (R-31). Differs
from the paper: the first iteration on a rung is not counted, since it allocates what the ones after it reuse.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MARGIN = 0.01
ITERATIONS = 3
WARMUP = 1


@dataclass
class Ladder:
    """Where the climb is. ``rung`` is the program of the next iteration; once ``settled`` it stays.

    Raises ValueError for a ladder without a rung or a mean over nothing.
    """

    num_rungs: int
    iterations: int = ITERATIONS
    margin: float = MARGIN
    rung: int = 0
    settled: bool = False
    _times_ns: list[int] = field(default_factory=list)
    _before_ns: float | None = None

    def __post_init__(self) -> None:
        if self.num_rungs < 1 or self.iterations < 1:
            raise ValueError(f"expected rungs and iterations, got {self.num_rungs} and {self.iterations}")
        self.settled = self.settled or self.num_rungs == 1

    def after_step(self, time_ns: int) -> int:
        """The rung of the next iteration, after one on the present rung that took ``time_ns``."""
        if self.settled:
            return self.rung
        self._times_ns.append(time_ns)
        if len(self._times_ns) < WARMUP + self.iterations:
            return self.rung
        mean_ns = sum(self._times_ns[WARMUP:]) / self.iterations
        self._times_ns.clear()
        if self._before_ns is not None and mean_ns >= (1 - self.margin) * self._before_ns:
            self.rung -= 1
            self.settled = True
        elif self.rung == self.num_rungs - 1:
            self.settled = True
        else:
            self._before_ns = mean_ns
            self.rung += 1
        return self.rung
