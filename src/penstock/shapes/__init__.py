"""Shapes of transformers: parameters, legal degrees of parallelism, memory per GPU and times, in closed form.

May import: `schemas`, `facts`.
Start reading at `memory.py`; `layout.py` has the words, `legality.py` the rules, `costs/` times, `profiles.py` both.
"""
