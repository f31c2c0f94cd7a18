"""Algorithm 1 as the paper has it: MadPipe-DP on its grid at K target periods (section 4.2, option ``paper``).

R-21: the upper bound sums C over the boundaries 1 … L - 1.
"""

from __future__ import annotations

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.planners.madpipe.chain import Chain
from penstock.solvers.planners.madpipe.contiguous import Part, PartsAtPeriod, line_of
from penstock.solvers.planners.madpipe.grid_kernel import grid
from penstock.solvers.planners.madpipe.label_kernel import EXISTS, SPECIAL, TOO_MANY

ITERATIONS = 10
MOST_STATES = 2**26


def first_phase(chain: Chain, iterations: int = ITERATIONS) -> list[PartsAtPeriod]:
    """Return the distinct allocations met, the one with the smallest max(T, T̂) first; empty where the grid finds none.

    Raises ``UnsupportedRequest`` where the grid's states would not fit in memory.
    """
    total = int(chain.load_ns[0, -1])
    low = total / chain.processors
    high = float(total + int(chain.hop_ns.max(axis=0).sum()))
    target = low
    met: dict[tuple[Part, ...], float] = {}
    for _ in range(iterations):
        status, period, stages = grid(line_of(chain), target, high, MOST_STATES)
        if status == TOO_MANY:
            raise UnsupportedRequest(
                f"the paper's grid over {chain.size} layers and {chain.processors} processors has more than "
                f"{MOST_STATES} states",
                remedy="paper false",
            )
        if status == EXISTS:
            parts = tuple(Part(k, j, how % SPECIAL, how >= SPECIAL) for k, j, how in stages.tolist())
            met[parts] = min(met.get(parts, max(period, target)), max(period, target))
        low = max(low, min(period, target))
        high = min(high, max(period, target))
        target = (low + high) / 2
    ranked = sorted(met.items(), key=lambda item: item[1])
    return [PartsAtPeriod(int(-(-period // 1)), parts) for parts, period in ranked]
