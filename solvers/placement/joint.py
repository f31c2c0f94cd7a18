"""Numbers of hosts for several jobs, so that the weighted sum of their throughputs is largest.

Exact over the numbers of hosts that were planned: a dynamic program over jobs and hosts, O(jobs × hosts × numbers). It
takes a job's throughput on n hosts as if it were alone; the sets are placed job by job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def shares(worth: Sequence[Mapping[int, float]], hosts: int) -> list[int]:
    """Return each job's number of hosts; ``worth[j][n]``: the value of n hosts to job j. Ties: the fewest hosts."""
    best: list[tuple[float, int, tuple[int, ...]]] = [(0.0, 0, ()) for _ in range(hosts + 1)]
    for options in worth:
        following = []
        for room in range(hosts + 1):
            candidates = [(value, used, (*numbers, 0)) for value, used, numbers in [best[room]]]
            for number, gain in options.items():
                if number <= room:
                    value, used, numbers = best[room - number]
                    candidates.append((value + gain, used + number, (*numbers, number)))
            following.append(min(candidates, key=lambda each: (-each[0], each[1], each[2])))
        best = following
    return list(best[hosts][2])
