"""AvgPipe's algorithm 1 during training: the search for the fastest number of forwards in advance.

It is in section 4.2 of the paper (ALGORITHMS 6.2).

Step i of the ladder, ``rung``, is the program with δ = i, lowered ahead; the ladder ends where memory does. Starting at
1F1B, a program runs for some iterations. While the next one is faster the search goes on; the first one that is not is
left for good. The class is pure: it receives times and returns rungs. All ranks must pass the same times.

Symbols: adv_1 - (K - 1) -> the rung. Faster means by more than 1 % of the mean of at least three iterations (R-31). One
difference from the paper: the first iteration on a rung is not counted, since it allocates memory for the later ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MARGIN = 0.01
ITERATIONS = 3
WARMUP = 1


@dataclass
class Ladder:
    """State of the search over δ: ``rung`` indexes the next iteration's program; ``settled``: the search is over.

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
        """Return the rung of the next iteration, after an iteration on the present rung that took ``time_ns``."""
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
