"""Planning, scheduling, judging and proving, on plain frozen arrays.

May import: the standard library; of ours `schemas.program`, `.notation`, `.coverage`, `.errors` and `.amounts`.
Start reading at `model/problem.py` (a question), then `solve/` (how it is answered) and `judge/simulate.py`.
"""
