"""Regular layouts and cuts of the chain, which planners share: ranks × replicas × parts in turn × micro-batches.

Planner packages choose among these, and do not import each other.

May import: `solvers.model`, `solvers.compiled`, `solvers.costs`.
Start reading at `places.py`, then `block_partition.py` and `parts_in_turn.py`.
"""
