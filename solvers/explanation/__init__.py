"""Explanations of a simulated plan: the parts of its time, its limits, and changes that would make it shorter.

Pure: no input, no output.

May import: `solvers.model`, `solvers.costs`, `solvers.judge`, `solvers.schedules`, `solvers.bounds`,
`solvers.improve`, `solvers.planners`, `solvers.degrees`.
Start reading at `what_if.py`.
"""
