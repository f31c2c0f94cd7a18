"""Shapes of transformers: parameters, legal degrees of parallelism, memory per GPU and times, in closed form.

May import: `schemas`, `facts`.
Start reading at `gpu_memory.py`; `layout.py` has words, `legality.py` rules, `costs/` times, `profiles.py` both.
"""
