"""Planning, scheduling, judging and proving, on plain frozen arrays.

May import: `schemas`, of which only files that need no more than the standard library.
Start reading at `model/problem.py` (a question), then `solve/` (how it is answered) and `judge/simulate.py`.
"""
