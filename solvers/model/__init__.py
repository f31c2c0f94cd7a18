"""The frozen problem and every value that a plan is made of: allocation, schedule, timeline, result, pins, options.

May import: nothing of `solvers`.
Start reading at `problem.py`, then `allocation.py` and `schedule.py`.
"""
