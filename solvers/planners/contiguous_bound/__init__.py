"""`relax`: a bound on every plan of one contiguous pipeline, and the plans that the bound belongs to.

May import: `solvers.model`, `solvers.bounds`, `solvers.schedules`, `solvers.improve`.
Start reading at `planner.py`.
"""
