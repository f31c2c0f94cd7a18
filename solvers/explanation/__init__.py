"""What a simulated plan's time is made of, what binds it, and what would make it shorter. Pure: no input, no output.

May import: `solvers.model`, `solvers.costs`, `solvers.judge`, `solvers.bounds`, `solvers.schedules`, `solvers.improve`,
`solvers.planners.proposal`; planning a changed problem is a function that is passed in.
Start reading at `what_if.py`.
"""
