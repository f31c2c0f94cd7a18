"""`relax`: a bound on every plan of one contiguous pipeline, and the plans that it belongs to.

May import: `solvers.model`, `solvers.bounds`, `solvers.schedules`, `solvers.improve`.
Start reading at `planner.py`.
"""
