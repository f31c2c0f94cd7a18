"""What a judged plan's time is made of, what binds it, and what would make it shorter. Pure: no input, no output.

May import: `solvers.model`, `solvers.costs`, `solvers.judge`, `solvers.bounds`, `solvers.schedules`,
`solvers.improve`, `solvers.planners`, `solvers.solve`.
Start reading at `run.py`.
"""
