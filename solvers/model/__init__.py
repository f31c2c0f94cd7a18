"""The frozen problem and every value that a plan is made of: allocation, schedule, timeline, result, pins, options.

May import: `penstock.schemas.errors`, `.program`, `.coverage`, `.amounts` only.
Start reading at `problem.py`, then `allocation.py` and `schedule.py`.
"""
