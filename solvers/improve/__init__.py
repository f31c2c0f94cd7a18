"""Ways from a plan to a better one: local search, recomputation, orders of operations, job shop, tabu search, remedies.

May import: `solvers.model`, `solvers.compiled`, `solvers.costs`, `solvers.degrees`, `solvers.judge`,
`solvers.schedules`, `solvers.bounds`.
Start reading at `order.py`.
"""
